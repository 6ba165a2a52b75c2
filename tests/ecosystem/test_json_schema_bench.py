"""Schemas of JSONSchemaBench (Geng et al., 2501.10868): each is enforced exactly, or refused with keyword and path.

They are read from the folder in the variable JSONSCHEMABENCH, a copy of `data` of
https://github.com/guidance-ai/jsonschemabench, else downloaded; the tests are skipped if the download fails.
"""

from __future__ import annotations

import json
import os
import random
import urllib.request
from pathlib import Path

import jsonschema
import pytest
from support.byte_grammars import admits, byte_tokenizer, random_output

from token_recycling.grammar.compile import compiled

NUMBER = 100
TREE = "https://api.github.com/repos/guidance-ai/jsonschemabench/git/trees/main?recursive=1"
RAW = "https://raw.githubusercontent.com/guidance-ai/jsonschemabench/main/"


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def entries():
    """Schemas, or schemas with instances to try, sampled evenly from all folders."""
    draw, folder = random.Random(0), os.environ.get("JSONSCHEMABENCH")
    if folder:
        names = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/*.json"))
        return [json.loads(Path(folder, name).read_text()) for name in draw.sample(names, NUMBER)]
    try:
        listed = [entry["path"] for entry in fetch(TREE)["tree"]]
        names = sorted(path for path in listed if path.startswith("data/") and path.endswith(".json"))
        return [fetch(RAW + name) for name in draw.sample(names, NUMBER)]
    except OSError as error:
        pytest.skip(f"JSONSchemaBench cannot be downloaded: {error}")


@pytest.mark.nightly
def test_schemas_of_public_projects_are_enforced_or_refused_with_their_path(entries):
    tokenizer, draw, refusals = byte_tokenizer(), random.Random(1), list[str]()
    for entry in entries:
        schema, tests = (entry["schema"], entry["tests"]) if "tests" in entry else (entry, [])
        try:
            grammar = compiled(tokenizer, "json_schema", schema)
        except ValueError as error:
            refusals.append(str(error))
            continue
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        outputs = [output for output in (random_output(grammar, draw, 600) for _ in range(4)) if output is not None]
        values = [json.loads(output) for output in outputs]
        values += [test["data"] for test in tests if admits(grammar, json.dumps(test["data"], ensure_ascii=False))]
        for value in values:
            assert validator.is_valid(value), (schema, value)
    assert len(refusals) < 0.2 * len(entries)
    assert [text for text in refusals if not text.startswith("#")] == []
