from collections import OrderedDict
from threading import RLock


class LRUCache:
    """A mapping that keeps at most maxsize items.

    When it is full, the item that was used least recently is removed.
    """

    def __init__(self, maxsize=128):
        if maxsize <= 0:
            raise ValueError("maxsize must be positive")
        self._maxsize = maxsize
        self._items = OrderedDict()
        self._lock = RLock()
        self._hits = 0
        self._misses = 0

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items

    def __repr__(self):
        return f"{self.__class__.__name__}(maxsize={self._maxsize}, size={len(self)})"

    def get(self, key, default=None):
        """Return the value for key and mark it as used."""
        with self._lock:
            if key not in self._items:
                self._misses += 1
                return default
            self._hits += 1
            self._items.move_to_end(key)
            return self._items[key]

    def put(self, key, value):
        """Set the value for key, removing the oldest item if necessary."""