"""Values cached per object, such as a model or a tokenizer, for the lifetime of the object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from .locks import Lock

T = TypeVar("T")


class PerObject(Generic[T]):
    """One value per object, made again if the object's state has changed. Thread-safe; copies and pickles are empty.
    A value must not reference its object, which would then never be freed.
    """

    def __init__(self) -> None:
        self._values = WeakKeyDictionary[Any, tuple[Any, T]]()
        self._making = Lock()

    def __reduce__(self) -> tuple[type[PerObject[T]], tuple[()]]:
        return type(self), ()

    def get(self, item: Any, state: Any, make: Callable[[], T]) -> T:
        """Return the value of an object in this state; create it by `make()` if none is cached for this state."""
        with self._making:
            known = self._values.get(item)
            if known is None or known[0] != state:
                known = self._values[item] = state, make()
            return known[1]
