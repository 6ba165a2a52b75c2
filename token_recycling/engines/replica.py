"""Shared by the engine adapters: their options, and one recycler with its file for all requests of a replica.

One process of a replica saves the matrix, at intervals and at the end.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._util.options import check_above, read_options
from .._util.topk import as_candidates, packed_candidates
from ..costs.costs import Costs, OnlineCurve, Overhead
from ..recycling.ngram_matrix import NgramMatrix
from ..recycling.ngrams import ngrams_at
from ..recycling.options import Options
from ..recycling.recycler import Recorder, Recycler
from ..recycling.warm_up import warm_up

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("token_recycling")
_OURS = "token_recycling"
"""Attribute of an engine's record that has the recycler of a request."""


@dataclass
class EngineOptions(Options):
    """Options in the engine's own configuration."""

    token_cost: float = 0.02
    """What one more token in a pass costs, as a share of a pass over one token, as long as nothing was learned; at 0
    every chain is as long as the engine allows. Not for trees, whose size is the engine's.
    """
    learns: bool = True
    """Learn from all requests. If not, the matrix stays as it was loaded and no request leaves a trace in it."""
    matrix: str = ""
    """File of the matrix: loaded at the start if it is there, saved at intervals and at the end."""
    save_seconds: float = 30.0
    """Time between two saves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.token_cost < 1:
            raise ValueError(f"token_cost must be >= 0 and < 1, got {self.token_cost}")
        check_above(0, self, "save_seconds")

    @classmethod
    def parse(cls, given: object) -> EngineOptions:
        """Options from a mapping of names to values, as an engine's configuration has them; raises ValueError or
        TypeError."""
        if not isinstance(given, Mapping):
            raise ValueError(f"options of token_recycling must be an object of names and values, got {given!r}")
        return cls(**read_options(cls, "token_recycling", given=given))


class TokenBuffer:
    """The tokens of one sequence in an array that grows, so that a step copies only what is new."""

    def __init__(self, tokens: Sequence[int] | np.ndarray = (), dtype: type[np.integer] = np.int32) -> None:
        self._array = np.array(tokens, dtype)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """(length,): a view, which holds until the next `extend`."""
        return self._array[: self._length]

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        end = self._length + len(tokens)
        if end > len(self._array):
            self._array = np.resize(self._array, 2 * end)
        self._array[self._length : end] = tokens
        self._length = end


class PassCosts:
    """The cost of forward passes over 1, 2, ... tokens: learned from all of them, or given by `token_cost`."""

    def __init__(self, given: Mapping[str, Any], usual: np.ndarray) -> None:
        """`given`: the options as the user gave them; `usual` (n,) float64: seconds, as long as nothing is known."""
        cost = given.get("token_cost")
        self._learned = OnlineCurve(usual) if cost is None else None
        self._given = 1 + float(cost or 0) * np.arange(len(usual))
        self._overhead = Overhead()
        """Accepted and predicted tokens of all sequences, where costs are learned."""
        self.begin_text()

    @property
    def seconds(self) -> np.ndarray:
        """(n,) float64: in seconds where they are learned, else in passes of one token."""
        return self._given if self._learned is None else self._learned.seconds

    def took(self, tokens: int, seconds: float) -> None:
        """Record the time of a forward pass over so many tokens, drafting and learning included."""
        if self._learned is not None:
            self._learned.took(tokens, seconds)

    def begin_text(self) -> None:
        """Start the forecast ratio of a new sequence from that of all earlier ones."""
        if (curve := self._learned) is not None:
            self._costs = Costs(lambda texts, length: curve, 1, 1)

    @property
    def ratio(self) -> float:
        """The forecast ratio: accepted / predicted tokens of earlier drafts; 1 where costs are given."""
        return 1.0 if self._learned is None else self._costs.forecast_ratio(self._overhead)

    def gave(self, tokens: int, values: np.ndarray) -> None:
        """Record the tokens of a step whose draft had nodes of these probabilities (n,), the root first."""
        if self._learned is not None:
            self._costs.back_off(
                self._overhead, tokens, self._costs.of(len(values)), own=0.0, predicted=float(values.sum())
            )


class Observed(NamedTuple):
    """Candidates of one step on their way from a device to the host."""

    ngrams: np.ndarray  # (n, orders) int64
    rows: np.ndarray  # (n,) int64: of the candidates, one for each n-gram
    packed: torch.Tensor  # (2, m, k) int32 in pinned memory, as of `packed_candidates`
    arrived: torch.Event


class Replica:
    """The matrix of all requests of a replica with its file, and the recycler of each request."""

    def __init__(
        self,
        vocab_size: int,
        nodes: int,
        options: EngineOptions,
        tokenizer: str = "",
        saves: bool = True,
        **shape: Any,
    ) -> None:
        """`nodes`: most drafted tokens of a request; `saves`: whether this process writes the file; `shape`: `chains`
        and `corrected` as of `Recycler`. Raises ValueError, and MatrixFileError for a file that is damaged or of
        another model, `tokenizer` or options.
        """
        self.matrix, self.options, self.nodes, self.learns = (
            options.new_matrix(vocab_size),
            options,
            nodes,
            options.learns,
        )
        self._shape = shape
        self._recorders: list[tuple[weakref.ref[Recycler], Recorder]] = []
        """Of all recyclers, to record the last tokens of those that are gone."""
        self._tokenizer = tokenizer
        self._path = Path(options.matrix) if options.matrix else None
        if self._path is not None and find_spec("safetensors") is None:
            raise ModuleNotFoundError(f"the matrix file {self._path} needs safetensors; install it, or give no matrix")
        self._saves = saves and options.learns and self._path is not None
        self._kept, self._saved = 0, time.monotonic()
        self._observed: deque[Observed] = deque()
        if self._path is not None and self._path.exists():
            self.matrix.load(self._path, tokenizer)
            logger.info("loaded %s from %s", self.matrix, self._path)
        elif self._path is not None and not options.learns:
            raise ValueError(f"there is no matrix file {self._path}, and learns is false; let one be learned")

    def begin(self, tokens: np.ndarray, prediction: Sequence[int] = (), answered: int = 0) -> Recycler:
        """Return the recycler of a new sequence (length,), with the predicted output: see `Recycler.predict`. The last
        tokens of a sequence are recorded once its recycler is gone and another sequence begins.
        """
        self._record_ended()
        recycler = Recycler(
            self.matrix,
            tokens,
            self.nodes,
            suffix=self.options.suffix,
            records_prompt=True,
            learns=self.learns,
            **self._shape,
        )
        recycler.predict(prediction, answered)
        self._recorders.append((weakref.ref(recycler), recycler.recorder))
        return recycler

    def recycler_of(
        self, request: Any, tokens: np.ndarray, prediction: Callable[[], Sequence[int]] = tuple, answered: int = 0
    ) -> Recycler:
        """Return the recycler kept on an engine's record of a request. It is a new one where the request does not
        continue with `tokens` (length,); see `begin`.
        """
        recycler: Recycler | None = getattr(request, _OURS, None)
        if recycler is None or not recycler.continues(tokens):
            recycler = self.begin(tokens, prediction(), answered)
            setattr(request, _OURS, recycler)
        return recycler

    def learn_logits(self, ngrams: np.ndarray, logits: np.ndarray | torch.Tensor) -> None:
        """Learn from the target's logits (n, vocabulary) after n-grams (n, orders), if the options allow it."""
        if self.learns:
            self.matrix.learn_logits(ngrams, logits)

    def observe_logits(self, ngrams: np.ndarray, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Learn from the rows (n,) int64 of the target's logits (m, vocabulary), which follow n-grams (n, orders). On a
        device other than the CPU nothing waits: the candidates are copied, and learned by `learn_observed`.
        """
        if not self.learns or not len(rows):
            return
        if logits.device.type == "cpu":
            self.learn_logits(ngrams, logits if len(rows) == len(logits) else logits[rows])
            return
        import torch

        # Of all rows: choosing some of them on the device would copy their logits.
        packed = torch.stack(packed_candidates(logits, self.options.k)).to("cpu", non_blocking=True)
        arrived = torch.Event(logits.device)
        arrived.record()
        self._observed.append(Observed(ngrams, rows, packed, arrived))

    def learn_observed(self, newest: bool) -> None:
        """Learn what was observed; `newest`: the last step too, for whose forward pass this waits."""
        while len(self._observed) > (not newest):
            ngrams, rows, packed, arrived = self._observed.popleft()
            arrived.synchronize()
            ids, probabilities = as_candidates(packed.numpy(), *packed.shape[1:])
            self.matrix.learn(ngrams, ids[rows], probabilities[rows])

    def _record_ended(self) -> None:
        """Record the last tokens of the sequences whose recyclers are gone."""
        for recycler, recorder in self._recorders:
            if recycler() is None:
                recorder.add((), ends=True)
        self._recorders = [(recycler, recorder) for recycler, recorder in self._recorders if recycler() is not None]

    def save(self) -> None:
        """Write the matrix to its file if something was learned; a disk that refuses is logged, and tried again."""
        self.learn_observed(newest=True)
        if not self._saves or self._kept == self.matrix.lessons:
            return
        assert self._path is not None
        self._saved, lessons = time.monotonic(), self.matrix.lessons
        try:
            self.matrix.save(self._path, self._tokenizer)
            self._kept = lessons
        except OSError:
            logger.exception("the matrix could not be saved in %s", self._path)

    def save_if_due(self) -> None:
        """Saves where the interval is over."""
        if time.monotonic() - self._saved >= self.options.save_seconds:
            self.save()

    def warm_up(self, tokens: type[np.integer]) -> None:
        """Compile what a step needs, for n-grams of token arrays of that type, so that no request waits for it."""
        warm_up()
        one = np.ones(1, np.int64)
        ngrams = ngrams_at(np.zeros((1, 2), tokens), one, one, 1)
        NgramMatrix(2, 1, 1).surprised_by(ngrams, np.zeros((1, 2), np.float32))
