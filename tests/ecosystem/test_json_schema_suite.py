"""JSON Schema's own test suite: a strict schema is enforced exactly, or refused with keyword and path.

It is read from the folder in the variable JSON_SCHEMA_TEST_SUITE, a copy of `tests` of
https://github.com/json-schema-org/JSON-Schema-Test-Suite, else downloaded; skipped if the download fails.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import urllib.request
from pathlib import Path

import pytest
from support.byte_grammars import admits, byte_tokenizer

from token_recycling.grammar.compile import compiled

ARCHIVE = "https://github.com/json-schema-org/JSON-Schema-Test-Suite/archive/refs/heads/main.tar.gz"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
ANNOTATIONS = {"content.json"}
"""Files about keywords that validators may ignore, and ignore by default."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("JSON_SCHEMA_TEST_SUITE"):
        return Path(folder)
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=60) as answer:
            archive = answer.read()
    except OSError as error:
        pytest.skip(f"the suite cannot be downloaded: {error}")
    folder = tmp_path_factory.mktemp("suite")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return next(folder.glob("*/tests"))


@pytest.mark.nightly
@pytest.mark.parametrize("draft", DRAFTS)
def test_admitted_values_are_valid(suite, draft):
    tokenizer, enforced, admitted, unnamed, wrong = byte_tokenizer(), 0, 0, list[str](), list[object]()
    groups = [
        group
        for path in sorted((suite / draft).rglob("*.json"))
        if path.name not in ANNOTATIONS
        for group in json.loads(path.read_text())
    ]
    for group in groups:
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        try:
            grammar = compiled(tokenizer, "json_schema", schema)
        except ValueError as error:
            unnamed += [] if re.match("#[^:]*: ", str(error)) else [str(error)]
            continue
        enforced += 1
        for case in group["tests"]:
            if admits(grammar, json.dumps(case["data"], ensure_ascii=False)):
                admitted += 1
                wrong += [] if case["valid"] else [(schema, case["data"])]
    assert wrong == []
    assert unnamed == []
    assert enforced > 0.5 * len(groups)
    assert admitted > enforced
