"""Candidates from the hidden states that a step computes anyway: a map from state to state, learned while decoding.

The state at a place and the embedding of the token after it say much about the next state (EAGLE, 2401.15077, section
3), and so the model's own output layer about the token after that. EAGLE trains a decoder layer for it beforehand; here
a linear map is fitted by least squares to what was decoded so far, when a text has ended. The output layer is cut to
the tokens that were seen most (FR-Spec, 2502.14856).

Cost for each of two levels of a tree: one product with the map, and one with the rows of the output layer. To learn:
the square of twice the hidden size for every pair, and now and then its cube.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..._util.locks import Lock
from ..._util.topk import top_candidates
from ...model.inspection import output_layer
from ...model.tree_model import TreeModel
from ...recycling.ngram_matrix import NgramMatrix
from ...recycling.states import StateSums
from ...trees.draft import Step

_ROWS = 2048
"""Tokens of the output layer that are scored: those that were seen most."""
_RIDGE = 0.01
"""Added to every input's own products, as a share of them."""
_ENOUGH, _GROWTH = 4, 1.5
"""Pairs for every input before the first fit; by how much they must have grown since the last one."""
_OF_PROMPT, _WAITING = 512, 8192
"""Most pairs that are learned from one prompt, the last ones, and most that wait for the end of a text."""
_SAMPLES = 256
"""Tokens whose logits are compared with the output layer's, once, to find how the model scales them."""


class _Map(NamedTuple):
    """What is fitted; replaced as a whole."""

    weights: torch.Tensor  # (2 * hidden + 1, hidden)
    rows: np.ndarray  # (rows,) int64: tokens
    output: torch.Tensor  # (hidden, rows): of the output layer
    pairs: int


class States:
    """Learns from the states of all texts of one target, and foresees candidates; kept in a matrix with the rest."""

    def __init__(self, target: TreeModel, matrix: NgramMatrix) -> None:
        """Raises ValueError for a target without a plain output layer, or a matrix of another one's states."""
        self._output = getattr(output_layer(target.model), "weight", None)
        self._embed = target.model.get_input_embeddings()
        if self._output is None or self._output.dim() != 2 or not self._output.is_floating_point():
            raise ValueError(
                "expected an output layer with a weight of vocabulary x hidden numbers, got "
                f"{type(output_layer(target.model)).__name__}; leave out states=true"
            )
        hidden = self._output.shape[1]
        if matrix.states is None:
            matrix.states = StateSums.empty(hidden, matrix.vocab_size)
        if matrix.states.hidden != hidden:
            raise ValueError(
                f"expected a matrix that learned from states of {hidden} numbers, as this target has, got "
                f"{matrix.states.hidden}; leave out states=true, or start a new matrix"
            )
        self._sums, self._device = matrix.states, target.device
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque()
        self._count = 0
        """How many pairs wait."""
        self._noting, self._learning = Lock(), Lock()
        self._scale: float | None = None
        """Logits by the output layer's products; None as long as it is not known."""
        self._map: _Map | None = None
        self._fit()

    def serves(self, target: TreeModel, matrix: NgramMatrix) -> bool:
        """Whether it learns where this target is, into this matrix."""
        return self._device == target.device and self._sums is matrix.states

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
            self._note(states[:-1], following, states[1:])
        return states[-1].clone()

    def see_text(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Counts tokens (n,) of a prompt or a text."""
        ids = np.asarray(tokens, np.int64)
        np.add.at(self._sums.tokens, ids[ids < len(self._sums.tokens)], 1)

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
            self._note(states, step.draft.tokens.to(self._device)[nodes], hidden[nodes])
        self.see_text(step.tokens)
        return hidden[step.accepted[-1]].clone()

    def _note(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> None:
        """Lets pairs wait; of those before them the ones go that are too old to be learned."""
        with self._noting:
            self._waiting.append((states, tokens, following))
            self._count += len(tokens)
            while self._count - len(self._waiting[0][1]) >= _WAITING:
                self._count -= len(self._waiting.popleft()[1])

    def learn(self) -> tuple[int, float]:
        """Learns from all pairs that wait; returns how many there were, and the seconds that it took."""
        began = time.perf_counter()
        with self._learning:
            with self._noting:
                waiting, self._waiting, self._count = self._waiting, deque(), 0
            if not waiting:
                return 0, 0.0
            states, tokens, following = (torch.cat(part)[-_WAITING:] for part in zip(*waiting, strict=True))
            inputs = self._inputs(states, tokens)
            self._sums.add((inputs.T @ inputs).cpu().numpy(), (inputs.T @ following).cpu().numpy())
            self._fit()
        return len(tokens), time.perf_counter() - began

    def foresight(self, before: torch.Tensor, k: int) -> Foresight:
        """What is foreseen of a draft whose root follows the state `before` (hidden,)."""
        assert self._map is not None, "known"
        return Foresight(self, self._map, before, k)

    def next_states(self, states: torch.Tensor, tokens: np.ndarray, weights: torch.Tensor) -> torch.Tensor:
        """(n, hidden): the states foreseen at tokens (n,) after states (n, hidden)."""
        return self._inputs(states, torch.from_numpy(tokens).to(self._device)) @ weights

    @torch.no_grad()
    def _inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._embed(tokens).float()
        return torch.cat([states, embedded, torch.ones_like(states[:, :1])], dim=1)

    @torch.no_grad()
    def _fit(self) -> None:
        """Solves for the map, once there are pairs enough, and again as they grow."""
        pairs = self._sums.pairs
        if pairs < max(_ENOUGH * len(self._sums.products), _GROWTH * self._map.pairs if self._map else 0):
            return
        products = torch.from_numpy(self._sums.products).to(self._device)
        size = products.diagonal().clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        scaled = products / size[:, None] / size
        scaled.diagonal().add_(_RIDGE)
        targets = torch.from_numpy(self._sums.targets).to(self._device) / size[:, None]
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if failed:  # rounding: the map of before is as good as any
            return
        weights = torch.cholesky_solve(targets, factor) / size[:, None]
        rows = np.argsort(-self._sums.tokens, kind="stable")[:_ROWS]
        assert self._output is not None
        output = self._output[torch.from_numpy(rows).to(self._output.device)].to(self._device).float()
        self._map = _Map(weights, rows, (output * (self._scale or 1.0)).T.contiguous(), pairs)

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

    def __init__(self, states: States, prompt: np.ndarray) -> None:
        self._of_all, self._prompt = states, prompt
        self._before: torch.Tensor | None = None
        """(hidden,): the state that the root follows, where it is known."""
        self._learned = (0, 0.0)
        """Pairs that were learned from, and the seconds that it took."""
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

    def observe(self, step: Step) -> None:
        """Takes the states of a step; learns when the text has ended, so that no token waits for it."""
        self._before = self._of_all.see(self._before, step)
        if step.finished:
            self._learned = self._of_all.learn()

    def statistics(self) -> Mapping[str, float]:
        (pairs, seconds), self._learned = self._learned, (0, 0.0)
        return {"state_pairs": pairs, "state_seconds": seconds}


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
        found = self._by.next_states(self._states[parents + 1], tokens, self._map.weights)
        self._states = torch.cat([self._states, found])
        ids, shares = top_candidates(found @ self._map.output, self._k)
        return self._map.rows[ids], shares
