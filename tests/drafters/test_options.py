"""Options of drafters: how they are written and read, and what is refused, by type and offending value."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.drafters import example

import token_recycling as tr
from token_recycling._util.options import name_and_options, options_of, split_outside, written_options


def test_a_drafter_is_made_from_name_and_options():
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
    fused = tr.make_drafter("fuse:recycling(tree=16,k=4)+suffix,nodes=32")
    assert [part.name for part in fused.drafters] == ["recycling", "suffix"]
    assert (fused.drafters[0].tree, fused.drafters[0].k, fused.nodes) == (16, 4, 32)
    assert tr.make_drafter("fuse:parts=recycling+suffix").nodes == "auto"


@pytest.mark.parametrize(
    ("text", "sign", "pieces"),
    [
        ("", ",", [""]),
        ("a,b", ",", ["a", "b"]),
        ("a(b(c+d)+e)+f(g)+h", "+", ["a(b(c+d)+e)", "f(g)", "h"]),
        ("parts(k=3)=2", "=", ["parts(k=3)", "2"]),
    ],
)
def test_signs_in_parentheses_do_not_split(text, sign, pieces):
    assert split_outside(text, sign) == pieces


def test_one_option_may_go_without_its_name():
    wanted = {"parts": "a(k=3,l=4)+b", "nodes": "9"}
    assert written_options("x", "a(k=3,l=4)+b,nodes=9", "parts") == wanted
    assert written_options("x", "parts=a(k=3,l=4)+b,nodes=9", "parts") == wanted
    assert name_and_options("fuse(a(b=1)+c,nodes=3)") == ("fuse", "a(b=1)+c,nodes=3")


PARSERS: list[tuple[Any, tuple[str, ...], str]] = [
    *((split_outside, (text, ","), f"'{text}'") for text in ("(", ")", "a(b,c", "a)b(c", "a(b))")),
    (written_options, ("x", "a"), "'a'"),
    (written_options, ("x", "a(b=3)"), "'a(b=3)'"),
    (written_options, ("x", "a=1,a=2"), "got a twice"),
    (written_options, ("x", "a,b", "parts"), "'b'"),
    (written_options, ("x", "a,parts=b", "parts"), "got parts twice"),
    *((name_and_options, (text,), f"'{text}'") for text in ("", "a b)", "(a)", "a(b)c", "a:b=3", "a=3")),
]


@pytest.mark.parametrize(("read", "given", "value"), PARSERS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_what_is_not_written_as_options_is_refused(read, given, value):
    with pytest.raises(ValueError, match=re.escape(value)):
        read(*given)


WRITTEN: list[tuple[str, dict[str, Any], str]] = [
    ("nonsense", {}, "'nonsense'"),
    ("", {}, "''"),
    ("published", {"width": 3}, "'width'"),
    ("recycling", {"matrix": None}, "'matrix'"),
    ("recycling", {"update": "first"}, "'update'"),
    ("plain:k=3", {}, "'k'"),
    ("recycling:k", {}, "got 'k'"),
    ("recycling:k=many", {}, "'many'"),
    ("published:update=newest", {}, "'newest'"),
    ("rest", {}, "rest:datastore=VALUE"),
    ("draft_model", {}, "model"),
    ("fuse", {}, "fuse:parts=VALUE"),
    ("fuse:recycling", {}, "got 1"),
    ("fuse:" + "+".join(["suffix"] * 7), {}, "got 7"),
    ("fuse:recycling+nonsense", {}, "'nonsense'"),
    ("fuse:recycling+suffix:factor=3", {}, "'recycling+suffix:factor=3'"),
    ("fuse:recycling+suffix:3", {}, "'suffix:3'"),
    ("fuse:recycling(wide=16)+suffix", {}, "'wide'"),
    ("fuse:recycling+draft_model", {}, "draft_model needs model"),
    ("fuse:recycling+suffix,nodes=0", {}, "got 0"),
    ("fuse:recycling+suffix,nodes=some", {}, "'some'"),
    ("fuse:recycling+suffix,32", {}, "'32'"),
    # removed options, each with a remedy
    ("eagle:head=x,learn=true", {}, "no longer has the option 'learn': "),
    ("fuse:recycling+suffix,asks=paying", {}, "no longer has the option 'asks': "),
    ("layer_skip:layers=1,mode=graph", {}, "no longer has the option 'mode': "),
    ("mtp:learn=true", {}, "no longer has the option 'learn': "),
    ("rest:datastore=x,min_matching_ngram_size=1", {}, "no longer has the option 'min_matching_ngram_size': "),
    ("recycling:states=true", {}, "no longer has the option 'states': "),
    ("recycling:primed=true", {}, "no longer has the option 'primed': "),
    ("published:learns_prompt=true", {}, "no longer has the option 'learns_prompt': "),
    # values out of range
    ("lookahead", {"window": 250}, "got 1028"),
    ("recycling", {"tree": 0}, "got 0"),
    ("recycling", {"tree": 10**24}, "got 1000"),
    ("recycling", {"tree": "chain:10001"}, "got chain:10001"),
    ("recycling", {"tree": "nonsense"}, "'nonsense'"),
    ("recycling", {"tree": "16."}, "got rank 16"),
    ("recycling", {"k": 0}, "got 0"),
    ("recycling", {"orders": 5}, "got 5"),
    ("recycling", {"memory": -1.0}, "got -1"),
    ("recycling", {"memory": float("nan")}, "got nan"),
    ("recycling", {"history": -1}, "got -1"),
]


@pytest.mark.parametrize(("spec", "options", "value"), WRITTEN, ids=str)
def test_what_names_no_drafter_is_refused(spec, options, value):
    with pytest.raises(ValueError, match=re.escape(value)):
        tr.make_drafter(spec, **options)


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        (3, {}, "got int"),
        (tr.make_drafter("plain"), {"k": 3}, "and k"),
        ("recycling", {"k": "8"}, "got '8' of type str"),
        ("recycling", {"k": True}, "got True of type bool"),
        ("recycling", {"suffix": "no"}, "got 'no' of type str"),
        ("recycling", {"tree": 3.5}, "got 3.5 of type float"),
    ],
    ids=str,
)
def test_options_in_python_are_of_their_kind(spec, options, value):
    with pytest.raises(TypeError, match=re.escape(value)):
        tr.make_drafter(spec, **options)


OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"k": 0}),
    ("dflash", {"tree": "chain:5"}),
    ("dflash", {"tree": "0 1 2", "k": 2}),
    ("draft_model", {"mode": "forest"}),
    ("draft_model", {"depth": 0}),
    ("draft_model", {"k": 0}),
    ("draft_model", {"tau": 0}),
    ("draft_model", {"theta_prob": 1.5}),
    ("draft_model", {"theta_sib": -0.1}),
    ("draft_model", {"nodes": 0}),
    ("draft_model", {"nodes": "many"}),
    ("eagle", {"k": 0}),
    ("eagle", {"depth": 0}),
    ("eagle", {"tree": "wide"}),
    ("eagle", {"tree": "chain:3", "depth": 2}),
    ("eagle", {"tree": "0 1 2", "k": 2}),
    ("lookahead", {"window": 0}),
    ("lookahead", {"ngram_size": 1}),
    ("lookahead", {"guesses": 0}),
    ("medusa", {"k": 0}),
    ("medusa", {"tree": "0 00 000"}),
    ("medusa", {"tree": "0 1 2", "k": 2}),
    ("medusa", {"tree": "static:0"}),
    ("medusa", {"tree": "wide"}),
    ("mtp", {"k": 0}),
    ("mtp", {"depth": 0}),
    ("mtp", {"tree": 0}),
    ("mtp", {"tree": "paper"}),
    ("mtp", {"layers": "others"}),
    ("prompt_lookup", {"num_tokens": 0}),
    ("prompt_lookup", {"max_matching_ngram_size": 0}),
    ("published", {"k": 0}),
    ("published", {"update": "newest"}),
    ("rest", {"nodes": 0}),
    ("rest", {"num_tokens": 0}),
    ("rest", {"max_matches": 0}),
    ("rest", {"max_matching_ngram_size": 1}),
    ("specdec_pp", {"threshold": 1.5}),
    ("specdec_pp", {"min_length": 0}),
    ("specdec_pp", {"min_length": 5, "max_length": 4}),
    ("suffix", {"num_tokens": 0}),
    ("suffix", {"min_match": 0}),
    ("suffix", {"factor": 0}),
]


@pytest.mark.parametrize(("name", "options"), OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(name, options, model, tmp_path):
    made = example(name, model, tmp_path)
    with pytest.raises(ValueError, match=next(iter(options))):
        replace(made, **options)


def test_one_drafter_cannot_be_two_parts():
    drafter = tr.make_drafter("suffix")
    with pytest.raises(ValueError, match="one drafter twice"):
        tr.make_drafter("fuse", parts=[drafter, drafter])
