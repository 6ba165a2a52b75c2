"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`Batch.step`, then `learn`). The drafters propose a tree for each sequence; one forward
pass gives the target's logits after every node; acceptance finds the tokens to emit and trims them at the end of the
sequence; the runner keeps the accepted slots; the step is delivered, and the drafters learn from it. Every emitted
token belongs to a step, and plain decoding is the same loop with a lone root.

All of a prompt but its last token is read before the first step, or with it where there is one sequence: then the pass
that reads the prompt verifies the first draft too, unless somebody waits for the first token of a long prompt. The
runner (`model.runner`) owns the slots of the sequences and makes the passes, eagerly or captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..model.frequencies import by_turns
from ..model.pass_times import pass_times
from ..model.prefill import Reading
from ..model.runner import Backend, EagerRunner, Pass, Runner, Runners, States, eager
from ..model.target import Target
from ..trees.draft import Draft, Step
from ..trees.packed import send
from .accept import TreeSteps, accept_walk
from .hints import NO_HINTS, Hints
from .pacer import Pacer, Proposal
from .state import RequestState, Sequence, TokenSelector
from .stats import Clock, Stats

_SHORT_PROMPT = 32
"""Uncached tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


class Batch:
    """Sequences that share forward passes: drafts of any shape, every kind of token selection."""

    def __init__(
        self,
        target: Target,
        requests: list[RequestState],
        pacer: Pacer,
        cache: Cache,
        clock: Clock,
        *,
        streamed: bool = False,
        reading: Reading | None = None,
    ) -> None:
        """`cache` holds `cached` tokens of each request, from slot 0 on. `streamed`: a client waits for the first
        token. `reading` is called before each piece of a prompt, and may raise.
        """
        self.target, self.requests, self.pacer, self.clock = target, requests, pacer, clock
        self.reading = reading
        self.use(cache)
        self._along = target.info.recurrent or (len(requests) == 1 and target.info.border is None)
        """Whether the first step reads the prompt too: of one sequence, where the model computes alike at every length,
        or of any, where states over the sequence must be what `generate` has then.
        """
        self._waited_for = streamed
        self._prompt_alone = False
        """Whether the next forward pass reads the prompts without a draft."""
        self._states_read: list[torch.Tensor] = []
        """(tokens, states * hidden) each: of the pieces of the prompt read so far, where its drafter needs them."""
        self._prompt_states: list[torch.Tensor] = []
        """Hidden states of the prompts that the last forward pass read, where drafters need them."""
        self._steps: list[Step] = []
        """Steps to learn from."""

    @property
    def active(self) -> list[int]:
        """Places of the requests that will emit more tokens."""
        return [row for row, request in enumerate(self.requests) if request.active]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(request.sequence.length for request in self.requests)

    @property
    def _states(self) -> States | None:
        """Which hidden states drafters need, if any."""
        return next((request.traits.states for request in self.requests if request.traits.states is not None), None)

    # Prompts

    def use(self, cache: Cache) -> None:
        """Begin with a cache that holds `cached` tokens of each request, from slot 0 on."""
        self._eager = EagerRunner(self.target, cache, self.reading, partial(self.clock.lap, "prepare"))
        self.runner: Runner = self._eager
        """Owns the slots of the sequences, in the order of the requests."""

    def read(self, most: int | None = None) -> None:
        """Read all of each sequence but its last token; of a single sequence at most `most` tokens more."""
        sequences = [request.sequence.tokens for request in self.requests]
        cached = [request.cached for request in self.requests]
        if most is not None:
            sequences = [sequence[: held + most + 1] for sequence, held in zip(sequences, cached, strict=True)]
        states = self.runner.prefill(sequences, cached, self._states)
        if states is not None and most is not None:
            self._states_read += states
        elif states is not None:
            self._give_states(states)
        for request, sequence in zip(self.requests, sequences, strict=True):
            request.cached = len(sequence) - 1

    def begin(self, runners: Runners | None = None) -> None:
        """Prepare the first step, whose passes behind the prompts are made by `runners`; by default eagerly. Raises
        ValueError for a cache that holds all of a sequence.
        """
        for request in self.requests:
            check_cached(request.cached, request.sequence.length)
            request.stats.prompt_tokens += request.sequence.length
        first = self.requests[0]
        uncached = first.sequence.length - first.cached
        self._prompt_alone = self.target.info.recurrent or (
            self._waited_for and self._along and uncached > _SHORT_PROMPT
        )
        first.stats.drafter = "" if self._prompt_alone else first.started(self.target).drafter.describe()
        if runners is not None:
            self.runner = runners.runner(self._eager, max(request.sequence.max_length for request in self.requests))
        first.stats.path = self.runner.describe()
        if not self._along:
            self.read()

    def _give_states(self, states: list[torch.Tensor]) -> None:
        """Give each drafter the hidden states (n, states * hidden) of its prompt: of earlier pieces, then `states`."""
        for request, last in zip(self.requests, states, strict=True):
            with request.guarded():
                request.started(self.target).drafter.read_prompt(torch.cat([*self._states_read, last]))
        self._states_read.clear()

    # One step

    def step(self) -> list[Step]:
        """Make one forward pass over all sequences; return the steps of those that are active, trimmed, with slots
        kept. Call `learn` after the tokens were delivered.
        """
        active, clock = self.active, self.clock
        drafts = self._drafts([] if self._prompt_alone else active)
        clock.lap("retrieve")
        on_host = [request.sequence.on_host for request in self.requests]  # a later pass needs their lengths alone
        seen = self.runner.forward(drafts, on_host, active, self._states)
        at_once = self._at_once(drafts, active)
        if not at_once:  # acceptance node by node is faster in float32
            seen = seen._replace(logits=seen.logits.float())
        self._prompt_states = [*seen.prompt_states]
        clock.lap("forward")
        self._steps = self._accept(drafts, seen, active, at_once)
        clock.lap("verify")
        if not self._prompt_alone:  # the first token waits for no copies
            accepted: list[list[int]] = [[]] * len(self.requests)
            for step in self._steps:
                accepted[step.row] = step.accepted
            self.runner.keep(seen, accepted)
        clock.lap("update cache")
        self._count()
        return self._steps

    def _drafts(self, active: list[int]) -> list[Draft]:
        """Return a draft for each request in `active`, pruned together; a lone root for the others and for those that
        fail.
        """
        proposals: dict[int, Proposal] = {}
        for row in active:
            request = self.requests[row]
            with request.guarded():
                proposals[row] = request.draft(self.target, self.pacer), request.started(self.target)
        best = dict(zip(proposals, self.pacer.best([*proposals.values()]), strict=True))
        return [
            request.verifiable(self.target, best[row]) if row in best else Draft.chain(request.sequence.on_host[-1:])
            for row, request in enumerate(self.requests)
        ]

    def _at_once(self, drafts: list[Draft], active: list[int]) -> bool:
        """Whether trees are verified at once: on an accelerator a read costs more than choosing at every node."""
        return self.target.device.type != "cpu" and all(
            self.requests[row].selector.at_every_node and not drafts[row].sampled_from for row in active
        )

    def _steps_at_once(self, drafts: list[Draft], seen: Pass, active: list[int]) -> TreeSteps:
        """Choose the token after every node and accept, without waiting for the device until the end."""
        logits, requests = seen.logits, self.requests
        trees = seen.trees or send(drafts, seen.lengths, logits.shape[1], logits.device)
        choices = logits.argmax(dim=-1)
        for row in active:
            if not requests[row].selector.greedy:
                with requests[row].guarded():
                    choices[row] = requests[row].selector.every_node(logits[row], trees.of(row), drafts[row].depth)
        return TreeSteps(drafts, logits, trees, choices, max(requests[row].traits.top_k for row in active))

    def _accept(self, drafts: list[Draft], seen: Pass, active: list[int], at_once: bool) -> list[Step]:
        """Return the steps of the sequences in `active`, without those that failed."""
        tree_steps, steps = self._steps_at_once(drafts, seen, active) if at_once else None, []
        for row in active:
            request, draft, n = self.requests[row], drafts[row], len(drafts[row])
            if request.error is not None:
                continue
            with request.guarded():
                append = request.sequence.append
                if tree_steps is not None:
                    step = tree_steps.step(row, append)
                    request.selector.sampled(len(step.tokens))
                else:
                    step = accept_walk(draft, seen.logits[row, :n], append, request.selector, row)
                if seen.states is not None:
                    step = replace(step, states=seen.states[row, :n])
                steps.append(step)
        return steps

    def _count(self) -> None:
        """Count the steps of the last forward pass, and the time that it took."""
        reads_prompt, self.clock.reads_prompt = self.clock.reads_prompt, False
        largest = longest = 1
        for step in self._steps:
            request = self.requests[step.row]
            request.stats.count(step)
            request.stats.first_tokens += len(step.tokens) if reads_prompt else 0
            largest, longest = max(largest, len(step.draft)), max(longest, request.sequence.length)
        self.pacer.took(largest, 0.0 if reads_prompt else self.clock.pass_seconds, longest)

    def learn(self) -> None:
        """Let drafters learn from the last step, after its tokens were delivered; where a prompt was read alone, first
        ask for the draft that was left out.
        """
        self.clock.restart()
        steps, self._steps = {step.row: step for step in self._steps}, []
        alone, self._prompt_alone = self._prompt_alone, False
        if self._prompt_states:
            self._give_states(self._prompt_states)
            self._prompt_states = []
        for row, request in enumerate(self.requests):
            with request.guarded():
                if alone:
                    request.query_drafter(self.target, self.pacer, request.prompt, remaining=1)
                if row in steps:
                    request.observe(self.target, self.pacer, steps[row])
        self.clock.lap("update matrix")

    # Sequences that come and go

    def join(self, other: Batch) -> None:
        """Add the request of another batch of the same model, after its first step."""
        (request,) = other.requests
        self.runner.join(other._eager, len(self.requests), request.sequence.length - 1)
        self.requests.append(request)

    def leave(self, finished: Collection[RequestState]) -> None:
        """Remove finished requests; at least one must remain. The last one takes the place of a removed one."""
        order = places_left(self.requests, finished)
        self.requests[:] = [self.requests[row] for row in order]
        self.runner.leave(order, self.longest - 1)

    def give_back(self) -> None:
        """Leave in the cache that the batch began with all tokens of each sequence but the last."""
        self.runner.give_back([request.sequence.length - 1 for request in self.requests])


@dataclass(frozen=True, eq=False)
class Run:
    """How the requests of a call are decoded."""

    streamed: bool = False
    """Whether the pass over a long prompt verifies no draft, so that the first token comes early."""
    reading: Reading | None = None
    """Called before each piece of a prompt; it may raise."""
    after_pass: Callable[[], None] | None = None
    """Called after every forward pass; it may end sequences."""
    keeps_all: bool = True
    """Whether sequences that have ended stay in the batch. Else they leave it, and `Step.row` counts those that are
    left: passes over fewer sequences take less time.
    """
    returns_cache: bool = True
    """Whether the cache holds all but the last token of each sequence afterwards; else its contents are unspecified."""


def requests_of(
    target: Target,
    sequences: list[Sequence],
    selectors: list[TokenSelector],
    drafter: Drafter,
    stats: Stats,
    cached: list[int],
    hints: Hints = NO_HINTS,
) -> list[RequestState]:
    """Return the requests of one call: `cached[row]` tokens of each sequence are in its cache; `hints` are those of
    every sequence.
    """
    timed = target.processes < 2 and not drafter.traits.begins_anew
    return [
        RequestState(sequence, selector, drafter, stats, held, hints, timed)
        for sequence, selector, held in zip(sequences, selectors, cached, strict=True)
    ]


def decode(
    target: Target, requests: list[RequestState], cache: Cache, run: Run | None = None, backend: Backend = eager
) -> Generator[list[Step]]:
    """Yield the steps of each forward pass, one for every unfinished sequence, until all sequences have ended. All
    requests have one drafter and one `Stats`.

    `cache` holds nothing or a prefix of each sequence, from slot 0 on: `cached` tokens of each request. `backend` makes
    the forward passes behind the prompts; other threads' calls wait for a step where a pass changes the model.
    """
    border = target.info.border
    with backend(target, cache, requests[0].traits.begins_anew) as runners:
        steps = _decode(target, requests, cache, run or Run(), runners)
        with closing(steps):
            yield from by_turns(target, steps) if border is not None and border.changes_model else steps


@torch.inference_mode(False)  # matrices and caches outlive the call, and must be usable outside inference mode
@torch.no_grad()
def _decode(
    target: Target, requests: list[RequestState], cache: Cache, run: Run, runners: Runners
) -> Generator[list[Step]]:
    fixed, stats = requests[0].traits.begins_anew, requests[0].stats
    target = target.unmeasured() if fixed else target
    longest = max(request.sequence.length for request in requests)
    pacer, clock = Pacer.of(target, len(requests), longest, runners.kind, fixed), Clock(stats, target.device)
    streamed = run.streamed or fixed  # a prompt is read alike whether somebody waits for its first token or not
    batch = Batch(target, list(requests), pacer, cache, clock, streamed=streamed, reading=run.reading)
    batch.begin(runners)
    try:
        while batch.active:
            steps = batch.step()
            if run.after_pass is not None:
                run.after_pass()
            try:
                yield steps
            finally:
                batch.learn()
            ended = [request for request in batch.requests if request.sequence.ended]
            if not run.keeps_all and 0 < len(ended) < len(batch.requests):
                batch.leave(ended)
                pacer.share(len(batch.requests), batch.longest)
    finally:
        with ExitStack() as ending:  # each, whatever the others raise
            ending.callback(pass_times(target, runners.kind).keep)
            for request in requests:
                ending.callback(request.finish)
            if run.returns_cache:
                ending.callback(batch.give_back)


def places_left(requests: list[RequestState], finished: Collection[RequestState]) -> list[int]:
    """Return which request takes each place once those in `finished` leave: the last one fills the gap."""
    order = list(range(len(requests)))
    for place in reversed(range(len(requests))):
        if requests[place] in finished:
            order[place] = order[-1]
            order.pop()
    return order


def check_cached(cached: int, length: int) -> None:
    """Raise ValueError unless the cache leaves out the last token of a sequence, the root of the first draft."""
    if cached >= length:
        raise ValueError(
            f"the cache must hold fewer tokens than the {length} given, got {cached}; pass all tokens so far"
        )
