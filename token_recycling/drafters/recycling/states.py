"""Candidates from the hidden states that a step computes anyway: a map from state to state, learned while decoding.

The state at a place and the embedding of the token after it say much about the next state (EAGLE, 2401.15077, section
3), and so the model's own output layer about the token after that. EAGLE trains a decoder layer for it beforehand; here
a linear map is fitted by least squares to what was decoded so far, and a hidden layer on top of it takes steps on the
newest pairs, when a text has ended, for a share of the time that its passes took. The output layer is cut to the tokens
that were seen most (FR-Spec, 2502.14856).

Cost for each of two levels of a tree: the products with the map, and one with the rows of the output layer. To learn:
the square of twice the hidden size for every pair, and now and then its cube; for the hidden layer three times its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import silu

from ..._util.locks import Lock
from ..._util.topk import top_candidates
from ...model.inspection import output_layer, processes
from ...model.tree_model import TreeModel
from ...recycling.ngram_matrix import NgramMatrix
from ...recycling.states import LearnedStates
from ...trees.draft import Step
from .._shared.learning import Allowance, Lesson
from .._shared.ring import part
from .hidden_layer import Fitted, HiddenLayer
from .pairs import PairRing, StatePairs

_ROWS = 2048
"""Tokens of the output layer that are scored: those that were seen most."""
_RIDGE = 0.01
"""Added to every input's own products, as a share of them."""
_ENOUGH, _GROWTH = 4, 1.5
"""Pairs for every input before the first fit; by how much they must have grown since the last one."""
_OF_PROMPT = 128
"""Most pairs that are learned from one prompt, the last ones."""
_BLOCK, _BATCH, _PASSES = 256, 64, 2
"""Pairs that are summed up at once, and of a step of the hidden layer; how often it draws each pair, about."""
_SAMPLES = 256
"""Tokens whose logits are compared with the output layer's, once, to find how the model scales them."""


class _Map(NamedTuple):
    """What is drafted with; replaced as a whole."""

    by: Fitted
    into: torch.Tensor  # (2 * hidden + 1, width)
    out: torch.Tensor  # (width, hidden)
    rows: np.ndarray  # (rows,) int64: tokens
    pairs: int  # when it was fitted


class States:
    """Learns from the states of all texts of one target, and foresees candidates; kept in a matrix with the rest."""

    def __init__(self, target: TreeModel, matrix: NgramMatrix) -> None:
        """Raises ValueError for a target without a plain output layer or in several processes, or a matrix of another
        one's states.
        """
        self._output = getattr(output_layer(target.model), "weight", None)
        self._embed = target.model.get_input_embeddings()
        if self._output is None or self._output.dim() != 2 or not self._output.is_floating_point():
            raise ValueError(
                "expected an output layer with a weight of vocabulary x hidden numbers, got "
                f"{type(output_layer(target.model)).__name__}; leave out states=true"
            )
        if processes(target.model) > 1:
            raise ValueError(
                f"expected a model in one process for states=true, got one in {processes(target.model)}: what is "
                "learned depends on the time, and all processes must draft alike; leave out states=true"
            )
        hidden = self._output.shape[1]
        if matrix.states is None:
            matrix.states = LearnedStates.empty(hidden, matrix.vocab_size)
        if matrix.states.hidden != hidden:
            raise ValueError(
                f"expected a matrix that learned from states of {hidden} numbers, as this target has, got "
                f"{matrix.states.hidden}; leave out states=true, or start a new matrix"
            )
        self._learned, self._device = matrix.states, target.device
        self.ring = PairRing(hidden)
        into, out = (torch.from_numpy(array).to(self._device) for array in (self._learned.into, self._learned.out))
        self._layer = HiddenLayer(into, out)
        self._numbers = torch.Generator().manual_seed(0)
        """Draws pairs; apart from all that texts draw."""
        self._allowed = Allowance()
        self._owed = 0
        """Pairs that the hidden layer has yet to draw."""
        self._learning = Lock()
        self._scale: float | None = None
        """Logits by the output layer's products; None as long as it is not known."""
        self._map: _Map | None = None
        self._fit()

    def serves(self, target: TreeModel, matrix: NgramMatrix) -> bool:
        """Whether it learns where this target is, into this matrix."""
        return self._device == target.device and self._learned is matrix.states

    @property
    def known(self) -> bool:
        """Whether anything can be foreseen."""
        return self._map is not None

    def see_prompt(self, states: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
        """Notes the pairs of a prompt (length,), from the states (n, hidden) at the n tokens before its last one.
        Returns the state that the last one follows.
        """
        states = states[-_OF_PROMPT - 1 :].float()
        following = torch.from_numpy(tokens[-len(states) : -1]).to(self._device)
        if len(following):
            self.ring.add(states[:-1], following, states[1:])
        return states[-1].clone()

    def see_text(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Counts tokens (n,) of a prompt or a text."""
        ids = np.asarray(tokens, np.int64)
        np.add.at(self._learned.tokens, ids[ids < len(self._learned.tokens)], 1)

    def see(self, before: torch.Tensor | None, step: Step) -> torch.Tensor:
        """Notes the pairs of a step, whose root follows the state `before` (hidden,), if that is known: all accepted
        nodes, and of the others as many. Returns the state that the next root follows.
        """
        assert step.states is not None, "the traits ask for them"
        hidden, tree = step.states.float(), step.draft.tree
        if self._scale is None:
            self._scale = self._found_scale(hidden[0], step.logits[0])
        others = sorted(set(range(1, len(tree))) - set(step.accepted))[: len(step.accepted)]
        nodes = [*step.accepted[1:], *others]
        states = hidden[[tree.parents[node] for node in nodes]]
        if before is not None:
            nodes, states = [0, *nodes], torch.cat([before[None], states])
        if nodes:
            self.ring.add(states, step.draft.tokens.to(self._device)[nodes], hidden[nodes])
        self.see_text(step.tokens)
        return hidden[step.accepted[-1]].clone()

    def allow(self, seconds: float) -> None:
        """Lets learning take so much more time."""
        self._allowed.add(seconds)

    def learn(self) -> Lesson:
        """Learns from the pairs that wait, for what time is allowed."""
        with self._learning:
            began = time.perf_counter()
            ends, taken, batches = began + self._allowed.seconds, list[StatePairs](), 0
            while time.perf_counter() < ends and (some := self.ring.take(_BLOCK)) is not None:
                inputs, following = self._inputs(some.states.float(), some.tokens), some.following.float()
                self._learned.add((inputs.T @ inputs).cpu().numpy(), (inputs.T @ following).cpu().numpy())
                taken.append(some)
            pairs = sum(len(each.tokens) for each in taken)
            if taken:
                self.ring.keep(taken)
                self._owed = min(self._owed + _PASSES * pairs, _PASSES * self.ring.most)
                self._fit()
            while self._owed > 0 and self._map is not None and self.ring.kept and time.perf_counter() < ends:
                self._step(self.ring.kept, self._map.by)
                batches += 1
            if batches:
                self._publish()
            took = time.perf_counter() - began
            self.allow(-took)
        return Lesson(pairs, batches, took)

    def _step(self, kept: StatePairs, by: Fitted) -> None:
        """One step of the hidden layer."""
        drawn = torch.randint(len(kept.tokens), (_BATCH,), generator=self._numbers).to(self._device)
        some = part(kept, drawn)
        self._layer.learn(self._inputs(some.states.float(), some.tokens), some.following.float(), by)
        self._owed -= _BATCH

    def _publish(self) -> None:
        """Drafts with what the hidden layer has learned, and keeps it with the matrix."""
        assert self._map is not None
        for array, average in zip((self._learned.into, self._learned.out), self._layer.average, strict=True):
            array[:] = average.cpu().numpy()
        into, out = self._layer.scaled(self._map.by)
        self._map = self._map._replace(into=into, out=out)

    def foresight(self, before: torch.Tensor, k: int) -> Foresight:
        """What is foreseen of a draft whose root follows the state `before` (hidden,)."""
        assert self._map is not None, "known"
        return Foresight(self, self._map, before, k)

    def next_states(self, states: torch.Tensor, tokens: np.ndarray, known: _Map) -> torch.Tensor:
        """(n, hidden): the states foreseen at tokens (n,) after states (n, hidden)."""
        inputs = self._inputs(states, torch.from_numpy(tokens).to(self._device))
        return torch.addmm(inputs @ known.by.linear, silu(inputs @ known.into), known.out)

    @torch.no_grad()
    def _inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._embed(tokens).float()
        return torch.cat([states, embedded, torch.ones_like(states[:, :1])], dim=1)

    @torch.no_grad()
    def _fit(self) -> None:
        """Solves for the map, once there are pairs enough, and again as they grow."""
        pairs = self._learned.pairs
        if pairs < max(_ENOUGH * len(self._learned.products), _GROWTH * self._map.pairs if self._map else 0):
            return
        products = torch.from_numpy(self._learned.products).to(self._device)
        size = products.diagonal().clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        scaled = products / size[:, None] / size
        scaled.diagonal().add_(_RIDGE)
        targets = torch.from_numpy(self._learned.targets).to(self._device) / size[:, None]
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if failed:  # rounding: the map of before is as good as any
            return
        weights = torch.cholesky_solve(targets, factor) / size[:, None]
        rows = np.argsort(-self._learned.tokens, kind="stable")[:_ROWS]
        assert self._output is not None
        output = self._output[torch.from_numpy(rows).to(self._output.device)].to(self._device).float()
        sizes = torch.from_numpy(self._learned.sizes()).to(self._device)
        of_state = sizes[: self._learned.hidden].square().mean().sqrt()
        by = Fitted(weights, sizes, of_state, (output * (self._scale or 1.0)).T.contiguous())
        self._map = _Map(by, *self._layer.scaled(by), rows, pairs)

    @torch.no_grad()
    def _found_scale(self, hidden: torch.Tensor, logits: torch.Tensor) -> float:
        """Logits (vocabulary,) by the output layer's products, at one place: some models scale or cap them."""
        assert self._output is not None
        some = torch.linspace(0, len(logits) - 1, _SAMPLES, device=self._output.device).long()
        raw = self._output[some].to(hidden.device).float() @ hidden
        raw, found = raw - raw.mean(), logits[some.to(logits.device)].float().to(hidden.device)
        scale = float(raw @ (found - found.mean()) / (raw @ raw).clamp(min=1e-9))
        return scale if 0 < scale < float("inf") else 1.0


class TextStates:
    """The states of one text."""

    def __init__(self, states: States, prompt: np.ndarray, share: float) -> None:
        """`share`: of the time of passes, that learning may take."""
        self._of_all, self._prompt, self._share = states, prompt, share
        self._before: torch.Tensor | None = None
        """(hidden,): the state that the root follows, where it is known."""
        self._lesson = Lesson()
        states.see_text(prompt)

    def read_prompt(self, states: torch.Tensor) -> None:
        """Takes the states (n, hidden) at the n tokens before the prompt's last one."""
        if len(states):
            self._before = self._of_all.see_prompt(states, self._prompt)

    def foresight(self, k: int) -> Foresight | None:
        """What is foreseen of the next draft, if anything can be."""
        if self._before is None or not self._of_all.known:
            return None
        return self._of_all.foresight(self._before, k)

    def observe(self, step: Step, passed: float) -> None:
        """Takes the states of a step; `passed`: seconds of its pass."""
        self._before = self._of_all.see(self._before, step)
        self._of_all.allow(self._share * passed)

    def learn(self) -> None:
        """Learns when the text has ended, so that no token waits for it."""
        self._lesson = self._of_all.learn()

    def statistics(self) -> Mapping[str, float]:
        lesson, self._lesson = self._lesson, Lesson()
        return {f"state_{name}": value for name, value in lesson._asdict().items()}


class Foresight:
    """What is foreseen of one draft, entry by entry (`recycling.foreseen`)."""

    def __init__(self, states: States, fitted: _Map, before: torch.Tensor, k: int) -> None:
        self._by, self._map, self._k = states, fitted, min(k, len(fitted.rows))
        self._states = before[None]
        """(1 + entries, hidden): `before`, and those foreseen at the entries."""

    def __call__(self, parents: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Candidates (n, k) int64 and their probabilities (n, k) float32 after n new entries: `tokens` (n,) behind the
        entries `parents` (n,), -1 for the root's.
        """
        found = self._by.next_states(self._states[parents + 1], tokens, self._map)
        self._states = torch.cat([self._states, found])
        ids, shares = top_candidates(found @ self._map.by.output, self._k)
        return self._map.rows[ids], shares
