"""Iterators over sequences and streams."""

from collections import deque
from itertools import islice


class Peekable:
    """An iterator that can look at the next items without consuming them.

    >>> it = Peekable([1, 2, 3])
    >>> it.peek()
    1
    >>> next(it)
    1
    >>> list(it)
    [2, 3]
    """

    _marker = object()

    def __init__(self, iterable):
        self._it = iter(iterable)
        self._cache = deque()

    def __iter__(self):
        return self

    def __next__(self):
        if self._cache:
            return self._cache.popleft()
        return next(self._it)

    def __bool__(self):
        try:
            self.peek()
        except StopIteration:
            return False
        return True

    def peek(self, default=_marker):