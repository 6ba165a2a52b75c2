"""A datastore of past text in a mapped file, searchable for continuations (`recycling.suffix_index`).

REST (He et al., 2311.08252, section 3.1). Documents are concatenated, each followed by -1, so that no match and no
continuation crosses from one to the next. The file is safetensors, 16 to 20 bytes per token in all. Only the parts that
a look-up touches are read from disk.

Cost of a look-up: a random access for each place that is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from ..._util.files import replacing
from ...model.loading import tokenizer_beside
from ...recycling.matrix_file import fingerprint
from ...recycling.suffix_index import BREAK, IndexArrays, append, longest_match

FORMAT, VERSION = "token_recycling.datastore", "2"
END = BREAK
"""Follows every document."""
_MOST = np.iinfo(np.int32).max
_WALKED = 4
"""Places with the same last tokens to read, per wanted continuation."""


class DatastoreError(ValueError):
    """Raised when a datastore cannot be used or built; the message gives the fix."""


class Datastore:
    """The tokens of past documents and their index, read from a file that `build` wrote."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header; raises DatastoreError for a damaged or another file, FileNotFoundError for none."""
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"no datastore at {path}: there is no such file; `token-recycling datastore build` makes one"
            )
        header, self.index = _read(self.path)
        self.tokenizer = header.get("tokenizer", "")
        """Fingerprint of the tokenizer; empty if not stated."""
        self.vocab_size = int(header["vocab_size"])
        """All ids are below."""

    def __reduce__(self) -> tuple[type[Datastore], tuple[Path]]:
        """Copy and pickle by path: the file is opened again, not copied into memory."""
        return Datastore, (self.path,)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens(self) -> np.ndarray:
        """(n,) int32, with `END` after every document."""
        return self.index.tokens

    def continuations(self, recent: np.ndarray, shortest: int, length: int, most: int) -> np.ndarray:
        """Return continuations (m, length) int32, sorted: what followed the longest suffix of `recent` (n,) with at
        least `shortest` tokens, at the newest `most` places. Tokens after the end of a document are arbitrary.
        """
        places, matched = longest_match(self.index, recent, _WALKED * most)
        places = places[:most] if matched >= shortest else places[:0]
        # The tokens end with END, so anything beyond it is the end of a document.
        found = self.tokens[np.minimum(places[:, None] + np.arange(length), len(self) - 1)]
        if len(found) and not found.min() >= END <= found.max() < self.vocab_size:
            raise DatastoreError(
                f"{self.path}: ids must be below {self.vocab_size}, got {found.min()} to {found.max()}: the file is "
                "damaged; build it again"
            )
        return found[np.lexsort(found.T[::-1])]


def build(
    documents: Iterable[Sequence[int] | np.ndarray], path: str | os.PathLike[str], tokenizer: str = ""
) -> Datastore:
    """Write the datastore of `documents`, token ids each, and open it.

    The file is written atomically. `tokenizer` is the `fingerprint` of the tokenizer. Raises DatastoreError if there is
    no token, an id is negative, or there are 2**31 tokens or more.
    """
    parts: list[np.ndarray] = []
    for document in documents:
        ids = np.asarray(document, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < _MOST:
            raise DatastoreError(f"ids must be >= 0 and fit 31 bits, got {ids.min()} to {ids.max()}")
        if len(ids):
            parts += [ids, np.array([END])]
    tokens = sum(map(len, parts))
    if not 0 < tokens < _MOST:
        raise DatastoreError(f"a datastore must have 1 to {_MOST - 1} tokens, got {tokens}")
    index = IndexArrays.empty(tokens, 1 << (tokens.bit_length() - 1))
    for part in parts:
        append(index, part)
    vocab_size = str(int(index.tokens.max()) + 1)
    header = {"format": FORMAT, "version": VERSION, "tokenizer": tokenizer, "vocab_size": vocab_size}
    with replacing(path) as temporary:
        save_file(index._asdict(), temporary, metadata=header)
    return Datastore(path)


def tokenizer_of(model: PreTrainedModel) -> str:
    """Return the fingerprint of the tokenizer saved with a model; empty if there is none on this machine."""
    tokenizer = tokenizer_beside(model)
    return "" if tokenizer is None else fingerprint(tokenizer)


def _read(path: Path) -> tuple[dict[str, str], IndexArrays]:
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != FORMAT:
                raise DatastoreError(
                    f"{path}: this safetensors file is not a datastore; "
                    "give one written by `token-recycling datastore build`"
                )
            if header.get("version") != VERSION:
                raise DatastoreError(
                    f"{path}: format version must be {VERSION}, got {header.get('version')}; build it again"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except (SafetensorError, OSError) as error:
        raise DatastoreError(
            f"{path}: the datastore cannot be read ({error}); give one written by `token-recycling datastore build`"
        ) from None
    found = {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
    n, chains = len(arrays.get("tokens", ())), arrays["newest"].shape[-1] if "newest" in arrays else 0
    wanted = {
        "tokens": (torch.int32, (n,)),
        "before": (torch.int32, (2, n)),
        "newest": (torch.int32, (2, chains)),
        "added": (torch.int64, (1,)),
    }
    if (
        found != wanted
        or n == 0
        or chains & (chains - 1)
        or not chains
        or (int(arrays["added"]), int(arrays["tokens"][-1])) != (n, END)
        or not header.get("vocab_size", "").isdigit()
    ):
        raise DatastoreError(f"{path}: the file is damaged, got {found}; build it again")
    return header, IndexArrays(**{name: array.numpy() for name, array in arrays.items()})
