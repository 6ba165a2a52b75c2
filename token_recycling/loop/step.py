"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`TreeStepper.step`, then `learn`). The drafter proposes a tree from the sequence so far;
one forward pass gives the target's logits after every node; acceptance finds the tokens to emit and trims them at the
end of the sequence; the cache keeps the accepted slots; the step is yielded, and the drafter learns from it. The last
token of a sequence is never in the cache: it is the root of the next draft. So the pass over the prompt's last token
verifies the first draft, every emitted token belongs to a step, and plain decoding is the same loop with a lone root.

On CUDA forward passes can be captured (`cuda_graphs`): then the sequences lie in slots of those passes, and everything
else of a step is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..model.frequencies import by_turns
from ..model.kv_cache import TreeCache, slots, take_over, takes_frames
from ..model.pass_times import costs_of, pass_times
from ..model.prefill import Reading, cross_border
from ..model.tree_model import TreeModel, band_of, rows_of
from ..trees.draft import Draft, Step
from ..trees.packed import PackedTrees, send
from .accept import TreeSteps, accept_walk
from .hints import NO_HINTS, Hints
from .prompt import first_logits, give_states, prefill, reads_alone, reads_along
from .state import BatchState, RequestState, Sequence, TokenSelector, check_cached, places_left
from .stats import Clock, Stats


class Pass(NamedTuple):
    """Results of one forward pass for all sequences, at all n nodes of the largest draft."""

    lengths: Items[int]
    """Tokens of each sequence that were cached before."""
    starts: int | Items[int]
    """The slot of all roots, or of each, right behind its sequence."""
    logits: torch.Tensor
    """(batch, n, vocabulary)."""
    states: torch.Tensor | None = None
    """(batch, n, states * hidden), where drafters read hidden states."""
    trees: PackedTrees | None = None
    """The drafts on the device, where they were sent in one copy."""


class Passes(Protocol):
    """Forward passes over slots of their own, which hold the sequences of one batch: `cuda_graphs.passes`."""

    slots: TreeCache
    """Slots of the sequences, in order."""

    def describe(self) -> str:
        """Describe how steps are made."""

    def begin(self, target: TreeModel, cache: TreeCache, lengths: Items[int], longest: int) -> None:
        """Take over the sequences of a cache, of `lengths` cached tokens; they may grow up to `longest` tokens."""

    def forward(self, target: TreeModel, drafts: list[Draft], lengths: Items[int], states: tuple[int, ...]) -> Pass:
        """One pass over drafts below sequences of `lengths` cached tokens; the hidden states numbered `states`, too."""

    def join(self, target: TreeModel, other: TreeCache, sequences: int, held: int) -> None:
        """Add the sequence of another cache, whose tokens have the first `held` slots, behind `sequences` others."""

    def move(self, order: Items[int], slots: int) -> None:
        """Let sequences take other places: that in `order[place]` moves to `place`, which no later one needs."""

    def write(self, cache: Cache, lengths: Items[int]) -> None:
        """Let a cache hold the slots of the sequences, of `lengths` tokens."""


class TreeStepper:
    """Makes the steps of a batch: drafts of any shape, any number of sequences, every kind of token selection. Reads
    the prompts when it is made or in its first step.
    """

    def __init__(self, batch: BatchState, passes: Passes | None = None) -> None:
        """`passes` makes the forward passes behind the prompt; by default they are eager."""
        self.batch = batch
        take_over(batch.cache)
        if not reads_along(batch):
            prefill(batch)
        self._kept = TreeCache(batch.cache)
        self._passes = passes
        self._within: Passes | None = None
        """The passes in whose slots the sequences lie; None while these are in the batch's cache."""
        self._given = batch.cache
        """The cache that the batch came with."""
        self._steps: list[Step] = []
        """Steps to learn from."""
        self._prompt_alone = False
        """Whether the last forward pass read the prompts without a draft."""
        self._prompt_states: list[torch.Tensor] = []
        """Hidden states of the prompts that the last forward pass read, where drafters need them."""

    def step(self, active: list[int]) -> list[Step]:
        """Make one forward pass over all sequences; return the steps of those in `active`, trimmed, with slots kept.
        Call `learn` after the tokens were delivered.
        """
        clock = self.batch.clock
        self._prompt_alone = clock.reads_prompt and self.batch.prompt_alone
        drafts = self.batch.drafts([] if self._prompt_alone else active)
        clock.lap("retrieve")
        seen = self._forward(drafts, active)
        clock.lap("forward")
        self._steps = self._accept(drafts, seen, active)
        clock.lap("verify")
        self._keep(seen)
        clock.lap("update cache")
        return self._steps

    def _forward(self, drafts: list[Draft], active: list[int]) -> Pass:
        """One forward pass over all trees. Finished rows may have no position left: they are fully masked."""
        batch, lengths = self.batch, [row.sequence.length - 1 for row in self.batch.requests]
        if batch.target.info.border is not None:
            cross_border(batch.target, batch.sequences, batch.cache)
        held = batch.cache.get_seq_length()
        if self._passes is not None and held >= max(lengths):
            seen = self._behind_prompt(self._passes, drafts, lengths)
        else:
            with batch.states() as states:
                seen = self._eager(drafts, lengths, active)
            if states is not None:
                n, read = seen.logits.shape[1], torch.cat(states, dim=1).to(batch.target.device)
                if 0 < read.shape[1] - n == max(lengths) - held:  # shorter sequences stand behind padding
                    self._prompt_states = [read[row, max(lengths) - length : -n] for row, length in enumerate(lengths)]
                seen = seen._replace(states=read[:, -n:])
        # Acceptance node by node is faster in float32.
        return seen if self._at_once(drafts, active) else seen._replace(logits=seen.logits.float())

    def _behind_prompt(self, passes: Passes, drafts: list[Draft], lengths: list[int]) -> Pass:
        """A pass over sequences whose prompts were read, in the slots of `passes`."""
        batch, target = self.batch, self.batch.target
        if self._within is None:
            longest = max(row.sequence.max_length for row in batch.requests)
            passes.begin(target, self._kept, lengths, longest)
            self._within = passes
        batch.clock.lap("prepare")
        seen = passes.forward(target, drafts, lengths, batch.layers_read)
        self._use_slots(passes)
        return seen

    def _use_slots(self, passes: Passes) -> None:
        self._kept, self.batch.cache = passes.slots, passes.slots.cache

    def _eager(self, drafts: list[Draft], lengths: list[int], active: list[int]) -> Pass:
        """A pass that also reads the uncached part of a prompt."""
        batch, target, cache = self.batch, self.batch.target, self.batch.cache
        logits = first_logits(batch, drafts, self._prompt_alone) if batch.clock.reads_prompt else None
        if logits is not None:
            first = cache.get_seq_length() - logits.shape[1]
            return Pass(lengths, first, logits)
        held = cache.get_seq_length()
        if target.inputs.fixed_shapes and takes_frames(cache):
            self._kept.settle(lengths)
            n = rows_of(max(len(draft.tree) for draft in drafts))
            trees = send(drafts, lengths, n, target.device)
            inputs = target.inputs.of_packed(trees, band_of(max(lengths) + n), cache)
            batch.clock.lap("prepare")
            return Pass(lengths, lengths, target.forward(inputs, cache), trees=trees)
        visible = [length if row in active else 0 for row, length in enumerate(lengths)]
        inputs = target.inputs.of(drafts, visible, held)
        batch.clock.lap("prepare")
        return Pass(lengths, held, target.forward(inputs, cache))

    def _at_once(self, drafts: list[Draft], active: list[int]) -> bool:
        """Whether trees are verified at once: on an accelerator a read costs more than choosing at every node."""
        return self.batch.target.device.type != "cpu" and all(
            self.batch.requests[row].selector.at_every_node and not drafts[row].sampled_from for row in active
        )

    def _steps_at_once(self, drafts: list[Draft], seen: Pass, active: list[int]) -> TreeSteps:
        """Choose the token after every node and accept, without waiting for the device until the end."""
        logits, requests = seen.logits, self.batch.requests
        trees = seen.trees or send(drafts, seen.lengths, logits.shape[1], logits.device)
        choices = logits.argmax(dim=-1)
        for row in active:
            if not requests[row].selector.greedy:
                with requests[row].guarded():
                    choices[row] = requests[row].selector.every_node(logits[row], trees.of(row), drafts[row].tree.depth)
        return TreeSteps(drafts, logits, trees, choices, max(requests[row].traits.top_k for row in active))

    def _accept(self, drafts: list[Draft], seen: Pass, active: list[int]) -> list[Step]:
        """Return the steps of the sequences in `active`, without those that failed."""
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

    def _keep(self, seen: Pass) -> None:
        """Keep the slots of accepted nodes."""
        if not self._prompt_alone:  # the first token waits for no copies
            accepted = {step.row: step.accepted for step in self._steps}
            self._kept.keep(seen.starts, seen.lengths, [accepted.get(row, []) for row in range(len(seen.lengths))])

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
        """Leave in the caller's cache all tokens of each sequence but the last; called after the last step."""
        if self._within is not None and self.batch.returns_cache:
            self._within.write(self._given, [row.sequence.length - 1 for row in self.batch.requests])

    def join(self, other: TreeStepper) -> None:
        """Add the request of another batch of the same model, after its first step."""
        (request,) = other.batch.requests
        if self._within is None:
            self._kept.join(other._kept)
        else:
            held = request.sequence.length - 1
            self._within.join(self.batch.target, other._kept, len(self.batch.requests), held)
            self._use_slots(self._within)
        self.batch.requests.append(request)

    def leave(self, finished: Collection[RequestState]) -> None:
        """Remove finished requests; at least one must remain. The last one takes the place of a removed one."""
        requests, order = self.batch.requests, places_left(self.batch.requests, finished)
        requests[:] = [requests[row] for row in order]
        longest = max(request.sequence.length - 1 for request in requests)
        if self._within is None:
            self._kept.select(order, longest)
        else:
            self._within.move(order, longest)


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
    passes: Passes | None = None,
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

    `after_pass` is called after every forward pass and may end sequences. `passes` makes the forward passes behind the
    prompts; by default they are eager. With `streamed` the pass over a long prompt verifies no draft, so that the first
    token comes early. `reading` is called before each piece of a prompt, and may raise. `hints` are those of every
    sequence.
    """
    cached = cached or [slots(cache)] * len(sequences)
    fixed = drafter.traits.begins_anew
    timed = not fixed and target.info.processes < 2
    requests = [
        RequestState(sequence, selector, drafter, stats, tokens, hints, timed)
        for sequence, selector, tokens in zip(sequences, selectors, cached, strict=True)
    ]
    longest, kind = max(sequence.length for sequence in sequences), kind_of(passes)
    target = target.unmeasured() if fixed else target
    costs, clock = costs_of(target, len(sequences), longest, kind, fixed=fixed), Clock(stats, target.device)
    batch = BatchState(target, list(requests), costs, cache, clock, streamed or fixed, reading, returns_cache)
    made = begin(batch, passes)
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
        with ExitStack() as ending:  # each, whatever the others raise
            ending.callback(pass_times(target, kind).keep)
            for request in requests:
                ending.callback(request.finish)
            ending.callback(made.close)


Backend = Callable[[TreeModel, Drafter | None, Cache | None], AbstractContextManager[Passes | None]]
"""A context manager for the length of a run, of a drafter in a cache or of many that join and leave. It yields what
makes the forward passes, or None for eager ones.
"""


def eager(
    target: TreeModel, drafter: Drafter | None = None, cache: Cache | None = None
) -> AbstractContextManager[Passes | None]:
    """Make eager passes."""
    return nullcontext()


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
    """Yield the steps of `decode`, with its options, whose forward passes are made by `backend`; other threads' calls
    wait for a step where a forward pass changes the model.
    """
    border = target.info.border
    with backend(target, drafter, cache) as passes:
        steps = decode(target, sequences, drafter, selectors, cache, stats, passes=passes, **options)
        with closing(steps):
            yield from by_turns(target, steps) if border is not None and border.changes_model else steps


def kind_of(passes: Passes | None) -> str:
    """The name under which the costs of steps are kept."""
    return "" if passes is None else "captured"


def begin(batch: BatchState, passes: Passes | None = None) -> TreeStepper:
    """Create the stepper of a batch. Raises ValueError for a cache that holds all of a sequence."""
    for request in batch.requests:
        check_cached(request.cached, request.sequence.length)
        request.stats.prompt_tokens += request.sequence.length
    stats = batch.requests[0].stats
    batch.prompt_alone = reads_alone(batch)
    stats.drafter = "" if batch.prompt_alone else batch.sequence_drafter(batch.requests[0]).describe()
    stats.path = "eager" if passes is None else passes.describe()
    return TreeStepper(batch, passes)


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


def learn(batch: BatchState, stepper: TreeStepper) -> None:
    """Let drafters learn from the last steps of a batch, after their tokens were delivered."""
    batch.clock.restart()
    stepper.learn()
    batch.clock.lap("update matrix")
