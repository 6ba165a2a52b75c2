"""Facts about a model, kept for as long as the model stays the same.

A self-test, learned costs and captured passes are made once and used by every call. They are kept in this process next
to the model, not in it, so that it is saved, copied and pickled as before. A model is the same as long as its
fingerprint is (`parts.Fingerprint`), which every call compares once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from .._util.device import lasting
from .parts import Fingerprint

logger = logging.getLogger("token_recycling")

T = TypeVar("T")
Dependency = Literal["form", "numbers", "code"]
"""What of a model a result depends on; see `Kept`."""


class Kept:
    """Results about a model, for as long as it is as it was: by what of its fingerprint they depend on. Those of its
    "code" depend on its numbers too, and those of its "numbers" on its form.
    """

    def __init__(self, fingerprint: Fingerprint, before: Kept | None) -> None:
        """`before`: results about the model as it was before, of which those of its form may still hold."""
        same_form = before is not None and before.fingerprint.form == fingerprint.form
        of_form = before._results["form"] if before is not None and same_form else {}
        self._results: dict[str, dict[Hashable, Any]] = {"form": of_form, "numbers": {}, "code": {}}
        self.fingerprint: Fingerprint = fingerprint.watch()
        self.lock: threading.RLock = threading.RLock() if before is None else before.lock
        """The model's, in whatever state."""

    def forget_code(self, fingerprint: Fingerprint) -> None:
        """Forget what depends on the code in the model, which is that of another fingerprint now."""
        self.fingerprint.code, self._results["code"] = fingerprint.watch().code, {}

    def recall(self, what: Hashable, of: Dependency = "numbers") -> Any | None:
        """Return what `get` has made before, or None."""
        return self._results[of].get(what)

    def get(self, what: Hashable, make: Callable[[], T], of: Dependency = "numbers") -> T:
        """Return what `make()` gave the first time. One thread makes it while others that want something of the same
        model wait; what is made may itself be made of such results.
        """
        results = self._results[of]
        if what not in results:
            with self.lock:
                if what not in results:
                    results[what] = _made(make)
        return results[what]

    def forget(self, what: Hashable) -> None:
        """Forget one result, whatever it depends on."""
        for results in self._results.values():
            results.pop(what, None)

    def say_once(self, message: str) -> None:
        """Log a warning about the model, the first time only."""
        self.get(("said", message), lambda: logger.warning(message), of="form")


@lasting
def _made(make: Callable[[], T]) -> T:
    return make()


_kept: WeakKeyDictionary[PreTrainedModel, Kept] = WeakKeyDictionary()
_looking = threading.RLock()


def kept_of(model: PreTrainedModel) -> Kept:
    """Return the results about a model as it is."""
    with _looking:
        before = _kept.get(model)
    now = Fingerprint(model)
    if before is not None and before.fingerprint.form == now.form and before.fingerprint.numbers == now.numbers:
        if before.fingerprint.code != now.code:
            before.forget_code(now)
        return before
    with _looking:
        if (kept := _kept.get(model)) is before or kept is None:  # no other thread has looked again meanwhile
            kept = _kept[model] = Kept(now, before)
    return kept
