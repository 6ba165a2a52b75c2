"""Options of drafters: parsing, and refused values by type and offending value; names are checked without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import grimp
import numpy as np
import pytest
from support.drafters import example

import token_recycling as tr
from token_recycling._util.options import options_of, written_options
from token_recycling.drafters._registry import check_spec, own_names


def test_drafter_is_made_from_name_and_options():
    drafter = tr.make_drafter("published", k=np.int64(4), update="first", tree="chain:2")
    assert (drafter.name, drafter.k, drafter.update) == ("published", 4, "first")
    assert tr.make_drafter(drafter) is drafter
    assert tr.make_drafter().name == "recycling"
    assert tr.make_drafter("published:k=2,tree=chain:2", k=3).k == 3
    assert "matrix" not in options_of(type(drafter))


def test_options_are_read_from_text():
    drafter = tr.make_drafter("recycling:tree=12,k=4,orders=2,suffix=false,memory=1")
    assert (drafter.tree, drafter.k, drafter.orders, drafter.suffix, drafter.memory) == (12, 4, 2, False, 1)
    assert tr.make_drafter("recycling:tree=0 1 00").tree == "0 1 00"
    assert tr.make_drafter("published:update=unordered").update == "unordered"
    assert tr.make_drafter("layer_skip:layers=4-6 9 5")._skipped == [4, 5, 6, 9]
    assert tr.make_drafter("layer_skip", layers=(2, 1))._skipped == [1, 2]
    assert written_options("rest", "datastore=a=b,nodes=3") == {"datastore": "a=b", "nodes": "3"}
    nested = tr.make_drafter("fuse:fuse(recycling(tree=16,k=4)+suffix,nodes=8)+suffix,nodes=32")
    assert [part.name for part in nested.drafters] == ["fuse", "suffix"]
    assert [part.name for part in nested.drafters[0].drafters] == ["recycling", "suffix"]
    assert (nested.drafters[0].drafters[0].tree, nested.drafters[0].nodes, nested.nodes) == (16, 8, 32)
    assert tr.make_drafter("fuse:parts=recycling+suffix").nodes == "auto"


TYPOS = {
    "nonsense": "'nonsense'",
    "": "''",
    "(suffix)": "'(suffix)'",
    "plain:k=3": "'k'",
    "recycling:k": "got 'k'",
    "recycling:nope=1": "nope",
    "recycling:k=many": "'many'",
    "recycling:update=first": "'update'",
    "suffix:num_tokens=1,num_tokens=2": "num_tokens",
    "lookahead:pool_from_prompt=perhaps": "perhaps",
    "rest": "rest:datastore=VALUE",
    "rest:nodes=3": "rest:datastore=VALUE",
    "draft_model": "model",
    "fuse": "fuse:parts=VALUE",
    "fuse:recycling+suffix,32": "'32'",
    "fuse:recycling+suffix,parts=plain": "got parts twice",
    "fuse:recycling(k=3+suffix": "'recycling(k=3+suffix'",
    "fuse:recycling)+suffix": "'recycling)+suffix'",
}
"""Refused specs, and a part of their error."""


@pytest.mark.parametrize(("spec", "value"), TYPOS.items())
def test_mistyped_drafter_is_refused(spec, value):
    """Given options are checked when the spec is parsed, missing options when the drafter is made."""
    with pytest.raises(ValueError, match=re.escape(value)):
        tr.make_drafter(spec)
    if ":" in spec:
        with pytest.raises(ValueError, match=re.escape(value)):
            check_spec(spec)


MADE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (3, {}, TypeError, "got int"),
    (tr.make_drafter("plain"), {"k": 3}, TypeError, "and k"),
    ("recycling", {"matrix": None}, ValueError, "'matrix'"),
    ("recycling:states=true", {}, ValueError, "'states'"),
    ("recycling", {"k": "8"}, TypeError, "got '8' of type str"),
    ("recycling", {"k": True}, TypeError, "got True of type bool"),
    ("recycling", {"suffix": "no"}, TypeError, "got 'no' of type str"),
    ("recycling", {"tree": 3.5}, TypeError, "got 3.5 of type float"),
    ("recycling", {"tree": 0}, ValueError, "got 0"),
    ("recycling", {"tree": 10**24}, ValueError, "got 1000"),
    ("recycling", {"tree": "chain:10001"}, ValueError, "got chain:10001"),
    ("recycling", {"tree": "nonsense"}, ValueError, "'nonsense'"),
    ("recycling", {"tree": "16."}, ValueError, "got rank 16"),
    ("recycling", {"k": 0}, ValueError, "got 0"),
    ("recycling", {"orders": 5}, ValueError, "got 5"),
    ("recycling", {"memory": -1.0}, ValueError, "got -1"),
    ("recycling", {"memory": float("nan")}, ValueError, "got nan"),
    ("recycling", {"history": -1}, ValueError, "got -1"),
    ("lookahead", {"window": 250}, ValueError, "got 1028"),
    ("fuse:recycling", {}, ValueError, "got 1"),
    ("fuse:" + "+".join(["suffix"] * 7), {}, ValueError, "got 7"),
    ("fuse:recycling+nonsense", {}, ValueError, "'nonsense'"),
    ("fuse:recycling+suffix:factor=3", {}, ValueError, "'recycling+suffix:factor=3'"),
    ("fuse:recycling+suffix:3", {}, ValueError, "'suffix:3'"),
    ("fuse:recycling(wide=16)+suffix", {}, ValueError, "'wide'"),
    ("fuse:recycling+draft_model", {}, ValueError, "draft_model needs model"),
    ("fuse:recycling+suffix,nodes=0", {}, ValueError, "got 0"),
    ("fuse:recycling+suffix,nodes=some", {}, ValueError, "'some'"),
    ("fuse", {"parts": [tr.make_drafter("suffix")] * 2}, ValueError, "the same one twice"),
]


@pytest.mark.parametrize(("spec", "options", "error", "value"), MADE, ids=str)
def test_invalid_drafters_are_refused(spec, options, error, value):
    with pytest.raises(error, match=re.escape(value)):
        tr.make_drafter(spec, **options)


OUT_OF_RANGE: dict[str, list[dict[str, Any]]] = {
    "dflash": [{"k": 0}, {"tree": "chain:5"}, {"tree": "0 1 2", "k": 2}],
    "draft_model": [
        *({"mode": "forest"}, {"depth": 0}, {"k": 0}, {"tau": 0}),
        *({"theta_prob": 1.5}, {"theta_sib": -0.1}, {"nodes": 0}, {"nodes": "many"}),
    ],
    "eagle": [{"k": 0}, {"depth": 0}, {"tree": "wide"}, {"tree": "chain:3", "depth": 2}, {"tree": "0 1 2", "k": 2}],
    "lookahead": [{"window": 0}, {"ngram_size": 1}, {"guesses": 0}],
    "medusa": [{"k": 0}, {"tree": "0 00 000"}, {"tree": "0 1 2", "k": 2}, {"tree": "static:0"}, {"tree": "wide"}],
    "mtp": [{"k": 0}, {"depth": 0}, {"tree": 0}, {"tree": "paper"}, {"layers": "others"}],
    "prompt_lookup": [{"num_tokens": 0}, {"max_matching_ngram_size": 0}],
    "published": [{"k": 0}, {"update": "newest"}],
    "rest": [{"nodes": 0}, {"num_tokens": 0}, {"max_matches": 0}, {"max_matching_ngram_size": 1}],
    "specdec_pp": [{"threshold": 1.5}, {"min_length": 0}, {"min_length": 5, "max_length": 4}],
    "suffix": [{"num_tokens": 0}, {"min_match": 0}, {"factor": 0}],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_options_out_of_range_are_refused(name, model, tmp_path):
    made = example(name, model, tmp_path)
    for options in OUT_OF_RANGE[name]:
        with pytest.raises(ValueError, match=next(iter(options))):
            replace(made, **options)


# Without torch


def test_unknown_drafter_is_refused_without_importing_torch():
    code = """
import sys
from token_recycling.cli.app import app
for words in (
    "generate models/target --drafter nonsense",
    "bench models/target --data models/prompts --method nonsense",
    "compare models/target --prompts nowhere",
):
    try:
        app(words.split())
    except SystemExit as end:
        print(end.code, "torch" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "2 False\n" * 3, found.stderr
    assert found.stderr.count("error: ") == 3


def test_no_module_depends_on_one_drafter():
    """Each drafter can be deleted together with its command and training: shared code is in `drafters/_shared`."""
    graph = grimp.build_graph("token_recycling")
    for drafter in own_names():
        deleted = f"token_recycling.drafters.{drafter}"
        parts = {deleted, *graph.find_descendants(deleted)}
        users = {user for part in parts for user in graph.find_modules_that_directly_import(part)} - parts
        others = {user for user in users if not user.startswith(("token_recycling.cli", "token_recycling.training"))}
        assert others == set(), drafter
