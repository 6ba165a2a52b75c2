"""Choice between captured and eager forward passes; the code for captures (`graphs`) is imported only when needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .kv_cache import TreeCache
from .runner import NoFastPathError
from .target import Target

if TYPE_CHECKING:
    from .graphs.passes import CapturedPasses

Fast = bool | Literal["auto"]
"""Whether passes are captured: see `Backend.fast`."""


@dataclass(frozen=True)
class Backend:
    """Chooses whether the passes of calls are captured."""

    fast: Fast = False
    """True captures passes or raises, "auto" captures them on CUDA where possible, False never does."""
    suspends: bool = False
    """Whether calls may be suspended between steps for any length of time."""
    falls_back: bool = False
    """Whether passes that cannot be captured are eager with `fast=True` too."""

    def __post_init__(self) -> None:
        if self.fast != "auto" and not isinstance(self.fast, bool):
            raise ValueError(f'fast must be True, False or "auto", got {self.fast!r}')

    def captures(self, target: Target) -> bool:
        """Return whether passes of this model are captured where possible."""
        return target.device.type == "cuda" if self.fast == "auto" else bool(self.fast)

    def acquire(
        self, target: Target, cache: TreeCache | None = None, reproducible: bool = False
    ) -> CapturedPasses | None:
        """Acquire the captured passes of a model for a run, which releases them at its end; return None if its passes
        are eager. `cache`: where the run decodes, None if sequences join and leave; `reproducible`: whether equal calls
        must give equal outputs. Where passes cannot be captured, raise NoFastPathError, or fall back with one warning
        per reason.

        A model has slots for one run. If this backend does not fall back, it waits for the run of another thread,
        unless that run may be suspended.
        """
        if not self.captures(target):
            return None
        from .graphs.support import passes_or_reason, why_not

        passes = why_not(cache, reproducible) or passes_or_reason(target)
        if self.falls_back or self.fast == "auto":
            if isinstance(passes, str):
                target.facts.warn_once(f"forward passes are not captured as CUDA graphs: {passes}")
                return None
            return passes if passes.acquire(self.suspends) else None
        while not isinstance(passes, str) and not passes.acquire(self.suspends):
            if passes.wait():
                passes = passes_or_reason(target)  # meanwhile the model may have changed
            else:
                passes = "another call of the model is active in this thread, or a stream of it has not ended; close it"
        if isinstance(passes, str):
            raise NoFastPathError(f"fast=True: {passes}")
        return passes

    def capture_common(
        self, target: Target, states: tuple[int, ...] = (), sequences: int = 1, reproducible: bool = False
    ) -> None:
        """Capture the common shapes of passes over up to `sequences` sequences now, with a progress bar, so that no
        call waits for them. `states`: numbers of the hidden states that the passes read. If the model's passes cannot
        be captured, raise NoFastPathError with `fast=True`; otherwise the first call warns.
        """
        if not self.captures(target):
            return
        from .graphs.support import passes_or_reason

        passes = passes_or_reason(target)
        if isinstance(passes, str):
            if self.fast is True:
                raise NoFastPathError(f"fast=True: {passes}")
            return
        if reproducible or not passes.acquire():
            return
        try:
            passes.capture_common(target, sequences, states)
        finally:
            passes.release()


EAGER = Backend()
"""All passes are eager."""
