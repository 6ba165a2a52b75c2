"""REST: retrieval-based speculative decoding (He et al., 2311.08252) from a datastore of past text.

The longest suffix of the context in the datastore is found, 16 tokens down to 2. Of up to 5,000 continuations of 10
tokens, the 64 most frequent prefixes form the tree (sections 3.2 and 3.3): prefixes of a frequent prefix are at least
as frequent. If more places share the last three tokens, the newest are read.

Cost per step: some microseconds, and 3 ms more if all 5,000 continuations are read.

A datastore (section 3.1) is a memory-mapped file of past text, searchable for continuations (`recycling.suffix_index`).
Documents are concatenated, each followed by -1, so that no match and no continuation crosses a document boundary. The
file is safetensors, 16 to 20 bytes per token in total. Only the parts that a look-up touches are read from disk: one
random access per place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from .._util.files import replacing
from ..model.loading import saved_tokenizer
from ..model.target import Target
from ..recycling.matrix_file import fingerprint
from ..recycling.suffix_index import BREAK, IndexArrays, append, longest_match, warm_up
from ..trees.draft import Context, Draft
from ._base import Drafter, DrafterTraits, check_at_least

FORMAT, VERSION = "token_recycling.datastore", "2"
END = BREAK
"""End marker of every document."""
_MOST = np.iinfo(np.int32).max
_WALKED = 4
"""Number of places with the same last tokens to read, per wanted continuation."""


class DatastoreError(ValueError):
    """A datastore that cannot be used or built; the message gives the fix."""


class Datastore:
    """The tokens of past documents and their index, read from a file written by `build`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header; raises DatastoreError for a damaged or foreign file, FileNotFoundError if there is none."""
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"no datastore at {path}: there is no such file; `token-recycling datastore build` makes one"
            )
        header, self.index = _read(self.path)
        self.tokenizer = header.get("tokenizer", "")
        """Fingerprint of the tokenizer; empty if unknown."""
        self.vocab_size = int(header["vocab_size"])
        """Upper bound of all ids, exclusive."""

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
        """Return continuations (m, length) int32, sorted: the tokens after the longest suffix of `recent` (n,) with at
        least `shortest` tokens, at the newest `most` places. Tokens after the end of a document are arbitrary.
        """
        places, matched = longest_match(self.index, recent, _WALKED * most)
        places = places[:most] if matched >= shortest else places[:0]
        # The tokens end with END, so any index beyond them reads the end of a document.
        continuations = self.tokens[np.minimum(places[:, None] + np.arange(length), len(self) - 1)]
        if len(continuations):
            lowest, highest = continuations.min(), continuations.max()
            if lowest < END or highest >= self.vocab_size:
                raise DatastoreError(
                    f"{self.path}: ids must be below {self.vocab_size}, got {lowest} to {highest}: the file is "
                    "damaged; build it again"
                )
        return continuations[np.lexsort(continuations.T[::-1])]


def build(
    documents: Iterable[Sequence[int] | np.ndarray], path: str | os.PathLike[str], tokenizer: str = ""
) -> Datastore:
    """Write the datastore of `documents`, each a list of token ids, and open it.

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
    tokenizer = saved_tokenizer(model)
    return "" if tokenizer is None else fingerprint(tokenizer)


def _read(path: Path) -> tuple[dict[str, str], IndexArrays]:
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != FORMAT:
                raise DatastoreError(
                    f"{path}: this safetensors file is not a datastore; "
                    "use one written by `token-recycling datastore build`"
                )
            if header.get("version") != VERSION:
                raise DatastoreError(
                    f"{path}: format version must be {VERSION}, got {header.get('version')}; build it again"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
    except (SafetensorError, OSError) as error:
        raise DatastoreError(
            f"{path}: the datastore cannot be read ({error}); use one written by `token-recycling datastore build`"
        ) from None
    actual = {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
    n, chains = len(arrays.get("tokens", ())), arrays["newest"].shape[-1] if "newest" in arrays else 0
    expected = {
        "tokens": (torch.int32, (n,)),
        "before": (torch.int32, (2, n)),
        "newest": (torch.int32, (2, chains)),
        "added": (torch.int64, (1,)),
    }
    if (
        actual != expected
        or n == 0
        or chains & (chains - 1)
        or not chains
        or (int(arrays["added"]), int(arrays["tokens"][-1])) != (n, END)
        or not header.get("vocab_size", "").isdigit()
    ):
        raise DatastoreError(f"{path}: the file is damaged, got {actual}; build it again")
    return header, IndexArrays(**{name: array.numpy() for name, array in arrays.items()})


_LEAST = 2
"""Shortest match that is drafted from."""


@dataclass
class Rest(Drafter):
    """Drafts the most frequent continuations of the last tokens in a datastore of past text."""

    datastore: str | Path
    """File written by `token-recycling datastore build`."""
    nodes: int = 64
    """Maximum number of drafted nodes: the most frequent prefixes."""
    num_tokens: int = 10
    """Tokens of a continuation, and so the maximum depth of the tree."""
    max_matching_ngram_size: int = 16
    """Longest n-gram to look up; shorter ones are tried if it has no match."""
    max_matches: int = 5000
    """Maximum number of continuations counted."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "nodes", "num_tokens", "max_matches")
        if self.max_matching_ngram_size < _LEAST:
            raise ValueError(f"max_matching_ngram_size must be >= {_LEAST}, got {self.max_matching_ngram_size}")
        self._store = Datastore(self.datastore)
        self._checked = False
        """Whether the last target's tokenizer was verified to be the datastore's."""

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True)

    def fork(self) -> Rest:
        """Open the datastore again: it is read-only and not copied into memory."""
        return replace(self)

    def warm_up(self, device: torch.device) -> None:
        warm_up()

    def fit(self, target: Target) -> None:
        store = self._store
        if store.vocab_size > target.embedded:
            raise DatastoreError(
                f"{store.path}: ids must be below {target.embedded}, the target's vocabulary, got "
                f"{store.vocab_size - 1}; build a datastore with --model of this target"
            )
        theirs = target.facts.get("tokenizer", lambda: tokenizer_of(target.model), of="form")
        self._checked = bool(store.tokenizer and theirs)
        if self._checked and store.tokenizer != theirs:
            raise DatastoreError(
                f"{store.path}: its tokenizer must be the target's, {theirs}, got {store.tokenizer}; "
                "build a datastore with --model of this target"
            )

    def start(self, prompt: torch.Tensor, target: Target) -> Rest:
        self.warm_up(target.device)
        self.fit(target)
        return self

    def draft(self, context: Context) -> Draft:
        recent = context.tokens[-self.max_matching_ngram_size :].cpu().numpy()
        length = min(self.num_tokens, context.remaining)
        continuations = self._store.continuations(recent, _LEAST, length, self.max_matches)
        if not len(continuations):
            return Draft.chain(context.root)
        counts = {(): len(continuations), **frequent_prefixes(continuations, self.nodes)}
        nodes = {prefix: node for node, prefix in enumerate(counts)}
        tokens, parents, probabilities = [int(recent[-1])], [-1], [1.0]
        for prefix in [*counts][1:]:
            tokens.append(prefix[-1])
            parents.append(nodes[prefix[:-1]])
            probabilities.append(counts[prefix] / counts[prefix[:-1]])
        return Draft(tokens, parents, probabilities)

    def describe(self) -> str:
        unsure = "" if self._checked else ", its tokenizer not checked"
        return f"rest: at most {self.nodes} nodes from {self._store.path.name} of {len(self._store):,} tokens{unsure}"


def frequent_prefixes(continuations: np.ndarray, most: int) -> dict[tuple[int, ...], int]:
    """Return the `most` most frequent prefixes of `continuations` (m, length) with their counts, shorter ones first,
    then the more frequent.

    The continuations must be sorted, so that equal prefixes are adjacent. A negative token ends a continuation. Among
    equally frequent prefixes the shorter ones are taken.
    """
    m, length = continuations.shape
    new = np.ones((length, m), dtype=bool)
    np.logical_or.accumulate(continuations[1:] != continuations[:-1], axis=1, out=new[:, 1:].T)
    # Prefixes are numbered by depth, then by the first row that has them: each is a run of rows.
    starts = np.flatnonzero(new)
    counts = np.diff(starts, append=length * m)
    whole = np.logical_and.accumulate(continuations >= 0, axis=1).T.reshape(-1)[starts]
    starts, counts = starts[whole], counts[whole]
    order = starts - counts * (length * m)
    if len(order) > most:
        best = np.argpartition(order, most)[:most]
        starts, counts, order = starts[best], counts[best], order[best]
    best = np.lexsort((order, starts // m))
    return {
        tuple(continuations[start % m, : start // m + 1].tolist()): count
        for start, count in zip(starts[best].tolist(), counts[best].tolist(), strict=True)
    }
