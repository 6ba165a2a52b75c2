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

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._util.device import lasting
from ..model.backend import EAGER, Backend
from ..model.kv_cache import TreeCache
from ..model.prefill import Reading
from ..model.runner import Pass, Runner
from ..trees.draft import Draft, Step
from .accept import TreeSteps, accept_walk
from .pacer import Clock, Pace, Pacer
from .request import Request

if TYPE_CHECKING:
    from ..model.graphs.passes import CapturedPasses

_SHORT_PROMPT = 32
"""Uncached tokens; a pass over so few takes about as long as one over a single token, and so do drafted rows in it."""


class Batch:
    """Sequences that share forward passes: drafts of any shape, every kind of token selection."""

    def __init__(
        self,
        requests: list[Request],
        pacer: Pacer,
        cache: TreeCache,
        clock: Clock,
    ) -> None:
        """`requests`: one at least, all of one model; `cache` holds `cached` tokens of each, from slot 0 on."""
        self.target, self.requests, self.pacer, self.clock = requests[0].target, requests, pacer, clock
        reading = None if requests[0].reading is None else partial(self._between_pieces, requests[0].reading)
        self.runner = Runner(self.target, cache, reading, partial(clock.lap, "prepare"))
        """Owns the slots of the sequences, in the order of the requests."""
        self.is_settled = True
        """Whether the slots are those of tokens of the sequences, as between two passes."""
        self._alone = False
        """Whether the next forward pass reads the prompts without a draft."""
        self._steps: list[Step] = []
        """Steps to learn from."""

    @property
    def active(self) -> list[int]:
        """Rows of the requests that will emit more tokens."""
        return [row for row, request in enumerate(self.requests) if request.active]

    @property
    def _states(self) -> tuple[int, ...]:
        """Numbers of the hidden states that drafters need: all that need some need the same ones."""
        needs = (request.traits for request in self.requests if request.traits.states is not None)
        return max((traits.states_read(self.target) for traits in needs), key=len, default=())

    # Prompts

    @lasting
    def read(self, most: int | None = None) -> None:
        """Read all of each sequence but its last token; of a single sequence at most `most` tokens more."""
        sequences = [request.sequence.tokens for request in self.requests]
        cached = [request.cached for request in self.requests]
        if most is not None:
            sequences = [sequence[: count + most + 1] for sequence, count in zip(sequences, cached, strict=True)]
        self.is_settled = False
        states = self.runner.prefill(sequences, cached, self._states)
        self.is_settled = True
        if states is not None:
            self._give_states(states)
        for request, sequence in zip(self.requests, sequences, strict=True):
            request.cached = len(sequence) - 1

    @lasting
    def begin(self, captured: CapturedPasses | None = None) -> None:
        """Prepare the first step; passes behind the prompts are eager unless they are `captured`."""
        for request in self.requests:
            request.stats.prompt_tokens += request.sequence.length
            request.start()
        first, info = self.requests[0], self.target.info
        if captured is not None:
            self.runner = captured.runner(self.runner, max(request.sequence.max_length for request in self.requests))
        first.stats.path = self.runner.path
        # The first step reads the prompt too: of one sequence, where the model computes alike at every length; of any,
        # where states over the sequence must be what `generate` has then.
        if not info.recurrent and (len(self.requests) > 1 or info.border is not None):
            self.read()
        # With `begins_anew` a prompt is read alike whether somebody waits for its first token or not.
        early = first.streamed or first.traits.begins_anew
        self._alone = info.recurrent or (early and first.sequence.length - first.cached > _SHORT_PROMPT)

    def _between_pieces(self, reading: Reading) -> None:
        """Let `reading` end the call before a piece of a prompt is read, while the slots hold those before it."""
        self.is_settled = True
        reading()
        self.is_settled = False

    def _give_states(self, states: Sequence[torch.Tensor]) -> None:
        """Give each drafter the hidden states (n, states * hidden) of the next piece of its prompt."""
        for request, own in zip(self.requests, states, strict=True):
            try:
                request.start().drafter.read_prompt(own)
            except Exception as error:
                request.fail(error)

    # One step

    @torch.inference_mode(False)  # matrices and caches outlive the call, and must be usable outside inference mode
    @torch.no_grad()
    def step(self) -> list[Step]:
        """Make one forward pass over all sequences; return the steps of those that are active, trimmed, with slots
        kept. Call `learn` after the tokens were delivered.
        """
        active, clock = self.active, self.clock
        alone, self._alone = self._alone, False
        sequences = [request.sequence.on_host for request in self.requests]
        self.pacer.share([len(sequence) for sequence in sequences])
        drafts = self._draft([] if alone else active)
        clock.lap("retrieve")
        self.is_settled = False
        verified = self.runner.forward(drafts, sequences, active, self._states)
        clock.lap("forward")
        accepted = [list[int]() for _ in drafts]
        try:
            at_once = self._judge_at_once(drafts, verified, active)
            if _spoiled(drafts, verified, at_once, active):
                verified = self.runner.undo(verified)
                drafts = [Draft.chain(draft.tokens[:1]) for draft in drafts]
                verified = self.runner.forward(drafts, sequences, active, self._states)
                at_once = self._judge_at_once(drafts, verified, active)
            self._steps = self._accept(drafts, verified, at_once, active, accepted)
            clock.lap("verify")
        finally:  # should a processor or criterion raise, the cache is that of plain decoding up to there
            if not alone:  # the first token waits for no copies
                self.runner.keep(verified, accepted)
        self.is_settled = True
        clock.lap("update cache")
        if verified.prompt_states:
            self._give_states(verified.prompt_states)
        return self._steps

    def _draft(self, active: list[int]) -> list[Draft]:
        """Return a draft for each request in `active`, pruned together; a lone root for the others and for those that
        fail.
        """
        proposals, paces = dict[int, Draft](), list[Pace]()
        for row in active:
            try:
                proposals[row], pace = self.requests[row].draft(self.pacer)
                paces.append(pace)
            except Exception as error:
                self.requests[row].fail(error)
        best = dict(zip(proposals, self.pacer.best([*proposals.values()], paces), strict=True))
        drafts, border = [], self.target.info.border
        for row, request in enumerate(self.requests):
            draft = best.get(row)
            if draft is None or (border is not None and not border.fits(request.sequence.length - 1, len(draft))):
                draft = Draft.chain(request.sequence.on_host[-1:])
            drafts.append(draft)
        return drafts

    def _accept(
        self,
        drafts: list[Draft],
        verified: Pass,
        at_once: TreeSteps | None,
        active: list[int],
        accepted: list[list[int]],
    ) -> list[Step]:
        """Return the steps of the sequences in `active`, without those that failed. `accepted[row]` gets the accepted
        nodes of each sequence; those so far, if its step fails or this raises.
        """
        steps: list[Step] = []
        for row in active:
            request, draft, path = self.requests[row], drafts[row], accepted[row]
            if request.error is not None:
                continue
            try:
                if at_once is not None:
                    step = at_once.step(row, request.sequence.append, path)
                else:
                    own = verified.logits[row, : len(draft)]
                    step = accept_walk(draft, own, request.sequence.append, request.selector, row, path)
            except Exception as error:
                request.fail(error)
                continue
            finally:
                if at_once is not None:  # whose tokens were all sampled beforehand
                    request.selector.sampled(len(path))
            if verified.states is not None:
                step = replace(step, states=verified.states[row, : len(draft)])
            steps.append(step)
        return steps

    def _judge_at_once(self, drafts: list[Draft], verified: Pass, active: list[int]) -> TreeSteps | None:
        """Choose the token after every node and accept, without waiting for the device until the end: on an accelerator
        a read costs more than choosing at every node. None on a CPU, and where tokens must be chosen node by node.
        """
        logits, requests = verified.logits, self.requests
        if logits.device.type == "cpu":
            return None
        if any(drafts[row].sampled_from or not requests[row].selector.at_every_node for row in active):
            return None
        from ..trees.packed import send

        trees = verified.trees or send(drafts, verified.lengths, logits.shape[1], logits.device)
        choices = logits.argmax(dim=-1)
        for row in active:
            selector = requests[row].selector
            if not selector.greedy:
                try:
                    choices[row] = selector.every_node(logits[row], trees.of(row), drafts[row].depth)
                except Exception as error:
                    requests[row].fail(error)
        return TreeSteps(drafts, logits, trees, choices, max(requests[row].traits.top_k for row in active))

    @torch.inference_mode(False)
    @torch.no_grad()
    def learn(self) -> None:
        """Count the last step and let pacer and drafters learn from it, after its tokens were delivered."""
        clock, steps = self.clock, self._steps
        nodes = max((len(step.draft) for step in steps), default=1)
        self.pacer.took(nodes, 0.0 if clock.reads_prompt else clock.pass_seconds)
        clock.restart()
        self._steps = []
        for step in steps:
            request = self.requests[step.row]
            request.stats.count(step, clock.reads_prompt)
            try:
                request.observe(self.pacer, step)
            except Exception as error:
                request.fail(error)
        clock.reads_prompt = False
        clock.lap("update matrix")

    # Sequences that come and go

    def join(self, other: Batch) -> None:
        """Add the request of another batch of the same model, after its first step."""
        (request,) = other.requests
        self.runner.join(other.runner, len(self.requests), request.sequence.length - 1)
        self.requests.append(request)

    def leave(self, finished: Collection[Request]) -> None:
        """Remove finished requests; at least one must remain. The last one takes the place of a removed one."""
        order = rows_left(self.requests, finished)
        self.requests[:] = [self.requests[row] for row in order]
        self.runner.leave(order, max(request.sequence.length for request in self.requests) - 1)

    # After the last step

    def keep_prefix(self, row: int, tokens: int) -> None:
        """Keep the slots of the first `tokens` tokens of a sequence but the last in its prefix cache, if it has one."""
        request = self.requests[row]
        if request.hints.prefixes is not None:
            request.hints.prefixes.keep(request.sequence.on_host[:tokens], self.runner.cache, row)

    def keep_all_read(self) -> None:
        """Keep in its prefix cache what was read of the only sequence, unless a pass has failed."""
        if self.is_settled:
            self.keep_prefix(0, self.runner.cache.length + 1)

    def give_back(self) -> None:
        """Leave in the cache that the batch began with all tokens of each sequence but the last."""
        self.runner.give_back([request.sequence.length - 1 for request in self.requests])


def decode(
    requests: list[Request],
    cache: TreeCache,
    backend: Backend = EAGER,
    after_pass: Callable[[], None] | None = None,
    keeps_all: bool = True,
    returns_cache: bool = True,
) -> Generator[list[Step]]:
    """Yield the steps of each forward pass, one for every unfinished sequence, until all sequences have ended. All
    requests have one model, one drafter and one `Stats`.

    `cache` holds nothing or a prefix of each sequence, from slot 0 on: `cached` tokens of each request. A lone request
    with a prefix cache begins with what that holds instead. `backend` makes the forward passes behind the prompts;
    other threads' calls wait for a step where a pass changes the model.

    `after_pass` is called after every forward pass, and may end sequences. With `keeps_all` sequences that have ended
    stay in the batch; else they leave it, and `Step.row` counts those that are left: passes over fewer sequences take
    less time. With `returns_cache` the cache holds all but the last token of each sequence afterwards; else its
    contents are unspecified.
    """
    target, stats, fixed = requests[0].target, requests[0].stats, requests[0].traits.begins_anew
    turn, prefixes = target.turns(), requests[0].hints.prefixes if len(requests) == 1 else None
    if prefixes is not None:
        cache = requests[0].take_prefix() or cache
    with ExitStack() as ending:
        captured = None if backend is EAGER else backend.take(target, cache, fixed)
        if captured is not None:
            ending.callback(captured.give_back)
        pacer, clock = Pacer.of(target, captured, fixed), Clock(stats, target.device)
        batch = Batch(list(requests), pacer, cache, clock)
        if prefixes is not None:
            ending.callback(batch.keep_all_read)
        with turn():
            batch.begin(captured)
        ending.callback(pacer.keep)
        for request in requests:
            ending.callback(request.finish)
        if returns_cache:
            ending.callback(batch.give_back)
        while batch.active:
            with turn():
                steps = batch.step()
            if after_pass is not None:
                after_pass()
            try:
                yield steps
            finally:
                with turn(not batch.active):  # the last turn leaves the model as `generate` does
                    batch.learn()
            ended = [] if keeps_all else [request for request in batch.requests if request.sequence.ended]
            if 0 < len(ended) < len(batch.requests):
                batch.leave(ended)


def _spoiled(drafts: list[Draft], verified: Pass, at_once: TreeSteps | None, active: list[int]) -> bool:
    """Whether a drafted token has made the logits of another node NaN, so that the pass must be made without drafts: a
    node attends to the slots of all others with a weight of zero, and zero times NaN or infinity, as of an overflow in
    float16, is NaN. The first logit after the root shows it, since hidden states are NaN as a whole.
    """
    if all(len(drafts[row]) == 1 for row in active):
        return False
    first = verified.logits[:, 0, 0].float().cpu().numpy() if at_once is None else at_once.first_logits
    return bool(np.isnan(first[active]).any())


def rows_left(requests: list[Request], finished: Collection[Request]) -> list[int]:
    """Return which request takes each row once those in `finished` leave: the last one fills the gap."""
    order = list(range(len(requests)))
    for row in reversed(range(len(requests))):
        if requests[row] in finished:
            order[row] = order[-1]
            order.pop()
    return order
