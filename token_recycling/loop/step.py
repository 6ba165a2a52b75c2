"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`TreeStepper.step`, then `learn`). The drafter proposes a tree from the sequence so far;
one forward pass gives the target's logits after every node; acceptance finds the tokens to emit and trims them at the
end of the sequence; the cache keeps the accepted slots; the step is yielded, and the drafter learns from it. The last
token of a sequence is never in the cache: it is the root of the next draft. So the pass over the prompt's last token
verifies the first draft, every emitted token belongs to a step, and plain decoding is the same loop with a lone root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..model.kv_cache import TreeCache, slots, takes_frames, unroll
from ..model.pass_times import costs_of, pass_times
from ..model.prefill import Reading, cross_border
from ..model.tree_model import TreeModel
from ..trees.draft import Draft, Step
from ..trees.packed import PackedTrees, send
from .accept import TreeSteps, accept_walk
from .hints import NO_HINTS, Hints
from .prompt import first_logits, give_states, prefill, reads_alone, reads_along
from .state import BatchState, RequestState, Sequence, TokenSelector, check_cached, places_left
from .stats import Clock, Stats


class Stepper(Protocol):
    """Makes the steps of a batch, eagerly or captured. Reads the prompts when it is made or in its first step."""

    def step(self, active: list[int]) -> list[Step]:
        """Make one forward pass over all sequences; return the steps of those in `active`, trimmed, with slots kept."""

    def learn(self) -> None:
        """Learn from the last step, after its tokens were delivered."""

    def leave(self, finished: Collection[RequestState]) -> None:
        """Remove finished requests; at least one must remain. The last one takes the place of a removed one."""

    def close(self) -> None:
        """Leave in the cache all tokens of each sequence but the last; called after the last step."""

    def describe(self) -> str:
        """Describe how steps are made and, if that was not what was asked for, why."""


S = TypeVar("S", bound=Stepper)


class _Pass(NamedTuple):
    """Results of one forward pass for all sequences, at all n nodes of the largest draft."""

    lengths: list[int]  # tokens of each sequence that were cached before
    logits: torch.Tensor  # (batch, n, vocabulary)
    states: torch.Tensor | None = None  # (batch, n, states * hidden), where drafters read hidden states


class TreeStepper:
    """Makes steps eagerly: drafts of any shape, any number of sequences, every kind of token selection."""

    def __init__(self, batch: BatchState) -> None:
        self.batch = batch
        unroll(batch.cache)
        if not reads_along(batch):
            prefill(batch)
        self._kept = TreeCache(batch.cache)
        self._steps: list[Step] = []
        """Steps to learn from."""
        self._trees: PackedTrees | None = None
        """Trees of this step's drafts, where they were sent to the device in one copy."""
        self._prompt_alone = False
        """Whether the last forward pass read the prompts without a draft."""
        self._prompt_states: list[torch.Tensor] = []
        """Hidden states of the prompts that the last forward pass read, where drafters need them."""

    def step(self, active: list[int]) -> list[Step]:
        """Make one forward pass over all sequences; see `Stepper`. Call `learn` after the tokens were delivered."""
        clock = self.batch.clock
        self._prompt_alone, self._trees = clock.reads_prompt and self.batch.prompt_alone, None
        drafts = self.batch.drafts([] if self._prompt_alone else active)
        clock.lap("retrieve")
        seen = self._forward(drafts, active)
        clock.lap("forward")
        self._steps = self._accept(drafts, seen, active)
        clock.lap("verify")
        self._keep(seen)
        clock.lap("update cache")
        return self._steps

    def _forward(self, drafts: list[Draft], active: list[int]) -> _Pass:
        """One forward pass over all trees. Finished rows may have no position left: they are fully masked."""
        batch, rows = self.batch, self.batch.requests
        if batch.target.info.border is not None:
            cross_border(batch.target, batch.sequences, batch.cache)
        lengths = [row.sequence.length - 1 for row in rows]
        held = batch.cache.get_seq_length()
        with batch.states() as states:
            logits = self._logits(drafts, lengths, active)
        if states is None:
            return _Pass(lengths, logits)
        n, read = logits.shape[1], torch.cat(states, dim=1).to(batch.target.device)
        if 0 < read.shape[1] - n == max(lengths) - held:  # shorter sequences stand behind padding
            self._prompt_states = [read[row, max(lengths) - length : -n] for row, length in enumerate(lengths)]
        return _Pass(lengths, logits, read[:, -n:])

    def _logits(self, drafts: list[Draft], lengths: list[int], active: list[int]) -> torch.Tensor:
        """Logits (batch, n, vocabulary) after all nodes, from a pass that also reads the uncached part of a prompt."""
        batch, target, cache = self.batch, self.batch.target, self.batch.cache
        logits = first_logits(batch, drafts, self._prompt_alone) if batch.clock.reads_prompt else None
        if logits is None:
            lengths = [length if row in active else 0 for row, length in enumerate(lengths)]
            held = cache.get_seq_length()
            if target.inputs.fixed_shapes and held:
                TreeCache(cache)  # takes over its layers, where the prompt was read without a draft
            if target.inputs.fixed_shapes and takes_frames(cache):
                inputs, self._trees = target.inputs.of_packed(drafts, lengths, held)
            else:
                inputs = target.inputs.of(drafts, lengths, held)
            batch.clock.lap("prepare")
            logits = target.forward(inputs, cache)
        # Acceptance node by node is faster in float32.
        return logits if self._at_once(drafts, active) else logits.float()

    def _at_once(self, drafts: list[Draft], active: list[int]) -> bool:
        """Whether trees are verified at once: on an accelerator a read costs more than choosing at every node."""
        return self.batch.target.device.type != "cpu" and all(
            self.batch.requests[row].selector.at_every_node and not drafts[row].sampled_from for row in active
        )

    def _steps_at_once(self, drafts: list[Draft], seen: _Pass, active: list[int]) -> TreeSteps:
        """Choose the token after every node and accept, without waiting for the device until the end."""
        logits, requests = seen.logits, self.batch.requests
        trees = self._trees or send(drafts, seen.lengths, logits.shape[1], logits.device)
        choices = logits.argmax(dim=-1)
        for row in active:
            if not requests[row].selector.greedy:
                with requests[row].guarded():
                    n = len(drafts[row].tree)
                    choices[row, :n] = requests[row].selector.every_node(
                        logits[row, :n], trees.depths[row, :n], drafts[row].tree.depth
                    )
        return TreeSteps(drafts, logits, trees, choices, max(requests[row].traits.top_k for row in active))

    def _accept(self, drafts: list[Draft], seen: _Pass, active: list[int]) -> list[Step]:
        """Return the steps of the sequences in `going`, without those that failed."""
        at_once, steps = self._steps_at_once(drafts, seen, active) if self._at_once(drafts, active) else None, []
        for row in active:
            request, draft, n = self.batch.requests[row], drafts[row], len(drafts[row].tree)
            if request.error is not None:
                continue
            with request.guarded():
                append = request.sequence.append
                if at_once is not None:
                    step = at_once.step(row, append)
                    request.selector.sampled(len(step.tokens))
                else:
                    step = accept_walk(draft, seen.logits[row, :n], append, request.selector, row)
                if seen.states is not None:
                    step = replace(step, states=seen.states[row, :n])
                steps.append(step)
        return steps

    def _keep(self, seen: _Pass) -> None:
        """Keep the slots of accepted nodes."""
        if not self._prompt_alone:  # the first token waits for no copies
            accepted = {step.row: step.accepted for step in self._steps}
            first = self.batch.cache.get_seq_length() - seen.logits.shape[1]
            self._kept.keep(first, seen.lengths, [accepted.get(row, []) for row in range(len(seen.lengths))])

    def learn(self) -> None:
        """Learn from the last step; where a prompt was read alone, first ask for the draft that was left out."""
        steps, self._steps = {step.row: step for step in self._steps}, []
        target, costs = self.batch.target, self.batch.costs
        if self._prompt_states:
            give_states(self.batch, self._prompt_states)
            self._prompt_states = []
        for row, request in enumerate(self.batch.requests):
            with request.guarded():
                if self._prompt_alone:
                    request.query_drafter(target, costs, request.prompt, remaining=1)
                if row in steps:
                    request.observe(target, costs, steps[row])

    def close(self) -> None:
        """Do nothing: the cache is up to date after every step."""

    def describe(self) -> str:
        return "eager"

    def join(self, other: TreeStepper) -> None:
        """Add the requests of another batch of the same model, after their first steps."""
        self._kept.join(other._kept)
        self.batch.requests += other.batch.requests

    def leave(self, finished: Collection[RequestState]) -> None:
        """Remove finished requests; see `Stepper`."""
        requests, order = self.batch.requests, places_left(self.batch.requests, finished)
        requests[:] = [requests[row] for row in order]
        self._kept.select(order, max(request.sequence.length - 1 for request in requests))


@torch.inference_mode(False)  # matrices and caches outlive the call, and must be usable outside inference mode
@torch.no_grad()
def decode(
    target: TreeModel,
    sequences: list[Sequence],
    drafter: Drafter,
    selectors: list[TokenSelector],
    cache: Cache,
    stats: Stats,
    *,
    cached: list[int] | None = None,
    after_pass: Callable[[], None] | None = None,
    stepper: Callable[[BatchState], Stepper] = TreeStepper,
    kind: str = "",
    streamed: bool = False,
    reading: Reading | None = None,
    keeps_all: bool = True,
    returns_cache: bool = True,
    hints: Hints = NO_HINTS,
) -> Generator[list[Step]]:
    """Yield the steps of each forward pass, one for every unfinished sequence, until all sequences have ended.

    `cache` holds nothing or a prefix of each sequence, from slot 0 on: `cached[row]` tokens of it, where the lengths
    differ. Afterwards it holds all but the last token of each sequence, then unused slots; without `returns_cache` its
    contents are unspecified. Without `keeps_all` sequences leave the batch when they end, and `Step.row` counts those
    that are left: passes over fewer sequences take less time.

    `after_pass` is called after every forward pass and may end sequences. `stepper` makes the steps; measured costs are
    kept under the name `kind`. With `streamed` the pass over a long prompt verifies no draft, so that the first token
    comes early. `reading` is called before each piece of a prompt, and may raise. `hints` are those of every sequence.
    """
    cached = cached or [slots(cache)] * len(sequences)
    requests = [
        RequestState(sequence, selector, drafter, stats, tokens, hints)
        for sequence, selector, tokens in zip(sequences, selectors, cached, strict=True)
    ]
    longest = max(sequence.length for sequence in sequences)
    fixed = drafter.traits.begins_anew
    target = target.unmeasured() if fixed else target
    costs, clock = costs_of(target, len(sequences), longest, kind, fixed=fixed), Clock(stats, target.device)
    batch = BatchState(target, list(requests), costs, cache, clock, streamed or fixed, reading, returns_cache)
    made = begin(batch, stepper)
    active = list(range(len(requests)))
    try:
        while active:
            steps = made.step(active)
            count(batch, steps)
            if after_pass is not None:
                after_pass()
            active = [row for row in active if not batch.requests[row].sequence.ended]
            try:
                yield steps
            finally:
                learn(batch, made)
            if not keeps_all and 0 < len(active) < len(batch.requests):
                made.leave([request for request in batch.requests if request.sequence.ended])
                active = list(range(len(batch.requests)))
                costs.share(len(active), max(request.sequence.length for request in batch.requests))
    finally:
        made.close()
        for request in requests:
            request.finish()
        pass_times(target, kind).keep()


class StepBackend(NamedTuple):
    """How the steps of one run are made: eagerly or captured."""

    kind: str
    """Name under which their costs are kept; empty for eager steps."""
    stepper: Callable[[BatchState], Stepper]
    """Makes the stepper."""


Backend = Callable[
    [TreeModel, list[Sequence], list[TokenSelector], Drafter, Cache], AbstractContextManager[StepBackend]
]
"""A context manager for the length of a run; it yields how steps are made."""


def decode_with(
    backend: Backend,
    target: TreeModel,
    sequences: list[Sequence],
    selectors: list[TokenSelector],
    drafter: Drafter,
    cache: Cache,
    stats: Stats,
    **options: Any,
) -> Generator[list[Step]]:
    """Yield the steps of `decode`, with its options, made by `backend`; other threads' calls wait where a forward pass
    changes the model.
    """
    run = target, sequences, selectors, drafter, cache
    with target.alone(), backend(*run) as (kind, stepper):
        options |= {"stepper": stepper, "kind": kind}
        with closing(decode(target, sequences, drafter, selectors, cache, stats, **options)) as passes:
            yield from passes


def begin(batch: BatchState, stepper: Callable[[BatchState], S]) -> S:
    """Create the stepper of a batch. Raises ValueError for a cache that holds all of a sequence."""
    for request in batch.requests:
        check_cached(request.cached, request.sequence.length)
        request.stats.prompt_tokens += request.sequence.length
    stats = batch.requests[0].stats
    batch.prompt_alone = reads_alone(batch)
    stats.drafter = "" if batch.prompt_alone else batch.sequence_drafter(batch.requests[0]).describe()
    made = stepper(batch)
    stats.path = made.describe()
    return made


def count(batch: BatchState, steps: list[Step]) -> None:
    """Count the steps of one forward pass, and the time that it took."""
    for step in steps:
        batch.requests[step.row].stats.count(step)
    batch.costs.nodes = max((len(step.draft.tree) for step in steps), default=1)
    if batch.clock.reads_prompt:
        batch.clock.reads_prompt = False
        for step in steps:
            batch.requests[step.row].stats.first_tokens += len(step.tokens)
    elif steps:
        longest = max(batch.requests[step.row].sequence.length for step in steps)
        batch.costs.took(batch.costs.nodes, batch.clock.pass_seconds, longest)


def learn(batch: BatchState, stepper: Stepper) -> None:
    """Let drafters learn from the last steps of a batch, after their tokens were delivered."""
    batch.clock.restart()
    stepper.learn()
    batch.clock.lap("update matrix")
