"""Text files as token ids: read in pieces, and tokenized in parallel if the tokenizer supports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .._util.prompts import STANDARD_INPUT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE, _PIECES = 1 << 16, 64


def documents(
    files: Iterable[Path], tokenizer: PreTrainedTokenizerBase, advance: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """Yield the ids of each file; `advance` is called with the number of bytes read since its last call. Raises
    ValueError for a file that is not UTF-8.
    """
    for file in files:
        ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
        pieces = _pieces(file, advance)
        while batch := list(islice(pieces, _PIECES)):
            read = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            ids += [np.asarray(some, dtype=np.int32) for some in read]
        yield np.concatenate(ids)


def _pieces(file: Path, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of a file, cut at line ends."""
    try:
        with nullcontext(sys.stdin) if file == STANDARD_INPUT else file.open(encoding="utf-8-sig") as opened:
            while lines := opened.readlines(_PIECE):
                piece = "".join(lines)
                advance(len(piece.encode()))
                yield piece
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
