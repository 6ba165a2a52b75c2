"""Text that comes in pieces is the text of all tokens, whatever tokens read like beside others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from token_recycling._util.text_stream import IncrementalText, pieces

WORDS = ["a", "bee", "sea", "!"]


class OfWords:
    """A tokenizer with a space between words, and none before the first one, as SentencePiece's."""

    def decode(self, token_ids, **options):
        return " ".join(WORDS[token] for token in token_ids)


class OfBytes:
    """A tokenizer of single bytes: a character takes several tokens."""

    def decode(self, token_ids, **options):
        return bytes(token_ids).decode(errors="replace")


steps = st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=3), max_size=6)


@given(steps)
def test_spaces_between_words_are_shown(steps):
    assert "".join(pieces(OfWords(), steps)) == OfWords().decode([token for step in steps for token in step])


@given(st.text("aé日🙂", max_size=6), st.lists(st.integers(1, 3), max_size=8))
def test_no_character_is_shown_before_its_last_byte(text, sizes):
    shown, rest = IncrementalText(OfBytes()), list(text.encode())
    came = ""
    for size in [*sizes, len(rest)]:
        came += shown.push(rest[:size])
        rest = rest[size:]
        assert text.startswith(came)
    assert came + shown.flush() == text


@given(st.lists(st.binary(max_size=3), max_size=6))
def test_all_is_shown_in_the_end_also_half_a_character(steps):
    assert "".join(pieces(OfBytes(), steps)) == OfBytes().decode(b"".join(steps))


def test_long_runs_that_are_no_text_cost_little_and_delay_little():
    """As of a client that biases a model towards a byte that no character begins with."""
    tokenizer, sizes = OfBytes(), []
    tokenizer.decode = lambda token_ids, **options: sizes.append(len(token_ids)) or OfBytes.decode(tokenizer, token_ids)
    shown, length = IncrementalText(tokenizer), 4000
    assert not any(shown.push([0x80]) for _ in range(length))
    assert sum(sizes) < 20 * length
    arrived = [shown.push([byte]) for byte in b"x" * length]
    delay = next(count for count, text in enumerate(arrived) if text)
    assert delay <= length // 16
    assert "".join(arrived) == tokenizer.decode([0x80] * length) + "x" * length
