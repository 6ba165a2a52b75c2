"""The adjacency matrix: after every vocabulary token, the k candidates that the model last gave for what follows.

Token Recycling, section 3.1. The matrix is zero at first, is kept from query to query (*hot start*), and costs
vocabulary x k x 4 bytes: 1 MB for 32,000 tokens and k = 8. A row is overwritten whole whenever its token has been
verified anywhere in a tree. Looking up n nodes and writing n rows are a handful of tensor operations each, without
waiting for the device.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UpdateRule = Literal["last", "first", "unordered"]
FORMAT, VERSION = "token_recycling.adjacency_matrix", "1"
_CHUNK = 256
_GROUP, _LARGE = 64, 32_768


class MatrixFileError(ValueError):
    """A saved matrix that cannot be used: what was expected, what came and what to do."""


class AdjacencyMatrix:
    """Candidates after every token: `candidates` is (vocab_size, k) int32, best first, zero where nothing was seen."""

    def __init__(self, vocab_size: int, k: int = 8, device: torch.device | str = "cpu") -> None:
        if vocab_size < 1 or not 1 <= k <= vocab_size:
            raise ValueError(
                f"expected a vocabulary of 1 or more and k from 1 to its size, got vocabulary {vocab_size} and k {k}"
            )
        self.candidates = torch.zeros(vocab_size, k, dtype=torch.int32, device=device)

    @property
    def vocab_size(self) -> int:
        return self.candidates.shape[0]

    @property
    def k(self) -> int:
        return self.candidates.shape[1]

    @property
    def filled(self) -> torch.Tensor:
        """(vocab_size,) bool: the rows that something was learned for."""
        return self.candidates.any(dim=1)

    @property
    def nbytes(self) -> int:
        return self.candidates.numel() * self.candidates.element_size()

    def __repr__(self) -> str:
        return f"AdjacencyMatrix({self.vocab_size:,} tokens x {self.k}, {int(self.filled.sum()):,} rows filled)"

    def look_up(self, tokens: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """The candidate of the given rank after each token; all (n,) int64."""
        return self.candidates[tokens, ranks].long()

    def fill(self, tree: Tree, root: torch.Tensor) -> torch.Tensor:
        """The tokens (n,) int64 of a tree: `root` (1,), and every other node the candidate of its rank after its
        parent.

        The breadth-first walk of Token Recycling, section 3.2: layer by layer with one gather each; on a CPU, where the
        call of an operation costs more than a small layer, node by node.
        """
        if self.candidates.device.type == "cpu":
            candidates, tokens = self.candidates.numpy().data, root.tolist()
            for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
                tokens.append(candidates[tokens[parent], rank])
            return torch.tensor(tokens)
        return self._fill_by_layers(tree, root)

    def _fill_by_layers(self, tree: Tree, root: torch.Tensor) -> torch.Tensor:
        shape, tokens = tree.on(root.device), root.repeat(len(tree))
        for layer in tree.layers:
            nodes = slice(layer[0], layer[-1] + 1)
            tokens[nodes] = self.look_up(tokens[shape.parents[nodes]], shape.ranks[nodes])
        return tokens

    def update(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """Overwrites the rows of `tokens` (n,) with `candidates` (n, k), best first.

        A token may stand at several places. Then `last` keeps its last row and `first` its first, in the order given,
        on every device; `unordered` is a plain parallel write whose winner CUDA does not define (Token Recycling,
        section 4.4 compares the three).
        """
        if self.candidates.device.type == "cpu":
            # numpy assigns in order, so that the last row of a token stays.
            places, rows = tokens.numpy(), candidates.numpy()
            self.candidates.numpy()[places if rule != "first" else places[::-1]] = (
                rows if rule != "first" else rows[::-1]
            )
        elif rule == "unordered":
            self.candidates[tokens] = candidates.to(self.candidates.dtype)
        else:
            self._update_in_order(tokens, candidates, rule)

    def _update_in_order(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule) -> None:
        """Every place of a token writes the row of the winning place, so that the order of the writes cannot matter."""
        pieces = list(zip(tokens.split(_CHUNK), candidates.split(_CHUNK), strict=True))
        for some, rows in pieces if rule == "last" else reversed(pieces):
            same, places = some[:, None] == some, torch.arange(len(some), device=some.device)
            winner = (
                torch.where(same, places, -1).amax(1) if rule == "last" else torch.where(same, places, _CHUNK).amin(1)
            )
            self.candidates[some] = rows[winner].to(self.candidates.dtype)

    def save(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Writes a safetensors file atomically: a reader sees the old file or the new one, never a part.

        `tokenizer` is the `fingerprint` of the tokenizer whose ids these are; a matrix of other ids must never be
        loaded.
        """
        path = Path(path)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "vocab_size": str(self.vocab_size),
            "k": str(self.k),
            "tokenizer": tokenizer,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file({"candidates": self.candidates.cpu().contiguous()}, temporary, metadata=header)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Replaces the contents by those of a file; after any error the matrix is as it was.

        Raises MatrixFileError for a file that is damaged, of another format, vocabulary or k, with ids out of range,
        or, if both sides state one, of another tokenizer.
        """
        loaded, header = read_matrix(path)
        for what, ours, theirs in (
            ("a vocabulary", self.vocab_size, loaded.vocab_size),
            ("k", self.k, loaded.k),
            ("the tokenizer", tokenizer or None, header["tokenizer"] or None),
        ):
            if ours is not None and theirs is not None and ours != theirs:
                raise MatrixFileError(
                    f"{path}: expected {what} of {ours}, got {theirs}; use the file of this model or start a new one"
                )
        self.candidates.copy_(loaded.candidates)


def read_matrix(path: str | os.PathLike[str]) -> tuple[AdjacencyMatrix, dict[str, str]]:
    """A saved matrix and its header, checked; raises MatrixFileError, or FileNotFoundError where there is no file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no matrix file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            if header.get("format") != FORMAT or list(file.keys()) != ["candidates"]:
                raise MatrixFileError(
                    f"{path}: expected a saved adjacency matrix, got another safetensors file; "
                    "give a file written by --matrix"
                )
            candidates = file.get_tensor("candidates")
    except (SafetensorError, OSError) as error:
        raise MatrixFileError(
            f"{path}: expected a safetensors file, got one that cannot be read ({error}); delete it to start anew"
        ) from None
    if header.get("version") != VERSION:
        raise MatrixFileError(
            f"{path}: expected format version {VERSION}, got {header.get('version')}; update token_recycling"
        )
    stated = (header.get("vocab_size"), header.get("k"))
    if (
        candidates.dtype != torch.int32
        or candidates.ndim != 2
        or stated != tuple(map(str, candidates.shape))
        or not candidates.numel()
    ):
        shape = "x".join(map(str, candidates.shape))
        raise MatrixFileError(
            f"{path}: expected int32 ids of vocabulary x k = {stated[0]} x {stated[1]}, "
            f"got {candidates.dtype} {shape}; delete it"
        )
    low, high = int(candidates.min()), int(candidates.max())
    if low < 0 or high >= candidates.shape[0]:
        raise MatrixFileError(
            f"{path}: expected ids from 0 to {candidates.shape[0] - 1}, got {low} to {high}; delete it to start anew"
        )
    if candidates.shape[1] > candidates.shape[0]:
        raise MatrixFileError(
            f"{path}: expected k of at most the vocabulary, got {candidates.shape[1]} > {candidates.shape[0]}; "
            "delete it"
        )
    matrix = AdjacencyMatrix(*candidates.shape)
    matrix.candidates.copy_(candidates)
    return matrix, {"tokenizer": "", **header}


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short digest of what every token id means; equal for equal vocabularies, whatever else is configured."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\0{token}\0".encode())
    return digest.hexdigest()[:16]


def check_rule(rule: str) -> None:
    """Raises ValueError unless `rule` is one of the three update rules."""
    if rule not in get_args(UpdateRule):
        raise ValueError(f"expected an update rule of {', '.join(get_args(UpdateRule))}, got {rule!r}")


def top_candidates(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The ids of the k largest logits of each row (n, vocabulary), best first: (n, k) int64.

    Same as `topk`; for large vocabularies on a CPU five times faster, because the k largest values lie in the k groups
    of largest maximum.
    """
    n, vocab_size = logits.shape
    groups = vocab_size // _GROUP
    if logits.device.type != "cpu" or vocab_size < _LARGE or groups < k:
        return logits.topk(k, dim=-1).indices
    grouped = logits[:, : groups * _GROUP].unflatten(1, (groups, _GROUP))
    best = grouped.amax(2).topk(k, dim=1).indices
    values = grouped.gather(1, best[:, :, None].expand(n, k, _GROUP)).flatten(1)
    ids = (best[:, :, None] * _GROUP + torch.arange(_GROUP)).flatten(1)
    if groups * _GROUP < vocab_size:
        rest = torch.arange(groups * _GROUP, vocab_size)
        values = torch.cat([values, logits[:, groups * _GROUP :]], dim=1)
        ids = torch.cat([ids, rest.expand(n, len(rest))], dim=1)
    return ids.gather(1, values.topk(k, dim=1).indices)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
