"""What a user writes: options in parentheses, options without a name, and what is wrong with the rest."""

import numpy as np
import pytest

from token_recycling._util.options import name_and_options, split_outside, written_options
from token_recycling.drafters._registry import make_drafter


@pytest.mark.parametrize(
    ("text", "sign", "pieces"),
    [
        ("", ",", [""]),
        ("a,b", ",", ["a", "b"]),
        ("a(b,c),d", ",", ["a(b,c)", "d"]),
        ("a(b(c+d)+e)+f(g)+h", "+", ["a(b(c+d)+e)", "f(g)", "h"]),
        ("tree=0 1 00", "=", ["tree", "0 1 00"]),
        ("parts(k=3)=2", "=", ["parts(k=3)", "2"]),
    ],
)
def test_signs_in_parentheses_do_not_split(text, sign, pieces):
    assert split_outside(text, sign) == pieces


@pytest.mark.parametrize("text", ["(", ")", "a(b,c", "a)b(c", "a(b))"])
def test_halves_of_parentheses_are_refused(text):
    with pytest.raises(ValueError, match="parentheses do not match"):
        split_outside(text, ",")


def test_options_are_read():
    assert written_options("x", "") == {}
    assert written_options("x", "a=1,b=two words,c=f(d=3,e=4)") == {"a": "1", "b": "two words", "c": "f(d=3,e=4)"}
    assert written_options("x", "model=a=b") == {"model": "a=b"}


def test_one_option_may_go_without_its_name():
    wanted = {"parts": "a(k=3,l=4)+b", "nodes": "9"}
    assert written_options("x", "a(k=3,l=4)+b,nodes=9", "parts") == wanted
    assert written_options("x", "parts=a(k=3,l=4)+b,nodes=9", "parts") == wanted


@pytest.mark.parametrize(
    ("text", "unnamed", "message"),
    [
        ("a", "", "options after 'x' must be NAME=VALUE, got 'a'"),
        ("a(b=3)", "", r"options after 'x' must be NAME=VALUE, got 'a\(b=3\)'"),
        ("a,b", "parts", "options after 'x' must be NAME=VALUE, got 'b'"),
        ("a=1,a=2", "", "options of x may be given once, got a twice"),
        ("a,parts=b", "parts", "options of x may be given once, got parts twice"),
    ],
)
def test_what_is_no_option_is_refused(text, unnamed, message):
    with pytest.raises(ValueError, match=message):
        written_options("x", text, unnamed)


def test_a_name_may_have_options_in_parentheses():
    assert name_and_options("suffix") == ("suffix", "")
    assert name_and_options(" recycling(tree=16,k=8)") == ("recycling", "tree=16,k=8")
    assert name_and_options("fuse(a(b=1)+c,nodes=3)") == ("fuse", "a(b=1)+c,nodes=3")


@pytest.mark.parametrize("text", ["", "a b)", "(a)", "a(b)c", "a:b=3", "a=3"])
def test_what_is_no_name_with_options_is_refused(text):
    with pytest.raises(ValueError, match=r"must be NAME or NAME\(OPTION=VALUE,...\)"):
        name_and_options(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"k": "8"}, "option k of recycling must be a whole number, got '8' of type str"),
        ({"k": True}, "got True of type bool"),
        ({"suffix": "no"}, "option suffix of recycling must be true or false"),
        ({"memory": "0.1"}, "option memory of recycling must be a number"),
        ({"tree": 3.5}, "option tree of recycling must be a text or a whole number or Tree"),
    ],
)
def test_options_in_python_are_of_their_kind(options, expected):
    with pytest.raises(TypeError, match=expected):
        make_drafter("recycling", **options)


def test_numbers_of_other_kinds_are_numbers():
    drafter = make_drafter("recycling", k=np.int64(4), memory=np.float32(0.25))
    assert (drafter.k, drafter.memory) == (4, 0.25)
