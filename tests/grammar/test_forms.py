"""Translation of JSON Schema patterns to Rust's syntax, and of llama.cpp's and xgrammar's grammars to Lark."""

from __future__ import annotations

import itertools
import json
import random
import re
import warnings

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.byte_grammars import admits, byte_tokenizer, random_output
from support.strategies import fuzz

from token_recycling.grammar.compile import compiled
from token_recycling.grammar.json_schema.patterns import translated

TOKENIZER = byte_tokenizer()
CHARACTERS = [*"ab&[]:~-+,^_ .$<>/|(#A1B", "é", "٣", "\n", "\r", "\t", "\u2028", "\u00a0", "\ufeff", "\u0085"]
PATTERNS = [
    "^[^a&&b]$", "^[a&&b]$", "^[[:alpha:]]$", "^[^[a]b]$", "^[+--]$", "^[^+--]$", "^[a~~b]$", r"^\W$",
    r"^[^\w]$", r"^\D$", r"^[^\d]$", r"^[\W_]$", r"^\S$", r"^[^\s]$", "^.$", r"^\s$",
    r"^[\]a]$", "^[a-]$", r"^[\w-]+$",
    r"^\<a\>$", r"^\ a$", r"^a\-b$", r"^[a\-z]$", r"^[\[\]]$", r"^[\^a]$", "^[a^]$", r"^\$$", r"^\/$", "a|^b",
    "^(a|b)$", r"^[A-Z]{2}$", r"^[\x41-\x43]$", r"^[\u0041-\u0043]$", r"^[\t]$", r"^[\b]$",
    "^#a$", "^[--a]$", "^[(]$", "^(?:ab)?$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_matches_nothing_that_python_does_not(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = re.compile(pattern)
    grammar = compiled(TOKENIZER, "json_schema", {"type": "string", "pattern": pattern}, strict=True)
    texts = ["", "cb]", "<a>", "a-b", "\b", *CHARACTERS, *(one + other for one in CHARACTERS for other in CHARACTERS)]
    found = [text for text in texts if admits(grammar, json.dumps(text, ensure_ascii=False))]
    assert found
    assert all(map(expected.search, found))


@pytest.mark.parametrize(
    "pattern",
    [r"^(?=.*[A-Z])(?=.*\d).{2,}$", r"^(?!\.)", r"^(?!\d)\w+$", "^(?![^a-z])", r"^(?!\s*$)", "^(?!a*$)",
     "^(?!-)(?!.*-$)", r"^(?!.*\.\.)", "^(?!.*ab)", r"^(?!.*\s)", "^(?!.*[b-z])", "^(?!ab|b$)",
     "^(?!(?:a|bb)$)[a-c]*$", "^(?!é).+", r"^(?!^[-.]*$)-?1*\.?1*$"],
)  # fmt: skip
def test_leading_look_ahead_is_exact_except_at_line_ends(pattern):
    grammar = compiled(TOKENIZER, "json_schema", {"type": "string", "pattern": pattern})
    letters = ["a", "b", "A", "1", ".", "-", " ", "é", "\n", "\u0085"]
    texts = ["".join(parts) for size in range(5) for parts in itertools.product(letters[: 12 - 2 * size], repeat=size)]
    expected = [text for text in texts if re.search(pattern, text)]
    admitted = [text for text in texts if admits(grammar, json.dumps(text, ensure_ascii=False))]
    assert {*admitted} <= {*expected}
    assert [text for text in expected if text.isascii() and "\n" not in text and text not in admitted] == []


@pytest.mark.parametrize("pattern", ["a\\", "[a", "[^"])
def test_unterminated_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match=r"ends with|not closed"):
        translated(pattern)


LOOKING_AROUND = ["^(?!a+)", "^(?=a)b|c", "(?=a)b", "^a(?!b)", "^(?=a)*b", "^(?!)", "^(?=(", "^(?<!a)"]


@pytest.mark.parametrize(
    "pattern",
    [*LOOKING_AROUND, "a++", "a**", "^*a", "(*a)", "a{ 2}", "{a}", "a{,2}", r"a\Z", r"\Aa", r"\z", r"\a", r"\x{61}",
     r"\U00000061", r"\pL", r"\p{Greek}", r"\1", r"\b*", "[]a]", "[^]a]", r"[\w-a]", r"[a-\d]", "(?x) a", "(?m)^a",
     "(?>a)", "a(?i)"],
)  # fmt: skip
def test_other_look_around_and_syntax_of_one_dialect_are_refused(pattern):
    """Rust, which enforces patterns, gives most of this syntax a third meaning."""
    with pytest.raises(ValueError, match="#/pattern"):
        compiled(TOKENIZER, "json_schema", {"type": "string", "pattern": pattern})


@pytest.mark.parametrize("control", [r"\x01", r"\u001f", r"\x7f", r"\0", r"\v", "\x02", r"[\x01\x02]"])
def test_control_characters_of_a_pattern_are_not_dropped(control):
    grammar = compiled(TOKENIZER, "json_schema", {"type": "string", "pattern": f"^(a{control}|b{control}?)$"})
    assert [text for text in ("a", "b", "ab") if admits(grammar, f'"{text}"')] == ["b"]


@pytest.mark.parametrize("rest", [True, False, {"const": 2}])
def test_names_with_newlines_match_patterns_as_in_python(rest):
    schema = {"type": "object", "patternProperties": {"^a$": {"const": 1}}, "additionalProperties": rest}
    validator, grammar = jsonschema.Draft202012Validator(schema), compiled(TOKENIZER, "json_schema", schema)
    values = [{name: number} for name in ("a", "a\n", "\na", "a\n\n", "b") for number in (1, 2)]
    admitted = [value for value in values if admits(grammar, json.dumps(value))]
    assert {"a": 1} in admitted
    assert all(map(validator.is_valid, admitted))


@pytest.mark.parametrize(
    ("pattern", "admitted", "refused"),
    [("^a$", "a", "ba"), ("a|bc", "bc", "c"), (r"a\$", "a$", "a"), ("^(a|b)", "b", "ba"), ("[a-c]{3}x", "abcx", "abc")],
)
def test_regular_expression_matches_whole_outputs(pattern, admitted, refused):
    grammar = compiled(TOKENIZER, "regex", pattern)
    assert admits(grammar, admitted)
    assert not admits(grammar, refused)


GRAMMARS = [
    ('root ::= "only " [ab]', ["only a"], ["only c"]),
    ('root ::= x "b"\nx ::= [a-z]+', ["aab", "bb"], ["b", "aa"]),
    ('root ::= ("a" "b" "c") | "ab"', ["abc", "ab"], ["a"]),
    ('root ::= "(" root ")" | x\nx ::= [a-z]* "q"', ["(q)", "((aqq))"], ["()", "(q"]),
    ('root ::= "\\u00e9" [^"\\\\] "/" # a comment\n', ["éx/"], ['é"/']),
    ("root ::= [^a-z]{2,3}\n", ["ABC", "AB"], ["A", "ABa"]),
    ('root ::= "\\f\\v\\b" [\\v]', ["\f\v\b\v"], ["fvbv", "\f\v\bv"]),
    ('root ::= "ab"* ("abc" | "b")?', ["ababc", ""], ["a"]),
    ('root ::=\n  a-b |\n  "z"\na-b ::= "x"', ["x", "z"], ["a-b"]),
    ('root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"', ["1+(2+3)"], ["1+", "(1"]),
    ('start: "yes" | "no"', ["yes"], ["maybe"]),
    ('root ::= "\\"\\n" . ', ['"\na'], ['"a']),
]


@pytest.mark.parametrize(
    ("text", "admitted", "refused"), GRAMMARS, ids=lambda one: one if isinstance(one, str) else None
)
def test_grammar_admits_every_alternative(text, admitted, refused):
    grammar = compiled(TOKENIZER, "grammar", text)
    assert [admits(grammar, one) for one in (*admitted, *refused)] == [True] * len(admitted) + [False] * len(refused)


LETTERS = st.sampled_from(["a", "b", '"', "\\", "-", "]", "^", "[", "/", "é", "日", "\n"])
SUFFIXES = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}"])


def literal(text):
    return json.dumps(text, ensure_ascii=False), f"(?:{re.escape(text)})"


def class_of(characters, negated):
    members = "".join(rf"\u{ord(character):04x}" for character in characters)
    return (f"[{'^' * negated}{members}]",) * 2


def combined(parts, sign):
    grammars, patterns = zip(*parts, strict=True)
    return f"({f' {sign} '.join(grammars)})", f"(?:{sign.join(patterns)})"


def repeated(part, suffix):
    grammar, pattern = part
    return f"({grammar}){suffix}", f"(?:{pattern}){suffix}"


RULES = st.recursive(
    st.one_of(
        st.just((".", "(?s:.)")),
        st.builds(literal, st.text(LETTERS, max_size=3)),
        st.builds(class_of, st.lists(LETTERS, min_size=1, max_size=3), st.booleans()),
    ),
    lambda inner: st.one_of(
        st.builds(combined, st.lists(inner, min_size=1, max_size=3), st.sampled_from(["", "|"])),
        st.builds(repeated, inner, SUFFIXES),
    ),
    max_leaves=6,
)
"""Bodies of rules, each with the equivalent regular expression of Python."""


@fuzz(100)
@given(RULES, st.booleans(), st.lists(st.text(LETTERS, max_size=4), max_size=8), st.integers(0, 999))
@example(('"a" "b" "c" | "ab"', "abc|ab"), True, ["abc", "ab"], 0)
def test_grammar_admits_the_same_texts_as_a_regular_expression(rule, recursive, texts, seed):
    """Rules without recursion become one terminal; in a grammar with recursion, rules match single characters."""
    body, pattern = rule
    root = 'root ::= x | "%" y\ny ::= "(" y ")" | "z"' if recursive else "root ::= x"
    try:
        grammar = compiled(TOKENIZER, "grammar", f"{root}\nx ::= {body}")
    except ValueError as error:
        assert "no output except the empty one" in str(error)  # noqa: PT017
        assert not any(map(re.compile(pattern).fullmatch, filter(None, texts)))
        return
    draw = random.Random(seed)
    texts += [output.decode() for _ in range(4) if (output := random_output(grammar, draw, 60)) is not None]
    for text in texts:
        assert text.startswith("%") or admits(grammar, text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('x ::= "a"', "root"),
        ("root ::= x", "x, which is not defined"),
        ("root ::= (((", "not closed"),
        ("{bad", "cannot be"),
        ("root ::= a\na ::= b\nb ::= a", "no output"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= *", "repeat"),
        ('root ::= ""', "no output"),
        ("(" * 300, "begin"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested"),
        ("start: x", "compile"),
        ("a" * 1_000_001, "1,000,000"),
        ("root ::= []", "is empty"),
    ],
)
def test_invalid_grammar_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        compiled(TOKENIZER, "grammar", text)
