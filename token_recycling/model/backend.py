"""Whether the forward passes of calls are captured: the code for that is loaded where they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from .kv_cache import TreeCache
from .runner import States
from .target import Target

if TYPE_CHECKING:
    from .graphs.passes import CapturedPasses

Fast = bool | Literal["auto"]
"""Whether passes are captured: see `Backend.fast`."""
FAST: dict[str, Fast] = {"auto": "auto", "on": True, "off": False}
"""Values of the command-line option."""


@dataclass(frozen=True)
class Backend:
    """Chooses whether the passes of calls are captured."""

    fast: Fast = False
    """True captures passes or raises, "auto" captures them on CUDA where possible, False never does."""
    suspends: bool = False
    """Whether calls may be suspended between steps for as long as their callers like."""
    falls_back: bool = False
    """Whether passes of a call that cannot be captured are eager with `fast=True` too."""

    def __post_init__(self) -> None:
        if self.fast != "auto" and not isinstance(self.fast, bool):
            raise ValueError(f'fast must be True, False or "auto", got {self.fast!r}')

    def captures(self, target: Target) -> bool:
        """Whether passes of this model are captured, where that is possible."""
        return target.device.type == "cuda" if self.fast == "auto" else bool(self.fast)

    def captured(
        self, target: Target, cache: TreeCache | None = None, reproducible: bool = False
    ) -> AbstractContextManager[CapturedPasses | None]:
        """Return the captured passes of a run while the context lasts, None where its passes are eager: of a run in
        `cache`, or where sequences join and leave in none; `reproducible` if equal calls must give equal outputs.
        Raises NoFastPathError.
        """
        if not self.captures(target):
            return nullcontext()
        return self._graphs.captured(
            target, cache, reproducible, self.suspends, falls_back=self.falls_back or self.fast == "auto"
        )

    def capture_common(
        self, target: Target, states: States | None = None, sequences: int = 1, reproducible: bool = False
    ) -> None:
        """Capture now what most passes need, so that no call waits for it: see `graphs.capture_common`."""
        if self.captures(target):
            self._graphs.capture_common(target, self.fast is True, states, sequences, reproducible)

    @property
    def _graphs(self) -> ModuleType:
        from . import graphs

        return graphs


EAGER = Backend()
"""All passes are eager."""
