"""A text that grows: its tokens, what ends it, and how its next token is chosen.

Both are exactly `generate`'s: the criteria and processors that transformers prepares are called once a token, with the
tokens that they would see there, the padding before a prompt included.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .processors import Scope, scope

_LEAST_ROOM = 256
"""Tokens that memory grows by at least: the limit of a text may be far beyond what any memory holds."""


class Sequence:
    """The tokens so far, and what ends them."""

    def __init__(self, prompt: torch.Tensor, criteria: StoppingCriteriaList, padding: int = 0) -> None:
        """`prompt` (length,) int64, its first `padding` tokens no part of the text; `criteria` as `generate` makes
        them, a maximum length among them.
        """
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        if not limits:
            raise ValueError("expected a limit on the length of the text; set max_new_tokens")
        self.max_length = min(limits)
        # The two criteria of every run are checked on numbers; all others are called as they are, once per token.
        eos = [criterion.eos_token_id.tolist() for criterion in criteria if type(criterion) is EosTokenCriteria]
        self._eos = frozenset(token for tokens in eos for token in tokens)
        self._others = [
            criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        # Tokens are written on the host, and copied to the prompt's device when they are read there. Writing a
        # number through numpy costs a fiftieth of writing it through torch.
        self._host, self._buffer = prompt.cpu(), prompt
        self._grow()
        self.padding = padding
        self._end = self._copied = len(prompt)
        self.ended = False
        """Whether nothing more may be said."""
        self.scores: list[torch.Tensor] | None = None
        """Processed scores (1, vocabulary) per emitted token, if they are kept; some criteria read them."""

    @property
    def tokens(self) -> torch.Tensor:
        """(length,) int64, a view."""
        return self._on_device()[self.padding : self._end]

    @property
    def on_host(self) -> torch.Tensor:
        """(length,) int64 in the memory of the host, a view."""
        return self._host[self.padding : self._end]

    @property
    def padded(self) -> torch.Tensor:
        """(1, padding + length) int64, a view: what `generate` shows to processors and criteria."""
        return self._on_device()[None, : self._end]

    def _grow(self) -> None:
        """Makes room for as many tokens again, and some; views of what was there stay as they are."""
        room = len(self._host) + _LEAST_ROOM
        on_host = self._host is self._buffer
        self._host = torch.cat([self._host, self._host.new_empty(room)])
        self._cells = self._host.numpy()
        self._buffer = self._host if on_host else torch.cat([self._buffer, self._buffer.new_empty(room)])

    def _on_device(self) -> torch.Tensor:
        """The tokens on the prompt's device."""
        if self._copied < self._end and self._host is not self._buffer:
            self._buffer[self._copied : self._end] = self._host[self._copied : self._end]
        self._copied = self._end
        return self._buffer

    @property
    def length(self) -> int:
        """Tokens of the text, without padding."""
        return self._end - self.padding

    @property
    def columns(self) -> int:
        """Tokens of the text and the padding before it."""
        return self._end

    @property
    def room(self) -> int:
        """How many more tokens fit; at least one, as in `generate`."""
        return max(1, self.max_length - self._end)

    def append(self, token: int) -> bool:
        """Appends a token; True if the text ends with it."""
        self.push(token)
        ended = token in self._eos or self._end >= self.max_length
        scores = None if self.scores is None else tuple(self.scores)
        for criterion in self._others:
            ended |= bool(torch.as_tensor(criterion(self.padded, scores)).all())
        self.ended = ended
        return ended

    def push(self, token: int) -> None:
        """Appends a token without evaluating stopping criteria."""
        if self._end == len(self._cells):
            self._grow()
        self._cells[self._end] = token
        self._end += 1

    def end_at(self, columns: int) -> None:
        """The text has ended there; what follows is withdrawn."""
        self._end, self.ended = columns, True
        self._copied = min(self._copied, columns)


class Draws:
    """The random numbers of one text among others: within it torch gives those that it gives, after
    `torch.manual_seed(seed)`, to a program that generates that text alone.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        before = self._now()
        torch.manual_seed(seed)
        self._own = self._now()
        self._set(before)

    def __enter__(self) -> None:
        self._others = self._now()
        self._set(self._own)

    def __exit__(self, *raised: object) -> None:
        self._own = self._now()
        self._set(self._others)

    def _now(self) -> list[torch.Tensor]:
        """Where the generators of the host and of the device stand."""
        on_device = self._device.type != "cpu"
        states = [torch.get_device_module(self._device).get_rng_state(self._device)] if on_device else []
        return [torch.get_rng_state(), *states]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)


class TokenSelector:
    """The target's choice at a node, as `generate` makes it: processors on the path of that node, then argmax or one
    draw.
    """

    def __init__(
        self,
        sequence: Sequence,
        processors: LogitsProcessorList,
        sample: bool,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.sequence, self.processors, self.sample = sequence, processors, sample
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        sequence.scores = [] if keep_scores else None
        self.greedy = not (sample or len(processors) or keep_scores or keep_logits)
        """True if the choice is the argmax of the logits and nothing else is wanted."""
        self._warpers = [processor for processor in processors if scope(processor) >= Scope.SCORES]

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token after the text so far, from logits (vocabulary,)."""
        if self.greedy:
            fast = logits.device.type == "cpu" and logits.dtype == torch.float32
            return int(logits.numpy().argmax() if fast else logits.argmax())
        if self.sample:
            return int(torch.multinomial(self.distribution(logits), num_samples=1))
        return int(self.scored(logits).argmax(dim=-1))

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """What the next token is drawn from: (vocabulary,) probabilities, from logits (vocabulary,). Called once for
        every emitted token, as `generate` asks its processors.
        """
        return torch.softmax(self.scored(logits), dim=-1)[0]

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocabulary) of any model as those that tokens are drawn from, as far as texts do not matter."""
        scores = logits.to(copy=True, dtype=torch.float32)
        for warper in self._warpers:
            scores = warper(self.sequence.padded, scores)
        return scores

    def scored(self, logits: torch.Tensor) -> torch.Tensor:
        """The processed scores (1, vocabulary) after the text so far, which are kept where they are wanted."""
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.sequence.padded.device)
        scores = self.processors(self.sequence.padded, raw)
        if self.sequence.scores is not None:
            self.sequence.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        return scores

    def forget(self, tokens: int) -> None:
        """Scores and logits of all tokens but the first ones: a text has ended before."""
        for kept in (self.sequence.scores, self.logits):
            if kept is not None:
                del kept[tokens:]
