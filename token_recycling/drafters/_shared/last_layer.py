"""A layer behind the last one of a head, which goes on learning from what the target accepts; the head stays as it is.

It adds to the head's output a linear map of that output, normed; at first nothing. It learns by cross-entropy from what
the target itself held likely after the tokens of its texts, when a text has ended, for a share of the time of passes.
The output layer is cut to the tokens that came of late and to others drawn at random. What a text shows is judged with
the map and without it before it is learned from: the map is drafted with only where it was better of late.

Cost: drafting a product of the head's width for every row; learning three times that for every row drawn, and the
products with the cut output layer. A square of the width in float32 four times, for each key of a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..._util.locks import Lock
from ...model.tree_model import TreeModel
from ...trees.draft import Step
from .learning import Allowance, AveragedAdam, Lesson
from .ring import Ring, part

_SHARE = 0.02
"""Of the time of passes, that learning may take."""
_RATE, _BATCH, _PASSES = 1e-4, 64, 2
"""Of Adam; rows of a step, and how often it draws each row, about."""
_TOLD = 8
"""Candidates of the target that are learned from at a place."""
_SCORED = 2048
"""Tokens of the output layer that are scored, at least."""
_KEPT = 0.01
"""Weight of what the layer adds, squared, by the size of what it adds to."""
_OF_LATE = 0.97
"""What of earlier judgements is kept with every text."""


@dataclass(frozen=True)
class Said:
    """How tokens are read from a head's outputs."""

    output: torch.nn.Module
    """The output layer, with a weight (tokens, width)."""
    normed: Callable[[torch.Tensor], torch.Tensor]
    """What the output layer reads, (n, width) from outputs (n, width)."""
    vocabulary: int
    """The target's tokens."""
    ids: torch.Tensor | None = None
    """(tokens,) int64: the target's ids of the tokens; None if they are the same."""


class _Told(NamedTuple):
    """Outputs of a head, and what the target held likely there."""

    outputs: torch.Tensor  # (n, width) bfloat16
    tokens: torch.Tensor  # (n, candidates) int64, as the output layer numbers them
    chances: torch.Tensor  # (n, candidates) float32


class LastLayer:
    """Learns from all texts of one drafter, for one target; kept in memory alone."""

    def __init__(
        self,
        said: Said,
        device: torch.device,
        dtype: torch.dtype,
        weight: torch.Tensor | None = None,
        gain: float = 0.0,
    ) -> None:
        """For a target on a device and of a type; `weight` (width, width) and `gain`: what was learned before. Raises
        ValueError for an output layer that cannot be cut.
        """
        table = getattr(said.output, "weight", None)
        if table is None or table.dim() != 2 or not table.is_floating_point():
            raise ValueError(
                "expected an output layer with a weight of vocabulary x hidden numbers, got "
                f"{type(said.output).__name__}; leave out learn=true"
            )
        self._said, self._table, width = said, table, table.shape[1]
        self.device, self._dtype = device, dtype
        begun = torch.zeros(width, width) if weight is None else weight.clone()
        self._adam = AveragedAdam([begun.to(self.device)], _RATE)
        self._gain = gain
        """By how much the map was better of late than nothing."""
        self._drafted: torch.Tensor | None = begun.to(self.device, self._dtype) if gain > 0 else None
        """What is drafted with; replaced as a whole, None for nothing."""
        self._places: torch.Tensor | None = None
        if said.ids is not None:
            self._places = torch.full((said.vocabulary,), -1)
            self._places[said.ids.cpu()] = torch.arange(len(said.ids))
        self.ring = Ring[_Told](2 * width + 12 * _TOLD)
        self._numbers = torch.Generator().manual_seed(0)
        """Draws rows and tokens; apart from all that texts draw."""
        self._allowed, self._learning = Allowance(), Lock()
        self._owed = 0
        """Rows that are yet to be drawn."""

    @property
    def learned(self) -> torch.Tensor:
        """(width, width) float32: the map so far."""
        return self._adam.average[0].clone()

    @property
    def drafts(self) -> bool:
        """Whether the map is drafted with."""
        return self._drafted is not None

    def placed(self, said: Said, device: torch.device, dtype: torch.dtype) -> LastLayer:
        """Another one that has learned the same, for the same target on another device or of another type."""
        with self._learning:
            return LastLayer(said, device, dtype, self.learned, self._gain)

    def fork(self) -> LastLayer:
        """Another one that has learned the same."""
        return self.placed(self._said, self.device, self._dtype)

    def serves(self, target: TreeModel) -> bool:
        """Whether it learns where this target is."""
        return (self.device, self._dtype) == (target.device, target.dtype)

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs (..., width) of the head with what is added to them."""
        weight = self._drafted
        return outputs if weight is None else outputs + _by_size(outputs) @ weight

    def tell(self, outputs: torch.Tensor, ids: np.ndarray, chances: np.ndarray) -> None:
        """Notes outputs (n, width) and the target's candidates after the same tokens: (n, k) ids and probabilities."""
        tokens, likely = torch.from_numpy(ids).long(), torch.from_numpy(chances).float()
        if self._places is not None:
            tokens = self._places[tokens]
            tokens, likely = tokens.clamp(min=0), torch.where(tokens < 0, 0.0, likely)
        self.ring.put(_Told(outputs.to(torch.bfloat16), tokens.to(self.device), likely.to(self.device)))

    def allow(self, passed: float) -> None:
        """Lets learning take its share of so many seconds of passes."""
        self._allowed.add(_SHARE * passed)

    def learn(self) -> Lesson:
        """Learns from the rows that wait, for what time is allowed."""
        with self._learning:
            began = time.perf_counter()
            ends, rows, batches = began + self._allowed.seconds, 0, 0
            if began < ends and (new := self.ring.take(self.ring.most)) is not None:
                rows = len(new.tokens)
                self._judge(new)
                self.ring.keep([new])
                self._owed = min(self._owed + _PASSES * rows, _PASSES * self.ring.most)
            if self._owed > 0 and self.ring.kept is not None and time.perf_counter() < ends:
                scored, table = self._cut(self.ring.kept.tokens)
                while self._owed > 0 and time.perf_counter() < ends:
                    self._step(self.ring.kept, scored, table)
                    batches += 1
            if rows or batches:
                self._drafted = self._adam.average[0].to(self._dtype, copy=True) if self._gain > 0 else None
            took = time.perf_counter() - began
            self._allowed.add(-took)
        return Lesson(rows, batches, took)

    def _judge(self, new: _Told) -> None:
        """Compares the map with nothing on rows that it has not learned from: by one over the rank of what came."""
        scored, table = self._cut(new.tokens)
        came = torch.searchsorted(scored, new.tokens[:, :1].contiguous())
        outputs, said_at_all = new.outputs.float(), new.chances[:, 0] > 0
        found = []
        for each in (outputs, outputs + _by_size(outputs) @ self._adam.average[0]):
            said = self._said.normed(each) @ table
            found.append(float((said_at_all / (1 + (said > said.gather(1, came)).sum(dim=1))).sum()))
        self._gain = _OF_LATE * self._gain + found[1] - found[0]

    def _cut(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those tokens (n, k) and others, (tokens,) int64 ascending, and of the output layer (width, tokens)."""
        others = torch.randint(len(self._table), (_SCORED,), generator=self._numbers).to(self.device)
        scored = torch.cat([tokens.flatten(), others]).unique()
        return scored, self._table.detach()[scored.to(self._table.device)].to(self.device).float().T

    def _step(self, kept: _Told, scored: torch.Tensor, table: torch.Tensor) -> None:
        """One step of Adam."""
        drawn = torch.randint(len(kept.tokens), (_BATCH,), generator=self._numbers).to(self.device)
        some, (weight,) = part(kept, drawn), self._adam.weights
        outputs = some.outputs.float()
        with torch.enable_grad():
            added = _by_size(outputs) @ weight
            said = (self._said.normed(outputs + added) @ table).log_softmax(dim=-1)
            surprise = -(some.chances * said.gather(1, torch.searchsorted(scored, some.tokens))).sum(dim=1).mean()
            loss = surprise + _KEPT * added.square().mean() / outputs.square().mean()
            self._adam.follow(torch.autograd.grad(loss, [weight]))
        self._owed -= _BATCH


def _by_size(outputs: torch.Tensor) -> torch.Tensor:
    """Outputs (..., width) over the root of their mean square."""
    return outputs * outputs.float().square().mean(dim=-1, keepdim=True).clamp(min=1e-9).rsqrt().to(outputs.dtype)


class TextLessons:
    """Of one text: puts what a head said behind each token together with what the target said there."""

    def __init__(self, layer: LastLayer, prompt: int) -> None:
        """`prompt`: its tokens; the place of its last one is that of the first root."""
        self._layer = layer
        self._root = self._first = prompt - 1
        self._outputs: dict[int, torch.Tensor] = {}
        self._told: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """By place, until the other one is there."""
        self._lesson = Lesson()

    def behind(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs (..., width) of the head with what was learned."""
        return self._layer(outputs)

    def read(self, place: int, outputs: torch.Tensor) -> None:
        """Notes the head's own outputs (n, width) behind the text's tokens from this place on."""
        first = max(place, self._first)
        self._outputs |= {first + number: row for number, row in enumerate(outputs[first - place :])}

    def observe(self, step: Step, passed: float) -> None:
        """Notes what the target said behind accepted tokens; `passed`: seconds of the pass."""
        ids, chances = step.top(_TOLD, np.array(step.accepted))
        self._told |= {self._root + number: each for number, each in enumerate(zip(ids, chances, strict=True))}
        self._root += len(step.accepted)
        both = sorted(self._outputs.keys() & self._told.keys())
        if both:
            outputs = torch.stack([self._outputs.pop(place) for place in both])
            ids, chances = (np.stack(each) for each in zip(*map(self._told.pop, both), strict=True))
            self._layer.tell(outputs, ids, chances)
        self._layer.allow(passed)

    def learn(self) -> None:
        """Learns when the text has ended, so that no token waits for it."""
        self._lesson = self._layer.learn()

    def statistics(self) -> Mapping[str, float]:
        lesson, self._lesson = self._lesson, Lesson()
        return {f"head_{name}": value for name, value in lesson._asdict().items()}
