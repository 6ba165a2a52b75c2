"""Shared by the engine adapters: options, the cost of steps, the matrix of a replica with its file, and checks.

An engine schedules, verifies and samples; its adapter reads tokens and logits, and proposes drafts. The time of passes
over 1, 2, ... tokens is learned from every step, drafting and learning included. Kernels for few tokens may make a pass
over two tokens slower than one over five, so times may decrease with the number of tokens; a draft then has the length
of the cheapest pass.

One process of a replica saves the matrix, periodically and at the end.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._util.options import read_options
from .._util.topk import as_candidates, packed_candidates
from .._util.versions import release
from ..costs import OnlineCurve, paying_prefix
from ..recycling.ngram_matrix import NgramMatrix, Options
from ..recycling.ngrams import ngrams_at
from ..recycling.recycler import Recycler, warm_up
from ..recycling.suffix_index import Recorder

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("token_recycling")

_OURS = "token_recycling"
"""Attribute for the recycler of a request on an engine's record of it, and attribute that marks wrapped functions."""
_LOSS, _KEPT_GAIN = -2.0, 0.98
"""Sum of the gains of drafted steps, in plain steps, below which drafts become stricter; its decay per step."""
_STRICTER, _MOST_STRICT, _STRICT_STEPS = 1.6, 6.0, 256
"""Factor on the power of forecasts per loss, its upper bound, and the number of steps after which one loss is
forgotten.
"""
_FILLERS = 8
"""Maximum number of filler tokens in a step."""
SAVED_EVERY = 30.0
"""Seconds between two saves of the matrix."""


@dataclass
class EngineOptions(Options):
    """Options in the engine's own configuration."""

    token_cost: float = 0.06
    """Cost of each further token of a pass relative to a pass over one token. vLLM uses it as a prior for its
    measurements; with 0 every chain has the engine's maximum length. Not for trees, whose size the engine sets.
    """
    learns: bool = True
    """Learn from all requests. Otherwise the matrix stays as loaded and no request leaves a trace in it."""
    matrix: str = ""
    """File of the matrix: loaded at startup if it exists, saved periodically and at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.token_cost < 1:
            raise ValueError(f"token_cost must be >= 0 and < 1, got {self.token_cost}")

    @classmethod
    def parse(cls, options: object) -> EngineOptions:
        """Return options from a mapping, as in an engine's configuration; raises ValueError or TypeError."""
        if not isinstance(options, Mapping):
            raise ValueError(f"options of token_recycling must be an object of names and values, got {options!r}")
        return cls(**read_options(cls, "token_recycling", given=options))


class StepCosts:
    """The cost of steps by their number of tokens, learned or fixed, and whether drafts pay.

    It shares the cost curve and the rule for the number of nodes (`costs`) with the loop's `Pacer`. The loop makes
    passes itself: it times drafting and verification separately, and can skip drafting. An engine exposes only whole
    steps, in which several tokens may take less time than one.
    """

    def __init__(self, seconds: np.ndarray, learns: bool = True, power: float = 1.0) -> None:
        """`seconds` (n,) float64: prior times of steps over 1, 2, ... tokens; fixed unless `learns`. `power` >= 1: the
        first power of the forecasts; above 1 where a wrong draft costs many times a step.
        """
        self._curve = OnlineCurve(seconds, may_fall=True) if learns else None
        self._gain, self._power, self._strict_steps = 0.0, power if learns else 1.0, 0
        self.seconds = seconds
        """(n,) float64: times of steps over 1, 2, ... tokens."""
        self.steps_without = 0
        """Steps since the last draft, if costs are learned."""
        self._find_cheapest()

    def record_time(self, tokens: int, seconds: float) -> None:
        """Record the time of a step over `tokens` tokens, drafting and learning included."""
        if self._curve is not None:
            self._curve.record_time(tokens, seconds)
            if self._curve.seconds is not self.seconds:
                self.seconds = self._curve.seconds
                self._find_cheapest()

    def record_outcome(self, sequences: int, tokens: int, drafted: int, accepted: int) -> None:
        """Record the outcome of a step of `sequences` sequences over `tokens` tokens, of which `drafted` were drafted
        and `accepted` of these accepted. The learned time of such a step is used: single measurements are noisy.
        """
        if self._curve is None:
            return
        if self._power > 1:
            self._strict_steps += 1
            if self._strict_steps >= _STRICT_STEPS:
                self._power, self._strict_steps = max(1.0, self._power / _STRICTER), 0
        self.steps_without = 0 if drafted else self.steps_without + 1
        if not drafted:
            return
        plain, step = self.seconds[np.minimum([sequences, tokens], len(self.seconds)) - 1].tolist()
        gain = 1 + accepted / sequences - step / plain
        self._gain = min(-_LOSS, _KEPT_GAIN * self._gain + gain)
        if self._gain < _LOSS:
            self._gain, self._strict_steps = 0.0, 0
            self._power = min(_MOST_STRICT, self._power * _STRICTER)

    def paying(self, drafts: Sequence[np.ndarray], read_again: int = 0) -> list[int]:
        """Return how many nodes of each draft to verify, the root included; `drafts` are their forecast gains (n,).
        After losses these are raised to a power, since forecasts near 1 stay right where others fail. `read_again`:
        number of additional tokens that the step reads.
        """
        sizes = [len(gains) for gains in drafts]
        if not any(sizes):
            return [1] * len(sizes)
        gains = np.concatenate(drafts).astype(np.float64) ** self._power
        order = np.argsort(-gains, kind="stable")
        expected = np.cumsum(np.append(float(len(drafts)), gains[order]))
        paying = order[: paying_prefix(self.cheapest, len(drafts) + read_again, expected)]
        return (1 + np.bincount(np.repeat(np.arange(len(drafts)), sizes)[paying], minlength=len(drafts))).tolist()

    def filled(self, tokens: int, most: int) -> int:
        """Return the number of tokens with the fastest step: `tokens`, or up to 8 more, at most `most`."""
        most = min(most, tokens + _FILLERS, len(self.seconds))
        return tokens if most <= tokens else tokens + int(self.seconds[tokens - 1 : most].argmin())

    def _find_cheapest(self) -> None:
        self.cheapest = np.minimum.accumulate(self.seconds[::-1])[::-1].copy()
        """(n,) float64: times of steps over at least 1, 2, ... tokens, since drafts may be filled up."""


class TokenBuffer:
    """The tokens of one sequence in a growing array, so that a step copies only new tokens."""

    def __init__(self, tokens: Sequence[int] | np.ndarray = (), dtype: type[np.integer] = np.int32) -> None:
        self._array = np.array(tokens, dtype)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """(length,): a view, valid until the next `extend`."""
        return self._array[: self._length]

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens."""
        end = self._length + len(tokens)
        if end > len(self._array):
            self._array = np.resize(self._array, 2 * end)
        self._array[self._length : end] = tokens
        self._length = end


class Observed(NamedTuple):
    """Candidates of one step that are being copied from a device to the host."""

    ngrams: np.ndarray  # (n, orders) int64
    rows: np.ndarray  # (n,) int64: rows of the candidates, one per n-gram
    packed: torch.Tensor  # (2, m, k) int32 in pinned memory, as of `packed_candidates`
    arrived: torch.Event


class Replica:
    """The matrix shared by all requests of a replica, its file, and the recycler of each request."""

    def __init__(
        self,
        vocab_size: int,
        nodes: int,
        options: EngineOptions,
        tokenizer: str = "",
        saves: bool = True,
        **shape: Any,
    ) -> None:
        """`nodes`: maximum drafted tokens of a request; `saves`: whether this process writes the file; `shape`:
        `chains` and `corrected` of `Recycler`. Raises ValueError, and MatrixFileError for a file that is damaged or
        belongs to another model, `tokenizer` or options.
        """
        self.matrix, self.options, self.nodes, self.learns = (
            options.new_matrix(vocab_size),
            options,
            nodes,
            options.learns,
        )
        self._shape = shape
        self._recorders: list[tuple[weakref.ref[Recycler], Recorder]] = []
        """Recorders of all recyclers, to record the last tokens of collected ones."""
        self._tokenizer = tokenizer
        self._path = Path(options.matrix) if options.matrix else None
        if self._path is not None and find_spec("safetensors") is None:
            raise ModuleNotFoundError(f"the matrix file {self._path} needs safetensors; install it, or give no matrix")
        self._saves = saves and self._path is not None
        self._kept, self._saved = 0, time.monotonic()
        self._observed: deque[Observed] = deque()
        if self._path is not None and self._path.exists():
            self.matrix.load(self._path, tokenizer)
            logger.info("loaded %s from %s", self.matrix, self._path)
        elif self._path is not None and not options.learns:
            raise ValueError(f"there is no matrix file {self._path}, and learns is false; learn one first")

    def begin(self, tokens: np.ndarray, prediction: Sequence[int] = (), answered: int = 0) -> Recycler:
        """Return the recycler of a new sequence (length,), with the predicted output: see `Recycler.predict`. The last
        tokens of a sequence are recorded once its recycler is collected and another sequence begins.
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
        """Return the recycler stored on an engine's record of a request; a new one if `tokens` (length,) do not
        continue the request's sequence. See `begin`.
        """
        recycler: Recycler | None = getattr(request, _OURS, None)
        if recycler is None or not recycler.continues(tokens):
            recycler = self.begin(tokens, prediction(), answered)
            setattr(request, _OURS, recycler)
        return recycler

    def learn_logits(self, ngrams: np.ndarray, logits: np.ndarray | torch.Tensor) -> None:
        """Learn from the target's logits (n, vocabulary) after n-grams (n, orders), if the options allow learning."""
        if self.learns:
            self.matrix.learn_logits(ngrams, logits)

    def observe_logits(self, ngrams: np.ndarray, logits: torch.Tensor, rows: np.ndarray) -> None:
        """Learn from the rows (n,) int64 of the target's logits (m, vocabulary), after n-grams (n, orders). On devices
        other than the CPU nothing waits: candidates are copied asynchronously, and learned by `learn_observed`.
        """
        if not self.learns or not len(rows):
            return
        if logits.device.type == "cpu":
            self.learn_logits(ngrams, logits if len(rows) == len(logits) else logits[rows])
            return
        import torch

        # Copy all rows: selecting some on the device would copy their logits.
        packed = torch.stack(packed_candidates(logits, self.options.k)).to("cpu", non_blocking=True)
        arrived = torch.Event(logits.device)
        arrived.record()
        self._observed.append(Observed(ngrams, rows, packed, arrived))

    def learn_observed(self, newest: bool) -> None:
        """Learn from the observed steps; `newest`: including the last one, whose forward pass this waits for."""
        while len(self._observed) > (not newest):
            ngrams, rows, packed, arrived = self._observed.popleft()
            arrived.synchronize()
            ids, probabilities = as_candidates(packed.numpy(), *packed.shape[1:])
            self.matrix.learn(ngrams, ids[rows], probabilities[rows])

    def _record_ended(self) -> None:
        """Record the last tokens of sequences whose recyclers were collected."""
        for recycler, recorder in self._recorders:
            if recycler() is None:
                recorder.add((), ends=True)
        self._recorders = [(recycler, recorder) for recycler, recorder in self._recorders if recycler() is not None]

    def save(self) -> None:
        """Write the matrix to its file if something was learned; a failure is logged, and the next save tries again."""
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
        """Save if the interval has passed."""
        if time.monotonic() - self._saved >= SAVED_EVERY:
            self.save()

    def warm_up(self, tokens: type[np.integer]) -> None:
        """Compile the code of a step, for n-grams of token arrays of that dtype, so that no request waits for it."""
        warm_up()
        one = np.ones(1, np.int64)
        ngrams = ngrams_at(np.zeros((1, 2), tokens), one, one, 1)
        NgramMatrix(2, 1, 1).mispredicted(ngrams, np.zeros((1, 2), np.float32))


def check_version(name: str, version: str, lowest: tuple[int, ...], beyond: tuple[int, ...]) -> None:
    """Raise RuntimeError unless `version` of an engine is at least `lowest` and before `beyond`."""
    if not lowest <= release(version) < beyond:
        first, later = (".".join(map(str, numbers)) for numbers in (lowest, beyond))
        raise RuntimeError(
            f"{name} must be >= {first} and < {later}, got {version}; install one of these, or a newer token-recycling"
        )


def check_signature(engine: str, name: str, function: Any, wanted: tuple[str, ...], more: bool = False) -> None:
    """Raise RuntimeError unless `function`, or None, has the parameters `wanted`; with `more`, others may follow."""
    parameters = tuple(inspect.signature(function).parameters) if function is not None else ()
    if (parameters[: len(wanted)] if more else parameters) != wanted:
        expected = f"({', '.join(wanted)}{', ...' if more else ''})"
        raise RuntimeError(
            f"{name} of {engine} must take {expected}, got ({', '.join(parameters)}); this version is not supported"
        )


def check_attributes(engine: str, owner: type, names: Iterable[str]) -> None:
    """Raise RuntimeError unless objects of a class have these attributes: methods, fields, or names in the code of its
    constructor, since no object is created here.
    """
    attributes: set[str] = set()
    for each in owner.__mro__:
        own = vars(each)
        code = getattr(inspect.unwrap(own.get("__init__", owner)), "__code__", None)
        attributes |= {*own, *own.get("__annotations__", ()), *(code.co_names if code else ())}
    if absent := sorted(set(names) - attributes):
        raise RuntimeError(
            f"{owner.__name__} of {engine} has no {', '.join(absent)}, which token-recycling reads; "
            "this version is not supported"
        )


def wrap_once(
    engine: str,
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    more: bool = False,
) -> None:
    """Replace a function of a class or module by `wrap(function)`, once per process; raises RuntimeError as
    `check_signature` does.
    """
    original = getattr(owner, name, None)
    if getattr(original, _OURS, False):
        return
    check_signature(engine, f"{owner.__name__}.{name}", original, parameters, more)
    assert original is not None
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _OURS, True)
    setattr(owner, name, wrapped)
