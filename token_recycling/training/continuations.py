"""The target's continuations of given prompts, stored in a file.

Heads that predict the target are trained on its outputs, not on the training text (Medusa, 2401.10774, section 2.3.2;
SpecDec++, 2405.19715, section 3.2). The file is saved during generation, so an interrupted run resumes. Sampled outputs
are generated without drafts, so that a seed gives the same outputs whatever costs are measured.

The file is safetensors: `tokens` (total,) int32 of all sequences, `offsets` (texts + 1,) int64 of their beginnings, and
`prompt_lengths` (texts,) int32. Its header identifies model, prompts and options.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .._util.files import replacing
from ..model.inspection import weights_fingerprint
from ..model.target import Target

Generate = Callable[..., Any]
"""Like `hf.accelerate.generate`: takes a model, ids (batch, length), a drafter's name and arguments of
`model.generate`; returns ids (batch, length + new).
"""
FORMAT, VERSION = "token_recycling.continuations", "1"
_SAVE_SECONDS = 20
_SHORTEST_SHARE = 0.5


class ContinuationsError(ValueError):
    """A file of continuations that cannot be used; the message gives the reason and a remedy."""


@dataclass
class Continuations:
    """Sequences, each a prompt and the target's output."""

    texts: list[torch.Tensor]
    """(length,) int64 each."""
    prompt_lengths: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def split(self, share: float) -> tuple[Continuations, Continuations]:
        """Return the first sequences, and the last `share` of them, at least one; raises ValueError if none are left to
        train on.
        """
        held_out = max(1, round(len(self) * share))
        if held_out >= len(self):
            raise ValueError(f"no texts are left to train on: {held_out} of {len(self)} are held out; give more text")
        return self.select(range(len(self) - held_out)), self.select(range(len(self) - held_out, len(self)))

    def select(self, places: Sequence[int]) -> Continuations:
        """Return the sequences at these indices."""
        return Continuations([self.texts[place] for place in places], [self.prompt_lengths[place] for place in places])

    @property
    def digest(self) -> str:
        """Digest of all sequences and their prompt lengths."""
        return digest([torch.tensor(self.prompt_lengths), *self.texts])


def pieces(documents: Iterable[np.ndarray], length: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return at most `count` pieces (length,) int64 of documents (any,), chosen and shuffled by `seed`.

    Pieces do not overlap, and those of one document are adjacent: the held-out ones share at most one document with the
    others. The end of a document is a piece if it has at least half the length. Raises ValueError if there is none.
    """
    parts: list[tuple[int, np.ndarray]] = []
    shortest = max(1, math.ceil(_SHORTEST_SHARE * length))
    for number, document in enumerate(documents):
        cut = [document[start : start + length] for start in range(0, len(document), length)]
        parts += [(number, piece) for piece in cut if len(piece) >= shortest]
    if not parts:
        raise ValueError(f"no text has {shortest} tokens or more; give longer texts, or fewer prompt tokens per output")
    draws = np.random.default_rng(seed)
    drawn = draws.permutation(len(parts))[:count].tolist()
    place = draws.permutation(parts[-1][0] + 1)
    chosen = sorted(drawn, key=lambda index: place[parts[index][0]])
    return [torch.from_numpy(parts[index][1].astype(np.int64)) for index in chosen]


def continuations(
    generate: Generate,
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> Continuations:
    """Return the output of `model` after each of `prompts` (length,), greedy or sampled, and write it to `path`.

    If the file exists the run resumes. `progress` is called with the number of finished sequences and the total. Raises
    ContinuationsError if the file belongs to another model, other prompts or other options, or is damaged.
    """
    if max_new_tokens < 1 or batch < 1 or temperature < 0:
        raise ValueError(
            "max_new_tokens and batch must be >= 1 and temperature must be >= 0, "
            f"got {max_new_tokens}, {batch} and {temperature}"
        )
    origin = {
        "model": weights_fingerprint(model),
        "prompts": digest(prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": float(temperature),
        "seed": seed,
        "batch": batch,
    }
    path = Path(path)
    done = _read(path, origin) if path.exists() else Continuations([], [])
    saved_at = time.monotonic()
    while len(done) < len(prompts):
        if progress is not None:
            progress(len(done), len(prompts))
        group = prompts[len(done) : len(done) + batch]
        with torch.random.fork_rng():
            torch.manual_seed(seed + len(done))
            done.texts += _continued(generate, model, group, max_new_tokens, temperature)
        done.prompt_lengths += [len(prompt) for prompt in group]
        if time.monotonic() - saved_at > _SAVE_SECONDS or len(done) == len(prompts):
            _write(path, done, origin)
            saved_at = time.monotonic()
    if progress is not None:
        progress(len(done), len(prompts))
    return done


def _continued(
    generate: Generate, model: PreTrainedModel, prompts: Sequence[torch.Tensor], max_new_tokens: int, temperature: float
) -> list[torch.Tensor]:
    """Return each prompt with the model's output, up to and including an end-of-sequence token."""
    target, longest = Target(model), max(map(len, prompts))
    remaining = max_new_tokens if target.max_length is None else min(max_new_tokens, target.max_length - longest)
    if remaining < 1:
        raise ValueError(
            f"prompts must be shorter than the model's context of {target.max_length} tokens, got {longest}"
        )
    eos, padding = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left").to(target.device)
        for rows in (list(prompts), [torch.ones_like(prompt) for prompt in prompts])
    )
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    said = generate(
        model,
        ids,
        drafter="plain" if temperature else "recycling",
        attention_mask=mask,
        max_new_tokens=remaining,
        pad_token_id=padding if padding is not None else min(ends, default=0),
        do_sample=bool(sampling),
        **sampling,
    )
    texts = []
    for prompt, row in zip(prompts, said[:, longest:].tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        texts.append(torch.cat([prompt.cpu(), torch.tensor(row[:end], dtype=torch.long)]))
    return texts


def digest(texts: Iterable[torch.Tensor]) -> str:
    """Return a digest of sequences of ids (length,), in order."""
    result = hashlib.sha256()
    for text in texts:
        result.update(len(text).to_bytes(8, "little") + text.cpu().numpy().astype("<i8").tobytes())
    return result.hexdigest()[:16]


def _write(path: Path, done: Continuations, made: dict[str, Any]) -> None:
    lengths = torch.tensor([0, *map(len, done.texts)])
    tensors = {
        "tokens": torch.cat(done.texts).int(),
        "offsets": lengths.cumsum(0),
        "prompt_lengths": torch.tensor(done.prompt_lengths, dtype=torch.int32),
    }
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": FORMAT, "version": VERSION, "made": json.dumps(made)})


def _read(path: Path, made: dict[str, Any]) -> Continuations:
    remedy = "delete it to start again, or use another file"
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise ContinuationsError(f"{path}: not a readable safetensors file: {error}; {remedy}") from None
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise ContinuationsError(f"{path}: not continuations of format version {VERSION}; {remedy}")
    theirs = json.loads(header["made"])
    for name, value in made.items():
        if theirs.get(name) != value:
            raise ContinuationsError(
                f"{path}: {name} of the continuations must be {value}, got {theirs.get(name)}; {remedy}"
            )
    sizes, prompt_lengths = tensors["offsets"].diff().tolist(), tensors["prompt_lengths"].tolist()
    if sum(sizes) != len(tensors["tokens"]) or not all(
        0 < prompt < size for prompt, size in zip(prompt_lengths, sizes, strict=True)
    ):
        raise ContinuationsError(f"{path}: offsets do not fit the tokens; {remedy}")
    return Continuations(list(tensors["tokens"].long().split(sizes)), prompt_lengths)
