"""The loop: draft, forward, accept, keep, learn.

One step runs in one direction (`Batch.step`, then `learn`). The drafters propose a tree for each sequence. One forward
pass computes the target's logits after every node. Acceptance selects the tokens to emit and trims them at the end of
the sequence. The runner keeps the accepted slots, the step is delivered, and the drafters learn from it. Every emitted
token belongs to a step; plain decoding is the same loop with a lone root.

All tokens of a prompt except the last are read before the first step; a prefix that all prompts share is read once.
With a single sequence they are read in the first step: its pass also verifies the first draft, unless the output is
streamed, where that would delay the first token. The runner (`model.runner`) owns the slots of the sequences and makes
the passes, eagerly or captured as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._util.device import outside_inference_mode
from ..model.backend import EAGER, Backend
from ..model.foreign import mixes_sequences
from ..model.kv_cache import TreeCache
from ..model.prefill import Reading
from ..model.runner import Pass, Runner
from ..trees.draft import Draft, Step
from .accept import TreeSteps, accept_walk
from .pacer import Clock, Pace, Pacer
from .request import Request

if TYPE_CHECKING:
    from ..model.graphs.passes import CapturedPasses

_LEAST_SHARED = 64
"""Tokens; a shorter prefix that all prompts share is read for each of them, not in a forward pass of its own."""
_ENDING, _LEAST_RESUMED = 16, 64
"""Last tokens of a prompt that a longer prompt may replace, and uncached tokens from which on these are read apart."""


class Batch:
    """Sequences that share forward passes, with drafts of any shape and every kind of token selection."""

    def __init__(
        self,
        requests: list[Request],
        pacer: Pacer,
        cache: TreeCache,
        clock: Clock,
    ) -> None:
        """`requests`: at least one, all of one model; `cache` contains `cached` tokens of each, from slot 0 on."""
        self.target, self.requests, self.pacer, self.clock = requests[0].target, requests, pacer, clock
        reading = None if requests[0].reading is None else partial(self._between_pieces, requests[0].reading)
        self.runner = Runner(self.target, cache, reading, partial(clock.lap, "prepare"))
        """Owns the slots of the sequences, in the order of the requests."""
        self.is_settled = True
        """Whether every slot belongs to a token of its sequence, as between two passes."""
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
        """Indices of the hidden states that drafters need; all drafters that need states need the same ones."""
        needs = (request.traits for request in self.requests if request.traits.states is not None)
        return max((traits.states_read(self.target) for traits in needs), key=len, default=())

    # Prompts

    @outside_inference_mode
    def read(self, most: int | None = None) -> None:
        """Read all tokens of each sequence except the last; of a single sequence at most `most` more tokens."""
        sequences = [request.sequence.tokens for request in self.requests]
        cached = [request.cached for request in self.requests]
        if most is not None:
            sequences = [sequence[: count + most + 1] for sequence, count in zip(sequences, cached, strict=True)]
        self.is_settled = False
        shared = 0 if any(cached) else _shared(sequences)
        if shared and mixes_sequences(self.target):
            shared = 0
        states = self.runner.prefill(sequences, cached, self._states, shared)
        self.is_settled = True
        if states is not None:
            self._give_states(states)
        for request, sequence in zip(self.requests, sequences, strict=True):
            request.cached = len(sequence) - 1

    def keep_states_before_ending(self) -> None:
        """Read all but the last tokens of the only prompt, unless few are uncached, and store its recurrent states
        there, if it has a prefix cache. States cannot be cut, and chat templates repeat earlier turns without the
        tokens that began the answer, such as empty reasoning.
        """
        (request,) = self.requests
        info, prefixes = self.target.info, request.hints.prefixes
        if not (info.recurrent and info.reads_on and prefixes is not None and prefixes.cache.limit > 0):
            return
        uncached = request.sequence.length - 1 - request.cached
        if uncached >= _LEAST_RESUMED:
            self.read(uncached - _ENDING)
        self.keep_prefix(0, request.cached + 1)

    @outside_inference_mode
    def begin(self, captured: CapturedPasses | None = None) -> None:
        """Prepare the first step; `captured`: make the passes after the prompts from captured graphs, else eagerly."""
        for request in self.requests:
            request.stats.prompt_tokens += request.sequence.length
            request.start()
        first, info = self.requests[0], self.target.info
        if captured is not None:
            self.runner = captured.runner(self.runner, max(request.sequence.max_length for request in self.requests))
        first.stats.path = self.runner.path
        # The first step also reads the prompt of a single sequence whose model computes alike at every length, and of
        # all sequences of a recurrent model, whose states over the sequence must be those of `generate`.
        if not info.recurrent and (len(self.requests) > 1 or info.length_threshold is not None):
            self.read()
        # With `isolates_requests` a prompt is read in the same way whether or not the output is streamed.
        # A drafter with the hidden states of a part of the prompt must not draft before it has the others.
        early = first.streamed or first.traits.isolates_requests or (first.cached > 0 and bool(self._states))
        self._alone = info.recurrent or (early and first.cached < first.sequence.length - 1)

    def _between_pieces(self, reading: Reading) -> None:
        """Call `reading` before the next piece of a prompt, with settled slots: it may end the call."""
        self.is_settled = True
        reading()
        self.is_settled = False

    def _give_states(self, states: Sequence[torch.Tensor]) -> None:
        """Pass each drafter the hidden states (n, states * hidden) of the next piece of its prompt."""
        for request, own in zip(self.requests, states, strict=True):
            try:
                request.start().drafter.read_prompt(own)
            except Exception as error:
                request.fail(error)

    # One step

    @torch.inference_mode(False)  # matrices and caches outlive the call, and must be usable outside inference mode
    @torch.no_grad()
    def step(self) -> list[Step]:
        """Make one forward pass over all sequences. Return the trimmed steps of the active ones, whose slots are
        already kept. Call `learn` after the tokens have been delivered.
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
        finally:  # if a processor or criterion raises, the cache equals that of plain decoding so far
            if not alone:  # the first token does not wait for copies
                self.runner.keep(verified, accepted)
        self.is_settled = True
        clock.lap("update cache")
        if verified.prompt_states:
            self._give_states(verified.prompt_states)
        return self._steps

    def _draft(self, active: list[int]) -> list[Draft]:
        """Return a draft for each request in `active`, pruned jointly; a lone root for the others and for requests that
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
        drafts, threshold = [], self.target.info.length_threshold
        for row, request in enumerate(self.requests):
            draft = best.get(row)
            if draft is None or (threshold is not None and not threshold.fits(request.sequence.length - 1, len(draft))):
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
        """Return the steps of the sequences in `active`, without failed ones. `accepted[row]` receives the accepted
        nodes of each sequence; only those so far if its step fails or this method raises.
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
                if at_once is not None:  # all tokens were sampled beforehand
                    request.selector.sampled(len(path))
            if verified.states is not None:
                step = replace(step, states=verified.states[row, : len(draft)])
            steps.append(step)
        return steps

    def _judge_at_once(self, drafts: list[Draft], verified: Pass, active: list[int]) -> TreeSteps | None:
        """Choose the token after every node and accept. The device is read only once, at the end: on an accelerator a
        read costs more than choosing everywhere. None on a CPU, and where tokens must be chosen node by node.
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
        """Count the last step and let pacer and drafters learn from it, after its tokens have been delivered."""
        clock, steps = self.clock, self._steps
        nodes = max((len(step.draft) for step in steps), default=1)
        self.pacer.record_time(nodes, 0.0 if clock.reads_prompt else clock.pass_seconds)
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

    # Joining and leaving

    def join(self, other: Batch) -> None:
        """Add the request of another batch of the same model, after its first step."""
        self.runner.join(other.runner)
        self.requests += other.requests

    def leave(self, finished: Collection[Request]) -> None:
        """Remove finished requests; at least one must remain. The last request moves into the row of a removed one."""
        order = rows_after_leaving(self.requests, finished)
        self.requests[:] = [self.requests[row] for row in order]
        self.runner.leave(order, max(request.sequence.length for request in self.requests) - 1)

    # After the last step

    def keep_prefix(self, row: int, tokens: int) -> None:
        """Store the slots of the first `tokens` - 1 tokens of a sequence in its prefix cache, if it has one."""
        request = self.requests[row]
        if request.hints.prefixes is not None:
            request.hints.prefixes.keep(request.sequence.on_host[:tokens], self.runner.cache, row)

    def keep_whole_prefix(self) -> None:
        """Store all slots of the only sequence in its prefix cache, unless a pass has failed."""
        if self.is_settled:
            self.keep_prefix(0, self.runner.cache.length + 1)

    def give_back(self) -> None:
        """Leave all tokens of each sequence except the last in the cache that the batch began with."""
        self.runner.give_back([request.sequence.length - 1 for request in self.requests])


def decode(
    requests: list[Request],
    cache: TreeCache,
    backend: Backend = EAGER,
    after_pass: Callable[[], None] | None = None,
    keeps_all: bool = True,
    returns_cache: bool = True,
) -> Generator[list[Step]]:
    """Yield the steps of each forward pass, one step per unfinished sequence, until all sequences have ended. All
    requests share one model, one drafter and one `Stats`.

    `cache` is empty or contains a prefix of each sequence, from slot 0 on: `cached` tokens of each request. A lone
    request with a prefix cache starts from the cached prefix instead. `backend` makes the forward passes after the
    prompts. Where a pass changes the model, calls of other threads wait for the step.

    `after_pass` is called after every forward pass and may end sequences. With `keeps_all` ended sequences stay in the
    batch. Otherwise they leave it, since passes over fewer sequences take less time, and `Step.row` indexes the
    remaining sequences. With `returns_cache` the cache finally contains all tokens of each sequence except the last;
    otherwise its contents are unspecified.
    """
    target, stats, fixed = requests[0].target, requests[0].stats, requests[0].traits.isolates_requests
    turn, prefixes = target.turns(), requests[0].hints.prefixes if len(requests) == 1 else None
    if prefixes is not None:
        cache = requests[0].take_prefix() or cache
    with ExitStack() as ending:
        captured = backend.acquire(target, cache, fixed)
        if captured is not None:
            ending.callback(captured.release)
        pacer, clock = Pacer.of(target, captured, fixed), Clock(stats, target.device)
        batch = Batch(list(requests), pacer, cache, clock)
        if prefixes is not None:
            ending.callback(batch.keep_whole_prefix)
        with turn():
            if prefixes is not None:
                batch.keep_states_before_ending()
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


def _shared(sequences: Sequence[torch.Tensor]) -> int:
    """Return the length of the prefix of several sequences (length,) that is read once; 0 if each is read whole."""
    if len(sequences) == 1:
        return 0
    lengths = [len(sequence) - 1 for sequence in sequences]
    texts = torch.stack([sequence[: min(lengths)] for sequence in sequences])
    shared = int((texts == texts[0]).all(dim=0).cumprod(dim=0).sum())
    return shared if shared == max(lengths) or shared >= _LEAST_SHARED else 0


def _spoiled(drafts: list[Draft], verified: Pass, at_once: TreeSteps | None, active: list[int]) -> bool:
    """Return whether a drafted token has made the logits of another node NaN, so that the pass must be repeated without
    drafts. A node attends to the slots of all others with weight zero, and zero times NaN or infinity (an overflow in
    float16) is NaN. The first logit after the root suffices as a check, since hidden states become NaN as a whole.
    """
    if all(len(drafts[row]) == 1 for row in active):
        return False
    first = verified.logits[:, 0, 0].float().cpu().numpy() if at_once is None else at_once.first_logits
    return bool(np.isnan(first[active]).any())


def rows_after_leaving(requests: list[Request], finished: Collection[Request]) -> list[int]:
    """Return which request takes each row once those in `finished` leave: the last request fills a gap."""
    order = list(range(len(requests)))
    for row in reversed(range(len(requests))):
        if requests[row] in finished:
            order[row] = order[-1]
            order.pop()
    return order
