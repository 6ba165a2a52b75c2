"""From the tokens of one output to what its client is shown: text up to a stop string, reasoning, calls, tokens.

Where transformers knows how the model delimits its reasoning and its calls (a response template), its parser reads the
output (`calls.ParsedOutput`). Otherwise tokens are held back with the text that they are a part of, so that
log-probabilities and text fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from .._util.text_stream import IncrementalText
from .calls import Delta, ParsedOutput
from .logprobs import ScoredToken
from .stopping import StopTrimmer


class PlainOutput:
    """One output that is all text."""

    calls, cut = 0, False
    """It has no calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, trimmer: StopTrimmer) -> None:
        self._text, self._trimmer = IncrementalText(tokenizer), trimmer
        self._held: list[tuple[int, ScoredToken]] = []
        """Tokens that are not shown yet, each with its place in the text."""
        self._read = self._shown = 0
        """Characters generated and shown."""

    def begin(self, prompt: str = "") -> Delta:
        """Begin with a prompt that is shown."""
        self._read = self._shown = len(prompt)
        return Delta(prompt)

    def push(self, token: ScoredToken, shown: bool) -> Delta:
        """Add a token."""
        self._held.append((self._read, token))
        return self._trimmed(self._text.push([token.token] if shown else []))

    def end(self, ended: bool) -> Delta:
        """Return what was held back. `ended`: the last token is an end of sequence, which is not shown."""
        delta = self._trimmed(self._text.flush())
        rest = self._trimmer.flush()
        self._shown += len(rest)
        return delta + Delta(rest) + self._released(all_of_them=not (ended or self._trimmer.stopped))

    def _trimmed(self, piece: str) -> Delta:
        self._read += len(piece)
        shown = self._trimmer.push(piece)
        self._shown += len(shown)
        return Delta(shown) + self._released() if shown else Delta()

    def _released(self, all_of_them: bool = False) -> Delta:
        """Return the tokens that were held back and begin within the text shown, or all."""
        released = [(offset, token) for offset, token in self._held if all_of_them or offset < self._shown]
        self._held = self._held[len(released) :]
        return Delta(tokens=[token for _, token in released], offsets=[offset for offset, _ in released])


class Choice:
    """One output as it grows."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        new_parser: Callable[[], Any] | None = None,
        hidden: Sequence[int] | None = None,
        streamed: bool = False,
    ) -> None:
        """`new_parser` makes a parser of the output; `hidden`: tokens that end the output, not shown; `streamed`:
        calls are passed on while they are generated.
        """
        self._tokenizer, self._limit = tokenizer, config.max_new_tokens
        self._trimmer = StopTrimmer(config.stop_strings or ())
        self._output: PlainOutput | ParsedOutput = PlainOutput(tokenizer, self._trimmer)
        if new_parser is not None:
            self._output = ParsedOutput(tokenizer, self._trimmer, new_parser, streamed)
        self._eos = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
        self._hidden = frozenset(hidden or ()) - frozenset(tokenizer.all_special_ids if hidden else ())
        """Special tokens are for the parser, or are shown nowhere."""
        self._last: int | None = None
        self._prompt: str | None = None
        """Its tokens come first."""
        self.tokens = 0
        """Number of generated tokens."""
        self._waiting = self._output.begin()

    def begin_with(self, prompt: str, scored: bool) -> None:
        """Begin with the prompt; `scored`: the tokens of the prompt are pushed first."""
        assert isinstance(self._output, PlainOutput)
        self._prompt = prompt if scored else None
        self._waiting = Delta() if scored else self._output.begin(prompt)

    def push(self, tokens: list[ScoredToken]) -> Delta:
        """Return what these tokens add."""
        if self._prompt is not None:
            return self._scored_prompt(tokens)
        delta, self._waiting = self._waiting, Delta()
        for token in tokens:
            self.tokens, self._last = self.tokens + 1, token.token
            delta += self._output.push(token, token.token not in self._hidden)
        return delta

    def end(self) -> Delta:
        """Return what was held back, at the end of the output."""
        return self._waiting + self._output.end(self._last in self._eos)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return self._trimmer.matched

    @property
    def finish_reason(self) -> str:
        """Why the output ended: a tool call, its end or a stop string, or its length."""
        full = self.tokens >= (self._limit or 0)
        if self._output.calls and not (self._output.cut and full):
            return "tool_calls"
        return "length" if full and not self._trimmer.stopped and self._last not in self._eos else "stop"

    def _scored_prompt(self, tokens: list[ScoredToken]) -> Delta:
        assert isinstance(self._output, PlainOutput)
        assert self._prompt is not None
        prompt, self._prompt = self._prompt, None
        text, offsets = IncrementalText(self._tokenizer), [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(text.push([token.token])))
        return self._output.begin(prompt) + Delta(tokens=tokens, offsets=offsets[:-1])
