"""A model for mlx-lm's own decoding loop that reads several tokens per forward pass.

mlx-lm gives a model the token that it has just sampled and expects the logits after it. Where that pays, `Drafting`
reads a drafted continuation in the same forward pass. As long as the next sampled tokens are the drafted ones, it has
their logits already; otherwise the rest is rolled back (`cache`). Samplers, processors and random numbers stay
mlx-lm's.

mlx-lm starts a forward pass before it knows the token that is read there. A draft follows a known token, and gives up
this lead. So two decisions are made: whether to wait for the token, then how much to draft after it. Both use the cost
of forward passes, lead included, which is learned from each.

Cost per step: a top-k over the logits and some ten microseconds; where nothing is drafted, while the device works.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..._util.compiled import compiling
from ...costs.budget import best_size
from ...recycling.ngrams import ngrams_at
from ...recycling.recycler import Recycler
from ..replica import TokenBuffer
from .cache import Before, most_rows

if TYPE_CHECKING:
    from .drafter import TokenRecycling


class Pass(NamedTuple):
    """A pass of the model and what became of it."""

    place: int  # of the newest token of the sequence; others before it may be read once more
    draft: list[int]  # what it read after that
    logits: mx.array  # (1, 1 + drafted, vocabulary)
    read: list[int]  # all its tokens, where something was drafted
    before: Before | None  # the cache before it, where something was drafted


class Drafting:
    """Wraps a model while one sequence is generated."""

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        drafter: TokenRecycling,
        longest: int,
        max_tokens: int,
        quantised_from: int | None,
    ) -> None:
        """`longest`: of a draft; `max_tokens`: -1 for no limit; `quantised_from`: the cache is, from this length on."""
        self._model, self._cache, self._drafter = model, cache, drafter
        self._longest, self._max_tokens, self._quantised_from = longest, max_tokens, quantised_from
        self.away = 0.0
        """Seconds for which mlx-lm's loop did not run."""
        self.from_draft = False
        """Whether the newest token was a drafted one."""
        self._prompt_left: int | None = None
        self._text = TokenBuffer(drafter.sequence_of(cache))
        self._recycled: Recycler | None = None
        """The recycler of the sequence, from the first draft on."""
        self._unread: mx.array | None = None
        """The sequence's newest token, where a pass was started before it was known."""
        self._passed: Pass | None = None
        """The newest pass."""
        self._used = 0
        """How many drafted tokens of it were sampled."""
        self._again: list[int] = []
        """Tokens that the next pass must read once more."""
        self._unlearned: list[Pass] = []
        self._asked = 0
        """How many tokens of the answer were sampled."""
        self._timed, self._since = 0, 0.0
        """Size of the newest forward pass, 0 where its time is not learned, and when it began."""

    def begin(self, processed: int, total: int) -> None:
        """What mlx-lm reports of the prompt: first, before any pass, that none of its `total` tokens was processed."""
        if self._prompt_left is None:
            self._prompt_left = total

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Logits (1, n, vocabulary) after tokens (1, n) of the prompt, or (1, 1, vocabulary) after a sampled one."""
        if self._prompt_left:
            return self._read_prompt(inputs, input_embeddings)
        assert self._passed is not None, "a prompt has a token"
        self._asked += 1
        passed, drawn = self._passed, inputs[0]
        self._read_unread()
        self.from_draft = self._used < len(passed.draft) and drawn.item() == passed.draft[self._used]
        if self.from_draft:
            self._text.extend([passed.draft[self._used]])
            self._used += 1
            return passed.logits[:, self._used : self._used + 1]
        # After a draft the token is there: its logits were looked at already.
        if passed.draft or self._waiting_pays():
            return self._pass_with_draft(drawn)
        return self._pass_ahead(drawn)

    def settle(self) -> None:
        """Leave exactly the sampled tokens in the cache, whenever mlx-lm's loop has ended."""
        if self._passed is None:
            return
        self._take_back()
        if self._again:
            self._model(mx.array([self._again]), cache=self._cache)
            mx.eval([layer.state for layer in self._cache])
        self._read_unread()
        # A forward pass of which nothing was sampled may still be running.
        self._learn(self._unlearned if self._used else self._unlearned[:-1])
        if self._recycled is not None:
            self._recycled.observe(self._text.tokens[self._recycled.recorded :].tolist(), ends=True)
        self._drafter.keep_text(self._cache, self._text.tokens)
        self._recycler.save_if_due()

    def _read_prompt(self, tokens: mx.array, embeddings: mx.array | None) -> mx.array:
        assert self._prompt_left
        self._text.extend(tokens[0].tolist())
        if embeddings is None:
            self._prompt_left -= tokens.shape[1]
            logits = self._model(tokens, cache=self._cache)
        else:
            self._prompt_left -= embeddings.shape[1]
            logits = self._model(tokens, cache=self._cache, input_embeddings=embeddings)
        if not self._prompt_left:
            self._recycler = self._drafter.prepare(logits.shape[-1])
            self._began(Pass(len(self._text) - 1, [], logits[:, -1:], [], None))
        return logits

    def _pass_ahead(self, drawn: mx.array) -> mx.array:
        """Start a forward pass over a token that need not be known yet."""
        self._time(1, follows=self._timed == 1)
        logits = self._model(drawn[None], cache=self._cache)
        self._began(Pass(len(self._text), [], logits, [], None))
        self._unread = drawn
        return logits

    def _pass_with_draft(self, drawn: mx.array) -> mx.array:
        """Run a forward pass over a token and the draft that pays after it."""
        token, follows = int(drawn.item()), self._timed > 1
        began = self._now()
        self._take_back()
        self._text.extend([token])
        self._learn(self._unlearned)
        self._unlearned = []
        draft, gains = self._chain(self._room())
        draft = draft[: self._paying(gains)]
        read = [*self._again, token, *draft]
        self._time(len(read) if draft else 0, follows, began)
        before = Before(self._cache) if draft else None
        logits = self._model(mx.array([read], drawn.dtype), cache=self._cache)[:, len(self._again) :]
        self._began(Pass(len(self._text) - 1, draft, logits, read, before))
        return logits[:, :1]

    def _waiting_pays(self) -> bool:
        """Whether a draft after the token that is about to be known is likely to be worth more than the lead."""
        self._learn(self._unlearned[:-1])
        del self._unlearned[:-1]
        _, gains = self._chain(self._room() + 1)
        return self._paying(gains[1:]) > 0

    def _began(self, passed: Pass) -> None:
        self._passed, self._used, self._again = passed, 0, []
        self._unlearned.append(passed)

    def _take_back(self) -> None:
        """Roll the newest forward pass back to its sampled tokens."""
        assert self._passed is not None
        _, draft, _, read, before = self._passed
        if before is not None:
            kept = len(read) - len(draft) + self._used
            if before.keep(kept, len(read)):
                self._again = read[:kept]

    def _room(self) -> int:
        """Most tokens of a draft after one token more."""
        rows = most_rows(self._cache, self._quantised_from)
        most = self._drafter.most if rows is None else min(self._drafter.most, rows - 1)
        most = min(self._longest, most - len(self._again))
        return most if self._max_tokens < 0 else min(most, self._max_tokens - self._asked)

    def _chain(self, depth: int) -> tuple[list[int], np.ndarray]:
        """Return the most probable continuation of the sequence, and the probability of each of its tokens."""
        if depth < 1 or not len(self._text):
            return [], np.empty(0)
        if self._recycled is None:
            self._recycled = self._recycler.begin(self._text.tokens)
        chain = self._recycled.draft(self._text.tokens, depth)
        return chain.tokens[1:].tolist(), chain.values[1:]

    def _paying(self, gains: np.ndarray) -> int:
        """Return the length of a draft that gives the most tokens per second."""
        if not len(gains):
            return 0
        began = self._now()
        costs = self._drafter.costs()[len(self._again) :]
        self.away += self._now() - began
        return best_size(gains, costs)[0]

    def _learn(self, passes: list[Pass]) -> None:
        orders = self._recycler.options.orders
        for place, draft, logits, _, _ in passes:
            if place < 0:  # of a prompt of embeddings alone
                continue
            first = max(0, place + 1 - orders)
            tokens = np.append(self._text.tokens[first : place + 1], draft).astype(np.int32)
            ngrams = ngrams_at(tokens[None], np.array([len(tokens) - 1]), np.array([1 + len(draft)]), orders)
            self._recycler.learn_logits(ngrams, np.array(logits[0].astype(mx.float32)))

    def _read_unread(self) -> None:
        if self._unread is not None:
            self._text.extend([self._unread.item()])
            self._unread = None

    def _time(self, rows: int, follows: bool, now: float | None = None) -> None:
        """A pass of `rows` tokens begins; the one before took until now, if it `follows` in the same way."""
        now = self._now() if now is None else now
        if follows:
            self._drafter.took(self._timed, now - self._since)
        self._timed, self._since = rows, now

    def _now(self) -> float:
        return time.perf_counter() - compiling.seconds - self.away
