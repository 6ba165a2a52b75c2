"""Past text that can be searched for what followed some tokens: a suffix array in a memory-mapped file.

REST (He et al., 2311.08252, section 3.1). Documents are concatenated, each followed by -1, so that no match and no
continuation crosses from one to the next. The suffix array lists all places in the order of their suffixes; those that
begin with given tokens are a range of it, found by binary search. The file is safetensors, 8 bytes a token in all, 12
from 2**31 tokens on. Only the parts that a look-up touches are read from disk.

Cost of a look-up: 2 log2(tokens) comparisons for each length of match tried, some 50 microseconds each.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from ..._util.extras import lacking
from ..._util.files import replacing
from ...model.loading import tokenizer_beside
from ...recycling.matrix import fingerprint

FORMAT, VERSION = "token_recycling.datastore", "1"
END = -1
"""Follows every document."""


class DatastoreError(ValueError):
    """A datastore that cannot be used or made: what was expected, what came and what to do."""


class Datastore:
    """A text of past documents and its suffix array, read from a file that `build` has written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises DatastoreError for a file that is damaged or no datastore, FileNotFoundError where there is none.

        Only the header is read here; ids and places are checked when they are looked up.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"expected a datastore, got {path}: there is no such file; `token-recycling datastore build` makes one"
            )
        header, arrays = _read(self.path)
        self.tokenizer = header.get("tokenizer", "")
        """Fingerprint of the tokenizer whose ids these are; empty if not stated."""
        self.vocab_size = int(header["vocab_size"])
        """All ids are below."""
        self.tokens, self.suffixes = arrays
        """(n,) int32, with `END` after every document; (n,) int32 or int64 places, in order of their suffixes."""
        # Python reads single numbers and short lists from a memoryview several times as fast as from an array.
        self._text, self._places = self.tokens.data, self.suffixes.data

    def __reduce__(self) -> tuple[type[Datastore], tuple[Path]]:
        """Copied and pickled by its path: the file is opened once more, and not copied into memory."""
        return Datastore, (self.path,)

    def __len__(self) -> int:
        """Number of tokens, the ends of documents included."""
        return len(self.tokens)

    def find(self, ngram: Sequence[int]) -> range:
        """The slots of `suffixes` whose suffixes begin with `ngram`; empty where it does not occur."""
        wanted, size = list(ngram), len(ngram)

        def beginning(slot: int) -> list[int]:
            place = self._places[slot]
            return self._text[place : place + size].tolist()

        slots = range(len(self))
        first = bisect_left(slots, wanted, key=beginning)
        if first == len(slots) or beginning(first) != wanted:
            return range(0)
        return range(first, bisect_right(slots, wanted, lo=first, key=beginning))

    def longest_suffix(self, tokens: Sequence[int], longest: int, shortest: int) -> tuple[range, int]:
        """The slots of the longest suffix of `tokens` that occurs, of at most `longest` and at least `shortest` tokens,
        and its length; an empty range and 0 where none occurs.

        Where a suffix occurs, so does every shorter one: the length too is found by binary search.
        """
        found, length, too_long = range(0), 0, min(longest, len(tokens)) + 1
        while max(length + 1, shortest) < too_long:
            tried = (max(length + 1, shortest) + too_long) // 2
            slots = self.find(tokens[len(tokens) - tried :])
            if slots:
                found, length = slots, tried
            else:
                too_long = tried
        return found, length

    def continuations(self, slots: range, skipped: int, length: int, most: int) -> np.ndarray:
        """(m, length) int32: what follows the first `skipped` tokens of the suffixes in `slots`, in their order.

        Of more than `most`, as many at even distances. What comes after the end of a document is arbitrary.
        """
        count = min(len(slots), most)
        places = self.suffixes[slots.start + np.arange(count) * len(slots) // max(count, 1)].astype(np.int64)
        if count and not 0 <= places.min() <= places.max() < len(self):
            raise self._damaged(f"places from 0 to {len(self) - 1}", places)
        # The text ends with END, so that whatever would lie beyond it is the end of a document.
        found = self.tokens[np.minimum(places[:, None] + (skipped + np.arange(length)), len(self) - 1)]
        if count and not found.min() >= END <= found.max() < self.vocab_size:
            raise self._damaged(f"ids below {self.vocab_size}", found)
        return found

    def _damaged(self, expected: str, found: np.ndarray) -> DatastoreError:
        return DatastoreError(
            f"{self.path}: expected {expected}, got {found.min()} to {found.max()}: the file is damaged; build it anew"
        )


def build(
    documents: Iterable[Sequence[int] | np.ndarray], path: str | os.PathLike[str], tokenizer: str = ""
) -> Datastore:
    """Writes the datastore of `documents`, token ids each, and opens it.

    The file appears whole or not at all. `tokenizer` is the `fingerprint` of the tokenizer whose ids these are. Sorting
    needs 30 bytes of memory a token, 50 where the vocabulary is over 65,535. Raises DatastoreError if
    there is no token, or an id is negative.
    """
    sort = suffix_sorter()
    parts: list[np.ndarray] = []
    for document in documents:
        ids = np.asarray(document, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < np.iinfo(np.int32).max:
            raise DatastoreError(f"expected ids of 0 or more in 31 bits, got {ids.min()} to {ids.max()}")
        if len(ids):
            parts += [ids.astype(np.int32), np.array([END], dtype=np.int32)]
    if not parts:
        raise DatastoreError("expected text, got no token at all")
    tokens = np.concatenate(parts)
    suffixes = sort((tokens + 1).astype(np.uint32))
    suffixes = suffixes.astype(np.int32 if len(tokens) <= np.iinfo(np.int32).max else np.int64)
    header = {"format": FORMAT, "version": VERSION, "tokenizer": tokenizer, "vocab_size": str(int(tokens.max()) + 1)}
    with replacing(path) as temporary:
        save_file({"tokens": tokens, "suffixes": suffixes}, temporary, metadata=header)
    return Datastore(path)


def tokenizer_of(model: PreTrainedModel) -> str:
    """The fingerprint of the tokenizer that was saved with a model; empty if there is none on this machine."""
    tokenizer = tokenizer_beside(model)
    return "" if tokenizer is None else fingerprint(tokenizer)


def _read(path: Path) -> tuple[dict[str, str], tuple[np.ndarray, np.ndarray]]:
    """The header and both arrays, whose memory is the file's."""
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != FORMAT or sorted(file.keys()) != ["suffixes", "tokens"]:
                raise DatastoreError(
                    f"{path}: expected a datastore, got another safetensors file; "
                    "give one written by `token-recycling datastore build`"
                )
            if header.get("version") != VERSION:
                raise DatastoreError(
                    f"{path}: expected format version {VERSION}, got {header.get('version')}; build it anew"
                )
            tokens, suffixes = file.get_tensor("tokens"), file.get_tensor("suffixes")
    except (SafetensorError, OSError) as error:
        raise DatastoreError(
            f"{path}: expected a datastore, got a file that cannot be read ({error}); "
            "give one written by `token-recycling datastore build`"
        ) from None
    kinds = tokens.dtype == torch.int32 and suffixes.dtype in (torch.int32, torch.int64)
    shapes = tokens.ndim == 1 and tokens.shape == suffixes.shape and len(tokens) > 0
    if not kinds or not shapes or int(tokens[-1]) != END or not header.get("vocab_size", "").isdigit():
        raise DatastoreError(
            f"{path}: expected tokens and a suffix array of one length, got {tokens.dtype} {tuple(tokens.shape)} and "
            f"{suffixes.dtype} {tuple(suffixes.shape)}: the file is damaged; build it anew"
        )
    return header, (tokens.numpy(), suffixes.numpy())


def suffix_sorter() -> Callable[[np.ndarray], np.ndarray]:
    """The function that sorts suffixes; raises DatastoreError if its library is missing."""
    if missing := lacking("rest", "pydivsufsort"):
        raise DatastoreError(f"sorting suffixes {missing}")
    from pydivsufsort import divsufsort

    return divsufsort
