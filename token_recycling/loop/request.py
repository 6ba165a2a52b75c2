"""A request: tokens, stopping criteria, token selection, hints and drafter.

Stopping and selection equal those of `generate`: the criteria and processors that transformers prepares are called once
per token with the same tokens, including the padding before a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from .._util.device import derived_generator, random_state, set_random_state
from ..drafters._base import Drafter
from ..model.origin import name_of
from ..model.target import Target
from ..trees.draft import Context, Draft, Step
from .pacer import Pace, Pacer, now
from .processors import Scope, holds_at_nodes, penalize, scope
from .stats import Stats

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint
    from ..grammar.state import State
    from ..model.kv_cache import TreeCache
    from ..model.prefill import Reading
    from ..model.prefixes import Prefixes
    from ..trees.packed import PackedTrees

IMPOSSIBLE = -2
"""The choice at a node whose scores are no distribution; neither a token id nor the padding of a tree."""
_LEAST_GROWTH = 256
"""Minimum growth of the token buffer: the length limit may exceed any memory."""


class TokenSequence:
    """The tokens so far, and the criteria that end the sequence."""

    def __init__(
        self, prompt: torch.Tensor, criteria: StoppingCriteriaList, padding: int = 0, watched: bool = False
    ) -> None:
        """`prompt` (length,) int64 starts with `padding`; `criteria` as prepared by `generate`, with a length limit."""
        self.watched = watched
        """Whether user code runs between tokens, which may change processors and stopping criteria."""
        self.in_mode: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Enters the mode in effect at creation for user code: only inference mode may write to its tensors."""
        if torch.is_inference_mode_enabled():
            self.in_mode = torch.inference_mode
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        if not limits:
            raise ValueError("the length of a sequence must be limited; set max_new_tokens")
        limit = min(limits)
        self.max_length = limit if limit == math.inf else math.ceil(limit)
        """Maximum tokens of the sequence, padding included, unless user code changes it; an integer or infinity, though
        the limit may be a tensor or a fraction.
        """
        # Length and EOS criteria, part of every batch, are checked on plain numbers unless those may change. All other
        # criteria are called as they are, once per token.
        ends = [] if watched else [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
        self._eos = frozenset(token for tokens in ends for token in tokens.flatten().tolist())
        self.pads = pads_ended(criteria)
        self._last_column = math.inf if watched else self.max_length
        self._others = StoppingCriteriaList(one for one in criteria if watched or not _decides_on_numbers(one))
        without_scores = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)
        self._read_scores = any(type(other) not in without_scores for other in self._others)
        self.on_token: Callable[[int], None] | None = None
        """Called with every token, after the criteria."""
        # Tokens are written on the host and copied to the prompt's device when read there; writing a number through
        # numpy costs a fiftieth of writing it through torch. Until the first token the buffer is the caller's own
        # tensor, as in `generate`: a processor that writes to it changes the caller's prompt.
        self._host, self._buffer = prompt.cpu(), prompt
        self._cells = self._host.numpy()
        self.padding = padding
        self.columns = self._copied = len(prompt)
        """Number of tokens including padding; and how many of these are on the prompt's device."""
        self.ended = False
        """Whether the sequence has ended."""
        self.scores: list[torch.Tensor] | None = None
        """Processed scores (1, vocabulary) per emitted token, if kept; some criteria read them."""

    @property
    def tokens(self) -> torch.Tensor:
        """(length,) int64, a view."""
        return self.padded[0, self.padding :]

    @property
    def on_host(self) -> torch.Tensor:
        """(length,) int64 in host memory, a view."""
        return self._host[self.padding : self.columns]

    @property
    def padded(self) -> torch.Tensor:
        """(1, padding + length) int64, a view: the ids that `generate` passes to processors and criteria."""
        if self._copied < self.columns and self._host is not self._buffer:
            self._buffer[self._copied : self.columns] = self._host[self._copied : self.columns]
        self._copied = self.columns
        return self._buffer[None, : self.columns]

    def _grow(self) -> None:
        """More than double the buffer; views of the old buffer stay valid. A buffer that user code may hold is never
        written again: as in `generate`, each token creates new ids.
        """
        more = 1 if self.watched else len(self._host) + _LEAST_GROWTH
        on_host = self._host is self._buffer
        self._host = torch.cat([self._host, self._host.new_empty(more)])
        self._cells = self._host.numpy()
        self._buffer = self._host if on_host else torch.cat([self._buffer, self._buffer.new_empty(more)])

    @property
    def length(self) -> int:
        """Tokens of the sequence, without padding."""
        return self.columns - self.padding

    def append(self, token: int) -> bool:
        """Append a token; return whether the sequence ends with it. If a criterion raises, nothing is appended."""
        self.push(token)
        ended = token in self._eos or self.columns >= self._last_column
        if self._others:
            scores = tuple(self.scores) if self.scores is not None and self._read_scores else None
            try:
                with self.in_mode():
                    met = self._others(self.padded, scores)
                ended |= not bool((1 & ~met).any())  # as `generate` does, for any return type
            except BaseException:
                self.end_at(self.columns - 1)  # so no streamer receives the token
                raise
        self.ended = ended
        if self.on_token is not None:
            with self.in_mode():
                self.on_token(token)
        return ended

    def push(self, token: int) -> None:
        """Append a token without evaluating stopping criteria."""
        if self.columns == len(self._cells):
            self._grow()
        self._cells[self.columns] = token
        self.columns += 1

    def end_at(self, columns: int) -> None:
        """End the sequence after `columns` columns, dropping the rest."""
        self.columns, self.ended = columns, True
        self._copied = min(self._copied, columns)


def pads_ended(criteria: StoppingCriteriaList) -> bool:
    """Return whether `generate` pads ended sequences; otherwise they continue until all have ended."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def _decides_on_numbers(criterion: StoppingCriteria) -> bool:
    """Return whether a token and a length suffice for a criterion; `MaxLengthCriteria` may also have to warn."""
    if type(criterion) is MaxLengthCriteria:
        return (
            criterion.max_position_embeddings is None or criterion.max_position_embeddings + 1 >= criterion.max_length
        )
    return type(criterion) is EosTokenCriteria


class TokenSelector:
    """Selects the target's token at a node as `generate` does: processors, then argmax or one sample."""

    def __init__(
        self,
        sequence: TokenSequence,
        processors: LogitsProcessorList,
        sample: bool,
        keep_scores: bool = False,
        keep_logits: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self.sequence, self.processors, self.sample = sequence, processors, sample
        self.generator = generator
        """Random numbers of this sequence alone, on the prompt's device; None to use torch's global generator."""
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        sequence.scores = [] if keep_scores else None
        self.greedy = not (sample or len(processors) or keep_scores or keep_logits)
        """Whether the choice is the argmax of the logits and neither scores nor logits are kept."""
        self._warpers = [processor for processor in processors if scope(processor) >= Scope.SCORES]
        one_by_one = keep_scores or keep_logits or sequence.watched
        self.at_every_node = self.greedy or (not one_by_one and all(map(holds_at_nodes, processors)))
        """Whether the tokens at all nodes of a tree can be chosen at once."""
        self._left: list[Callable[[], None]] = []
        """For n = 0, 1, ... tokens of the path that `every_node` sampled: a callback that sets the generator to its
        state after n tokens.
        """

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token after the sequence so far, from logits (vocabulary,)."""
        if self.greedy:
            # On a CPU numpy takes a tenth of torch's time.
            return int(logits.float().numpy().argmax() if logits.device.type == "cpu" else logits.argmax())
        if self.sample:
            return int(torch.multinomial(self.distribution(logits), num_samples=1, generator=self.generator))
        return int(self.scored(logits).argmax(dim=-1))

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities (vocabulary,) to sample the next token from; called once per emitted token."""
        return torch.softmax(self.scored(logits), dim=-1)[0]

    def every_node(self, logits: torch.Tensor, tree: PackedTrees, deepest: int) -> torch.Tensor:
        """Choose the token (n,) after every node of one packed tree, from logits (n, vocabulary) on its device.
        Sampling uses the random numbers that calls along any path would consume; `IMPOSSIBLE` marks nodes without a
        distribution. The caller then reports the number of emitted tokens to `sampled`. Nothing waits for the device.
        """
        scores = logits.to(copy=True, dtype=torch.float32)
        for processor in self.processors:
            if scope(processor) == Scope.EACH_ROW:
                scores = processor(None, scores)
            else:
                scores = penalize(processor, scores, self.sequence.padded[0], tree)
        if not self.sample:
            return scores.argmax(dim=-1)
        probabilities = torch.softmax(scores, dim=-1)
        # As `torch.multinomial` samples one token. Nodes of equal depth share numbers: at most one of them is visited.
        noise = torch.empty_like(probabilities[: deepest + 1])
        self.sampled(0)  # of a repeated pass
        states = [random_state(logits.device, self.generator)]
        for row in noise:
            row.exponential_(generator=self.generator)
            states.append(random_state(logits.device, self.generator))
        self._left = [partial(set_random_state, logits.device, self.generator, state) for state in states]
        choices = (probabilities / noise.index_select(0, tree.depths[0])).argmax(dim=-1)
        return choices.where(probabilities.isfinite().all(dim=-1), IMPOSSIBLE)

    def sampled(self, tokens: int) -> None:
        """Rewind the generator to just after the first `tokens` tokens of the path that `every_node` sampled."""
        if self._left:
            self._left[tokens]()
        self._left = []

    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (n, vocabulary) of any model after those warpers that do not depend on the sequence."""
        scores = logits.to(copy=True, dtype=torch.float32)
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores

    def scored(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the processed scores (1, vocabulary) after the sequence so far, and record them if wanted. Raises
        TypeError, IndexError or RuntimeError, as `generate` would, if processors return anything else.
        """
        padded = self.sequence.padded
        raw = logits[None].to(copy=True, dtype=torch.float32, device=padded.device)
        with self.sequence.in_mode():
            scores = self.processors(padded, raw)
        # Where `generate` pads, it broadcasts a choice from scores (vocabulary,).
        fits = isinstance(scores, torch.Tensor) and (
            scores.shape[:-1] == (1,) or (scores.ndim == 1 and self.sequence.pads and not self.sample)
        )
        if not fits:
            raise _wrong_scores(self.processors, scores)
        if self.sequence.scores is not None:
            self.sequence.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        return scores

    def forget(self, tokens: int) -> None:
        """Drop the scores and logits after the first `tokens` tokens, where the sequence has ended."""
        for records in (self.sequence.scores, self.logits):
            if records is not None:
                del records[tokens:]


def _wrong_scores(processors: LogitsProcessorList, scores: Any) -> Exception:
    """Return the error for a result of processors that is no tensor of scores (1, vocabulary)."""
    names = ", ".join(name_of(processor) for processor in processors)
    if not isinstance(scores, torch.Tensor):
        return TypeError(f"logits processors must return a tensor of scores, got {type(scores).__name__} from {names}")
    problem = f"logits processors must return scores (1, vocabulary), got {tuple(scores.shape)} from {names}"
    return IndexError(problem) if scores.ndim < 2 else RuntimeError(problem)


@dataclass(frozen=True, eq=False)
class Hints:
    """Hints for one request; they never change its output."""

    prefixes: Prefixes | None = None
    """Prefix cache in which the beginning of the request is looked up and stored."""
    prediction: torch.Tensor | None = None
    """(n,) int64: expected output; a source of drafts that the target never reads."""
    nodes: int | None = None
    """Maximum number of drafted nodes in a forward pass; None for the drafter's own limit."""


NO_HINTS = Hints()


class Request:
    """State of one request: its tokens, token selection, drafter and statistics."""

    def __init__(
        self,
        target: Target,
        sequence: TokenSequence,
        selector: TokenSelector,
        drafter: Drafter,
        stats: Stats,
        cached: int = 0,
        hints: Hints = NO_HINTS,
        streamed: bool = False,
        reading: Reading | None = None,
    ) -> None:
        """`cached` tokens of the sequence are in the cache before the prompt is read, from slot 0 on. With `streamed`
        the first token is needed early, so the pass over the prompt verifies no draft. `reading` is called before each
        piece of the prompt and ends the request if it raises.
        """
        assert cached < sequence.length, "the last token, the root of the first draft, is in no cache"
        self.sequence, self.selector, self.drafter, self.stats = sequence, selector, drafter, stats
        self.cached, self.hints, self.traits = cached, hints, drafter.traits
        self.streamed, self.reading = streamed, reading
        self.target = target.unmeasured() if self.traits.isolates_requests else target
        """The model that decodes the request."""
        self.fails_alone = False
        """Whether an error of the processors, criteria or drafter ends this request alone."""
        self.error: Exception | None = None
        """The error that ended the request early, if any."""
        self.pace: Pace | None = None
        """The drafter and its drafting state; None until started."""
        self.constraint: Constraint | None = None
        """The grammar that constrains the output, if a processor of a supported library does."""
        if selector.processors:
            from ..grammar.constraint import constraint_of

            # Where drafts must be the same in every run or process, they must not depend on a clock.
            timed = target.processes < 2 and not self.traits.isolates_requests
            self.constraint = constraint_of(
                selector.processors, sequence.padded, sequence.length, timed, self.traits.grammar_statistics
            )
        self.draft_generator: torch.Generator | None = None
        """Random numbers of sampled drafts; the selector's generator serves the target's tokens alone."""
        if self.traits.samples and selector.sample:
            self.draft_generator = derived_generator(sequence.padded.device, selector.generator)

    @property
    def active(self) -> bool:
        """Whether more tokens will be emitted."""
        return self.error is None and not self.sequence.ended

    def fail(self, error: Exception) -> None:
        """End the request with an error of its processors, criteria or drafter, if it fails alone; else raise it."""
        if not self.fails_alone:
            raise error
        self.error = error

    def uncached(self) -> int:
        """Return the number of tokens to prefill: neither cached nor in the prefix cache."""
        prefixes, cached = self.hints.prefixes, self.cached
        if prefixes is not None and not cached:
            cached = prefixes.cached_tokens(self.sequence.on_host)
        return self.sequence.length - 1 - cached

    def is_given_up(self) -> bool:
        """Return whether the request has failed, or `reading` ends it now."""
        if self.reading is not None:
            try:
                self.reading()
            except Exception as error:
                self.fail(error)
        return self.error is not None

    def take_prefix(self) -> TreeCache | None:
        """Return a cache with the longest prefix of the sequence in the prefix cache; None without a prefix cache, or
        where a prefix is cached already.
        """
        prefixes = self.hints.prefixes
        if prefixes is None or self.cached:
            return None
        cache, self.cached = prefixes.take(self.sequence.on_host)
        self.stats.cached_tokens += self.cached
        return cache

    def start(self) -> Pace:
        """Start the drafter unless it is running; return its drafting state."""
        if self.pace is None:
            prompt = self.sequence.on_host.to(self.target.device, copy=True)
            drafter = self.drafter.start(prompt, self.target)
            if self.hints.prediction is not None:
                drafter.predict(self.hints.prediction)
            if self.hints.prefixes is not None and self.traits.prefixes:
                drafter.use_prefixes(self.hints.prefixes)
            self.pace = Pace(drafter, self.traits.nodes)
        return self.pace

    def draft(self, pacer: Pacer) -> tuple[Draft, Pace]:
        """Return a draft within the grammar, the length limits and the hints, and the drafting state. Raises ValueError
        if the root is not the newest token.
        """
        pace, sequence, limit = self.start(), self.sequence, self.target.max_length
        remaining = max(1, sequence.max_length - sequence.columns)  # at least one, as in `generate`
        state = None if self.constraint is None else self.constraint.at(sequence.on_host.numpy())
        draft = self._proposal(pacer, pace, state, remaining)
        if self.constraint is not None and not self.traits.within_grammars:
            draft = self.constraint.fitted(draft, remaining)
        depth = remaining - 1 if limit is None else max(0, min(remaining - 1, limit - sequence.length))
        if draft.depth > depth:
            draft = draft.cut(depth)
        if self.hints.nodes is not None:
            draft = draft.most_probable(1 + self.hints.nodes)
        return draft if self.target.info.branches else draft.first_branch(), pace

    def _proposal(self, pacer: Pacer, pace: Pace, state: State | None, remaining: int) -> Draft:
        """Return the drafter's draft, with `remaining` tokens to emit; a lone root where drafting is disabled."""
        budget, on_host = pacer.budget(pace, state is not None), self.sequence.on_host
        newest = int(on_host[-1])
        if budget is None:
            return Draft.chain([newest])
        tokens = on_host if self.traits.on_host else self.sequence.tokens.to(self.target.device)
        warp, began = self.selector.warp if self.selector.sample else None, now()
        draft = pace.drafter.draft(Context(tokens, remaining, warp, state, self.draft_generator, budget))
        pace.seconds = now() - began
        if draft.tokens[0] != newest:
            raise ValueError(
                f"the root of a draft must be the newest token, {newest}, got {draft.tokens[0]} from "
                f"{pace.drafter.describe()}; start the draft with `context.root`"
            )
        return draft.first_ranked(1 + pace.nodes) if isinstance(pace.nodes, int) else draft

    def observe(self, pacer: Pacer, step: Step) -> None:
        """Let the drafter learn from a step, and the grammar from the target's choices among allowed tokens."""
        pace = self.pace
        assert pace is not None, "a request begins before its first step"
        if self.constraint is not None:
            step = self.constraint.learn(step)
        began = now()
        pace.drafter.observe(step)
        pacer.count(pace, step, now() - began)

    def finish(self) -> None:
        """Add the drafter's counts to the statistics; called once, after the last step."""
        if self.pace is None:
            return
        drafter = self.pace.drafter
        try:
            self.stats.drafter_statistics.update(drafter.statistics())
            self.stats.drafter = drafter.describe()
        except Exception as error:
            self.fail(error)
