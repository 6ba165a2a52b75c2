"""Prefill: reads prompts, and further known tokens, into a KV cache.

All tokens of a sequence except the last go into the cache: the last one is the root of the first draft. If logits are
needed, prompts are read in pieces, so that the logits of a whole prompt are never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import pad

from ..trees.draft import Draft
from .kv_cache import TreeCache
from .target import Target

PIECE = 512
"""Tokens per batch whose logits are in memory together, or that are read with a mask."""
_READ, _READ_FAR_ON_CPU, _FAR = 512, 256, 1024
"""Tokens of a prompt that are read before other sequences have a turn; on a CPU fewer after `_FAR` others, where
attention takes most of the time. From a few hundred rows on a pass is compute-bound: larger pieces gain little per
token. These are counts, not times, so that a prompt is cut, and rounded, at the same places whatever else is decoded.
"""
_READ_ON_DEVICE, _READ_ON_DEVICE_ALONE = 1024, 4096
"""Piece sizes on an accelerator, which needs more rows to be busy; the latter if no other sequence waits."""
_EXTENDED_PIECE = 64
"""Maximum tokens per sequence that one pass reads after cached ones."""

Reading = Callable[[], None]
"""Called before each piece of a prompt; an exception ends the call."""


def piece_of(model: Target, cached: int, others: bool = False) -> int:
    """Return how many tokens of a prompt are read after `cached` ones before `others` have a turn, or before the next
    check whether the caller still waits.
    """
    if model.device.type != "cpu":
        return _READ_ON_DEVICE if others else _READ_ON_DEVICE_ALONE
    return _READ_FAR_ON_CPU if cached >= _FAR else _READ


def prefill(
    model: Target,
    sequences: Sequence[torch.Tensor],
    cache: TreeCache,
    cached: Sequence[int] | None = None,
    reading: Reading | None = None,
) -> None:
    """Read each of `sequences` (length,), except its last token, into the cache, as far as it is uncached.

    The first `cached[row]` tokens of each sequence are cached; by default as many as the cache has. Shorter sequences
    are padded on the right with one of their own tokens. `reading` is called before each piece.
    """
    cache.expect(max(map(len, sequences)))
    slots, threshold = cache.length, model.info.length_threshold
    if threshold is not None and threshold.at_once and len(sequences[0]) > threshold.at:
        _read_at_once(model, sequences[0], cache)
        return
    cached = cached or [slots] * len(sequences)
    missing = [sequence[there:-1].to(model.device) for sequence, there in zip(sequences, cached, strict=True)]
    if set(cached) != {slots}:
        for _ in extend(model, missing, cached, cache, [sequence[:1] for sequence in sequences]):
            pass
        return
    longest = max(map(len, missing))
    tokens = torch.stack(
        [padded(row, (0, longest - len(row)), sequence) for row, sequence in zip(missing, sequences, strict=True)]
    )
    if longest:
        read_text(model, tokens, cache, min(map(len, sequences)) - 1, reading)


def read_text(
    model: Target,
    tokens: torch.Tensor,
    cache: TreeCache,
    shortest: int,
    reading: Reading | None,
) -> torch.Tensor:
    """Return logits (batch, 1, vocabulary) after the last of the tokens (batch, n >= 1), which are read in pieces after
    all cached ones. The shortest sequence has `shortest` tokens. `reading` is called before each piece.
    """
    cached, start, n = cache.length, 0, tokens.shape[1]
    size = n if model.leaves_logits_out else max(1, PIECE // len(tokens))
    while start < n:
        if reading is not None:
            reading()
            size = min(size, piece_of(model, cached + start))
        end = min(n, start + size)
        cache.drop_unseen(min(shortest, cached + end))
        logits = model.read(tokens[:, start:end], cache, last=1)
        start = end
    return logits


def extend(
    model: Target,
    tokens: Sequence[torch.Tensor],
    lengths: Sequence[int],
    cache: TreeCache,
    roots: Sequence[torch.Tensor],
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Write `tokens[row]` (any number,) after the first `lengths[row]` slots of each sequence, over later slots. Yield,
    piece by piece, the tokens of every sequence and the logits (batch, n, vocabulary) after each; pieces of shorter
    sequences are shorter or empty. A row without a piece reads `roots[row]` (1,), its own token with unused logits.
    """
    lengths = list(lengths)
    size = max(1, min(_EXTENDED_PIECE, PIECE // len(tokens)))
    for start in range(0, max(map(len, tokens)), size):
        pieces = [sequence[start : start + size].to(model.device) for sequence in tokens]
        slots = cache.length
        drafts = [Draft.chain(piece if len(piece) else root) for piece, root in zip(pieces, roots, strict=True)]
        logits = model.forward(model.inputs.of(drafts, lengths, slots), cache)
        cache.keep(slots, lengths, [range(len(piece)) for piece in pieces])
        lengths = [length + len(piece) for length, piece in zip(lengths, pieces, strict=True)]
        yield pieces, logits


def cross_threshold(model: Target, sequences: Sequence[torch.Tensor], cache: TreeCache) -> None:
    """Read a sequence again if the model's own `generate` does so at this length."""
    threshold = model.info.length_threshold
    if threshold is not None and threshold.reread and len(sequences[0]) == threshold.at + 1:
        _read_at_once(model, sequences[0], cache)


def continued(model: Target, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `prompt` (length,) with its greedy continuation by `tokens` tokens, past any end-of-sequence token."""
    cache, sequence = model.new_cache(), prompt.to(model.device)
    prefill(model, [sequence], cache)
    for _ in range(tokens):
        cached = cache.length
        cross_threshold(model, [sequence], cache)
        logits = model.forward(model.inputs.of([Draft.chain(sequence[-1:])], [cached], cached), cache)
        sequence = torch.cat([sequence, logits[0, -1:].argmax(dim=-1)])
    return sequence


def _read_at_once(model: Target, sequence: torch.Tensor, cache: TreeCache) -> None:
    """Read a whole sequence in one forward pass, as `generate` does if a prompt's length determines how it is read."""
    threshold = model.info.length_threshold
    if threshold is not None and threshold.reread and cache.length <= threshold.at:
        cache.crop(0)
    model.read(sequence[None, cache.length :].to(model.device), cache, last=1)
    cache.crop(len(sequence) - 1)


def padded(row: torch.Tensor, columns: tuple[int, int], sequence: torch.Tensor) -> torch.Tensor:
    """Pad a row of tokens (n,) on the left and right with a token of its `sequence`: masked states must be numbers, and
    the embeddings of other tokens may not be.
    """
    return pad(row, columns, value=int(sequence[0]))


def checked_prompt(input_ids: torch.Tensor, model: Target) -> torch.Tensor:
    """Return the prompt as (length,) int64 on the model's device; raises ValueError if it is invalid."""
    shape = tuple(input_ids.shape)
    if input_ids.ndim == 2 and shape[0] == 1:
        input_ids = input_ids[0]
    if input_ids.ndim != 1 or not len(input_ids) or input_ids.is_floating_point():
        raise ValueError(
            "input_ids must be one prompt of integers, shape (length,) or (1, length), length >= 1, "
            f"got {shape} {input_ids.dtype}"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= model.embedded:
        raise ValueError(
            f"token ids must be from 0 to {model.embedded - 1}, got {int(input_ids.min())} to {int(input_ids.max())}; "
            "is this the model's tokenizer?"
        )
    return input_ids.to(model.device, torch.long)
