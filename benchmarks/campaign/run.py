"""Runs a case, plain and accelerated, in this process, and says how it ended."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import token_recycling as tr
from token_recycling.costs.costs import OnlineCurve, Work
from token_recycling.model import pass_times

from . import parts
from .case import Case
from .program import program

SAME, LEFT, REFUSED, BETTER, TIE = "same", "left", "refused", "better", "near-tie"
"""`left`: the same, but left to transformers; `better`: plain `generate` alone raises; a near-tie is a difference
between two choices as good as equal.
"""
MISMATCH, ERROR, HANG = "MISMATCH", "ERROR", "HANG"
FAILURES = (MISMATCH, ERROR, HANG)
_TIE = 1e-5
_LIMIT = 60
Results = list[list[torch.Tensor]]


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    outcome: str
    detail: str = ""
    """What differs, the error, the reason of a refusal, or the margin of a near-tie."""
    seconds: float = 0.0
    """Of the processor."""
    mat: float | None = None
    """Mean accepted tokens, where the surface tells."""

    @property
    def kind(self) -> str:
        """What a smaller case must show to be the same failure."""
        return f"{self.outcome} {self.detail.partition(':')[0] if self.outcome == ERROR else ''}".strip()


def run(case: Case) -> Result:
    """Executes a case's program; whatever goes wrong in it is a result."""
    began = time.process_time()
    kept = pass_times.prior, OnlineCurve.took, Work.count
    try:
        with _alarm():
            found = _compared(case)
    except TimeoutError as error:
        found = Result(HANG, str(error))
    finally:
        pass_times.prior, OnlineCurve.took, Work.count = kept
    return replace(found, seconds=round(time.process_time() - began, 3))


def _compared(case: Case) -> Result:
    names = _namespace(case)
    model = names["new_model"]()
    wanted, refused = _collected(lambda: names["calls"](model, model.generate, *[parts.in_turn] * case.threads))
    ours: list[Any] = []

    def accelerated() -> Iterable[list[torch.Tensor]]:
        fast, generate = names["accelerated"](names["new_model"]())
        ours.append(fast)
        return names["calls"](fast, generate, *[parts.at_once] * case.threads)

    with _fallbacks() as left:
        found, error = _collected(accelerated)
    acceleration = getattr(ours[0], "acceleration", None) if ours else None
    mat = round(acceleration.total.mat, 3) if acceleration is not None and acceleration.total.steps else None
    short = wanted[: len(found)] if error is not None else wanted
    difference = parts.first_difference(short, found[: len(wanted)] if refused is not None else found)
    if difference is not None:
        margin = _margin(case, difference[0], found) if difference[1] == 0 else None
        if margin is not None and margin < _TIE:
            return Result(TIE, f"{margin:.1e}", mat=mat)
        return Result(MISMATCH, "call {}, tensor {}: {}".format(*difference), mat=mat)
    if error is not None and type(error) is not type(refused):
        return Result(REFUSED if _is_refusal(error) else ERROR, _told(error), mat=mat)
    if refused is not None and error is None:
        return Result(BETTER, _told(refused), mat=mat)
    return Result(LEFT, left[0], mat=mat) if left else Result(SAME, mat=mat)


def _namespace(case: Case) -> dict[str, Any]:
    """The names of a case's program; its model is made once for all cases that have it."""
    source = program(case)
    names: dict[str, Any] = {**vars(parts), "copy": copy, "functools": functools, "pickle": pickle}
    names["new_model"] = lambda: copy.deepcopy(_prototype(source.model))
    exec(compile(source.accelerated, "accelerated.py", "exec"), names)
    exec(compile(source.calls, "calls.py", "exec"), names)
    return names


@lru_cache(maxsize=400)
def _prototype(source: str) -> Any:
    names = dict(vars(parts))
    exec(compile(source, "model.py", "exec"), names)
    return names["new_model"]()


def _collected(results: Callable[[], Iterable[list[torch.Tensor]]]) -> tuple[Results, BaseException | None]:
    """All results up to an error, and the error."""
    found: Results = []
    try:
        found.extend(results())
    except TimeoutError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return found, error
    return found, None


def _is_refusal(error: BaseException) -> bool:
    """Whether the library says that it does not do this, in its own words."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    own = isinstance(error, ValueError) and "expected" in str(error) and "token_recycling" in where
    return isinstance(error, (tr.UnsupportedModelError, tr.NoFastPathError)) or own


def _told(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "token_recycling" in frame.filename]
    where = f" ({frames[-1].filename.rpartition('token_recycling/')[2]}:{frames[-1].lineno})" if frames else ""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"


def _margin(case: Case, call: int, found: Results) -> float | None:
    """How much better the right token was than ours where the texts part, as a share of the largest score; None if
    transformers does not tell.
    """
    shown = []
    for one in case.calls:
        options = [name for name in one.options if name not in ("all outputs", "logits", "returned", "hidden states")]
        shown.append(replace(one, options=(*options, "all outputs")))
    names = _namespace(replace(case, calls=tuple(shown)))
    model = names["new_model"]()
    wanted, error = _collected(lambda: names["calls"](model, model.generate, *[parts.in_turn] * case.threads))
    if error is not None or call >= len(wanted):
        return None
    text, *others = wanted[call]
    ours = found[call][0]
    steps = sum(tensor.ndim == 2 and tensor.is_floating_point() for tensor in others) // 2
    columns = min(ours.shape[-1], text.shape[-1])
    if ours.ndim != 2 or len(ours) != len(text) or not steps:
        return None
    places = (ours[:, :columns] != text[:, :columns]).nonzero()
    if not len(places):
        return None
    row, column = min(places.tolist(), key=lambda place: place[1])
    scores = others[column - (text.shape[1] - steps)][row]
    scale = float(scores[scores.isfinite()].abs().max())
    return float(scores[text[row, column]] - scores[ours[row, column]]) / max(scale, 1e-9)


@contextmanager
def _fallbacks() -> Iterator[list[str]]:
    """Why calls were left to transformers, in order."""
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if str(record.msg).startswith("not accelerated"):
                said.append(str(record.args[0]) if record.args else record.getMessage())

    logger, handler = logging.getLogger("token_recycling"), Listening()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@contextmanager
def _alarm() -> Iterator[None]:
    """Raises TimeoutError in the main thread where a case hangs."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"nothing after {_LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
