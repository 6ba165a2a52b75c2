"""Streamed text equals the decoded text of all tokens, also if tokens decode differently next to others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from token_recycling._util.text_stream import IncrementalText, pieces

WORDS = ["a", "bee", "sea", "!"]


class WordTokenizer:
    """A tokenizer with a space between words and none before the first, like SentencePiece."""

    def decode(self, token_ids, **options):
        return " ".join(WORDS[token] for token in token_ids)


class ByteTokenizer:
    """A tokenizer of single bytes: a character takes several tokens."""

    def decode(self, token_ids, **options):
        return bytes(token_ids).decode(errors="replace")


steps = st.lists(st.lists(st.integers(0, len(WORDS) - 1), max_size=3), max_size=6)


@given(steps)
def test_spaces_between_words_are_streamed(steps):
    assert "".join(pieces(WordTokenizer(), steps)) == WordTokenizer().decode(
        [token for step in steps for token in step]
    )


def test_text_after_tokens_that_are_not_shown_begins_without_a_space():
    """As special tokens, which decode to nothing."""

    class Tokenizer(WordTokenizer):
        def decode(self, token_ids, **options):
            return super().decode([token for token in token_ids if token < len(WORDS)])

    starts = [IncrementalText(Tokenizer(), before).at_start for before in ([], [9], [9, 9], [1], [9, 1])]
    assert starts == [True, True, True, False, False]


@given(st.text("aé日🙂", max_size=6), st.lists(st.integers(1, 3), max_size=8))
def test_no_character_is_streamed_before_its_last_byte(text, sizes):
    shown, rest = IncrementalText(ByteTokenizer()), list(text.encode())
    came = ""
    for size in [*sizes, len(rest)]:
        came += shown.push(rest[:size])
        rest = rest[size:]
        assert text.startswith(came)
    assert came + shown.flush() == text


@given(st.lists(st.binary(max_size=3), max_size=6))
def test_incomplete_character_is_streamed_at_the_end(steps):
    assert "".join(pieces(ByteTokenizer(), steps)) == ByteTokenizer().decode(b"".join(steps))


def test_long_runs_of_invalid_bytes_have_low_cost_and_delay():
    """Such runs occur if a client biases a model towards a byte that starts no character."""
    tokenizer, sizes = ByteTokenizer(), []
    tokenizer.decode = lambda token_ids, **options: (
        sizes.append(len(token_ids)) or ByteTokenizer.decode(tokenizer, token_ids)
    )
    shown, length = IncrementalText(tokenizer), 4000
    assert not any(shown.push([0x80]) for _ in range(length))
    assert sum(sizes) < 20 * length
    arrived = [shown.push([byte]) for byte in b"x" * length]
    delay = next(count for count, text in enumerate(arrived) if text)
    assert delay <= length // 16
    assert "".join(arrived) == tokenizer.decode([0x80] * length) + "x" * length
