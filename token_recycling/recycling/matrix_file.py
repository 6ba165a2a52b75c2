"""The file of a matrix: safetensors, written atomically and checked before use.

`candidates` (vocabulary, k) int32 is the adjacency matrix, the only tensor of `published`. `NgramMatrix` adds `shares`
of the same shape (uint16, 65,535 for 1), the hashed rows of longer n-grams (`context_candidates`, `context_shares`,
`context_keys`), `calibration`, and `history`: the newest tokens of all sequences, separated by -1, masked ones below -1
(`suffix_index`). The header contains the fingerprint of the tokenizer. This module and safetensors are imported on use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .._util.files import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, VERSION = "token_recycling.adjacency_matrix", "6"
_ADJACENCY = {"candidates"}
_NGRAMS = {
    "candidates",
    "shares",
    "context_candidates",
    "context_shares",
    "context_keys",
    "calibration",
    "history",
}
"""Tensor names of the two kinds of matrices."""


class MatrixFileError(ValueError):
    """A saved matrix that cannot be used; the message gives the reason and a remedy."""


def write_matrix(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], tokenizer: str = "", **header: object
) -> None:
    """Write a matrix; readers see either the old or the new file, never a part."""
    from safetensors.numpy import save

    vocab_size, k = tensors["candidates"].shape
    described = {"format": FORMAT, "version": VERSION, "vocab_size": vocab_size, "k": k, "tokenizer": tokenizer}
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    contents = save(arrays, metadata={name: str(value) for name, value in {**described, **header}.items()})
    with replacing(path) as temporary:
        Path(temporary).write_bytes(contents)


def read_matrix_file(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the checked tensors and the header of a saved matrix; raises MatrixFileError or FileNotFoundError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no matrix file at {path}")
    try:
        contents = path.read_bytes()
        tensors = load(contents)
    except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that numpy lacks
        raise MatrixFileError(
            f"{path} is not a matrix file, or it is damaged ({error}); give another file, or delete it to start again"
        ) from None
    header = json.loads(contents[8 : 8 + int.from_bytes(contents[:8], "little")]).get("__metadata__") or {}
    if header.get("format") != FORMAT:
        raise MatrixFileError(f"{path} is a safetensors file but not a matrix; use a file written by --matrix")
    if header.get("version") != VERSION:
        raise MatrixFileError(
            f"{path} has format version {header.get('version')}, this release reads {VERSION}; delete it to start again"
        )
    if tensors.keys() not in (_ADJACENCY, _NGRAMS):
        raise MatrixFileError(f"{path} has missing or unknown tensors; delete it to start again")
    reason = _wrong_shapes(tensors, header) or _wrong_numbers(tensors)
    if reason is not None:
        raise MatrixFileError(f"{path}: {reason}; delete it to start again")
    return tensors, {"tokenizer": "", **header}


def has_ngrams(path: str | os.PathLike[str]) -> bool:
    """Return whether a saved matrix has rows of longer n-grams; raises as `read_matrix_file` does."""
    return read_matrix_file(path)[0].keys() == _NGRAMS


def read_ngram_matrix(
    path: str | os.PathLike[str], ours: Mapping[str, object], calibration: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the checked tensors of an `NgramMatrix` file, whose calibration must have the shape of `calibration`."""
    read, header = read_matrix_file(path)
    if read.keys() != _NGRAMS:
        raise MatrixFileError(f"{path} contains a matrix of the drafter 'published'; load it there, or start a new one")
    check_header(path, ours, header)
    if read["calibration"].shape != calibration.shape:
        raise MatrixFileError(
            f"{path} has a calibration of {len(read['calibration'])} kinds, this release has {len(calibration)}; "
            "delete it to start again"
        )
    return read


def check_header(path: str | os.PathLike[str], ours: Mapping[str, object], header: Mapping[str, str]) -> None:
    """Raise MatrixFileError if an entry of `ours` differs from a file's header; empty entries are ignored."""
    described = {"vocab_size": "the vocabulary", "tokenizer": "the tokenizer"}
    for name, value in ours.items():
        theirs = header.get(name, "")
        if str(value) and theirs and str(value) != theirs:
            raise MatrixFileError(
                f"{path}: {described.get(name, name)} must be {value}, got {theirs}; "
                "use the file of this model and these options, or start a new one"
            )


def _wrong_shapes(tensors: Mapping[str, np.ndarray], header: Mapping[str, str]) -> str | None:
    """Return a description of wrong types or shapes, or None."""
    stated, candidates = (header.get("vocab_size"), header.get("k")), tensors["candidates"]
    if (
        candidates.dtype != np.int32
        or candidates.ndim != 2
        or stated != tuple(map(str, candidates.shape))
        or not candidates.size
    ):
        shape = "x".join(map(str, candidates.shape))
        return (
            f"candidates must be int32 of {stated[0]}x{stated[1]} (vocabulary x k), got {candidates.dtype} of {shape}"
        )
    if candidates.shape[1] > candidates.shape[0]:
        return f"k must be <= the vocabulary, {candidates.shape[0]}, got {candidates.shape[1]}"
    k, hashed = candidates.shape[1], tensors.get("context_keys", candidates[:0]).shape[0]
    expected = {
        "shares": ("uint16", candidates.shape),
        "context_candidates": ("int32", (hashed, k)),
        "context_shares": ("uint16", (hashed, k)),
        "context_keys": ("int64", (hashed,)),
    }
    if "calibration" in tensors:
        expected["calibration"] = ("float32", (len(tensors["calibration"]), 2))
    if "history" in tensors:
        expected["history"] = ("int32", (tensors["history"].size,))
    for name in expected.keys() & tensors.keys():
        actual = (str(tensors[name].dtype), tensors[name].shape)
        if actual != expected[name]:
            return f"{name} must be {expected[name]}, got {actual}"
    return None


def _wrong_numbers(tensors: Mapping[str, np.ndarray]) -> str | None:
    """Return a description of wrong token ids or calibration counts, or None."""
    vocab_size = len(tensors["candidates"])
    for name, least in (("candidates", 0), ("context_candidates", 0), ("history", -1 - vocab_size)):
        if name in tensors and tensors[name].size:
            low, high = int(tensors[name].min()), int(tensors[name].max())
            if low < least or high >= vocab_size:
                return f"{name} must be {least} to {vocab_size - 1}, got {low} to {high}"
    if "calibration" in tensors:
        chosen, total = tensors["calibration"].T
        if not ((chosen >= 0) & (chosen <= total) & np.isfinite(total)).all():
            return "calibration must contain counts with chosen <= total, got other numbers"
    return None


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short digest of the meaning of every token id: equal for equal vocabularies, whatever else is
    configured.
    """
    return vocabulary_fingerprint(tokenizer.get_vocab().items())


def vocabulary_fingerprint(vocabulary: Iterable[tuple[str, int]]) -> str:
    """Return the `fingerprint` of pairs of a token's text and its id, in any order."""
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary, key=lambda item: item[1]):
        digest.update(f"{index}\0{token}\0".encode())
    return digest.hexdigest()[:16]
