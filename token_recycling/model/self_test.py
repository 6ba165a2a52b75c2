"""Self-test: does a model follow the mask and the positions of a tree?

The logits after every node of a tree, from one forward pass with a cache, are compared with those of ordinary forward
passes over the same path without one, on a short random sequence. Forward passes of several sizes show whether the
logits after a token depend on how many tokens are read with it. Families that were compared when this library was made
need no self-test. Others, and quantized models, are tested once per machine. Cost: fourteen short forward passes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .._util.versions import installed
from ..trees import shapes
from ..trees.draft import Draft
from ..trees.templates import parse_paths
from .compat import attention_name
from .foreign import foreign_code, listed
from .info import MASKED_ATTENTION, ModelInfo, UnsupportedModelError, depends_on_rows, model_info
from .kv_cache import take_over
from .prefill import cross_border, prefill
from .recurrence import bytes_of_states, recurrent_layers
from .remembered import Kept, file_of, kept_of, machine, read, write
from .target import Target

_SMALL = parse_paths("0 1 00 01 10 010").parents
_LENGTH, _LONGEST = 24, 512
_ROWS = (2, 7, 16, 33)
"""Rows of forward passes: kernels differ with them, from one row to two at the latest."""
_SELF_TEST = "self-test"
_PATIENCE = 1.0
"""Seconds that are not worth a message."""

logger = logging.getLogger("token_recycling")


def ready(model: PreTrainedModel, known: Target | None = None) -> Target:
    """The model, ready to read trees: `known`, if nothing has changed since. Raises UnsupportedModelError where trees
    are not exact.
    """
    if known is not None and known.is_current():
        return known
    made = Target(model)
    reason = _found_out(made.kept, model, made.info)
    if reason is not None:
        raise UnsupportedModelError(reason)
    wanted, used = attention_name(made.config), made.info.attention
    if wanted not in MASKED_ATTENTION:
        made.kept.say_once(
            f"{wanted} takes no tree mask: accelerated calls use {used}; all others, and the model after them, "
            f"keep {wanted}"
        )
    return made


def unsupported(model: PreTrainedModel) -> str | None:
    """Why a tree cannot be verified with this model, or None if it can. A model of an unknown family is tested once, on
    a short sequence.
    """
    known = model_info(model)
    return known.reason if not known.supported else _found_out(kept_of(model), model, known)


def _found_out(kept: Kept, model: PreTrainedModel, known: ModelInfo) -> str | None:
    """Return why the self-test refuses a supported model, or None; families tested before need none."""
    made = kept.recall(_SELF_TEST)
    if made is not None and made.reason is not None and made.code is not kept.code:
        kept.forget(_SELF_TEST)  # what failed with a hook may pass without it
        made = None
    if made is None:
        if known.tested and not known.quantised:
            return None
        made = kept.get(_SELF_TEST, lambda: replace(_kept_verdict(model, known), code=kept.code))
    if made.reason is None:
        return None
    foreign = foreign_code(model)
    return made.reason if not foreign else f"{made.reason}; it runs {listed(foreign)}"


def tested(model: PreTrainedModel, known: ModelInfo) -> ModelInfo:
    """`known` of a supported model, completed by a self-test made now, which counts for later calls; never raises for a
    model.
    """
    kept = kept_of(model)
    kept.forget(_SELF_TEST)
    made = kept.get(_SELF_TEST, lambda: replace(_verdict(model, known), code=kept.code))
    return replace(known, reason=made.reason, difference=made.difference, notes=(*known.notes, *made.notes))


@dataclass(frozen=True)
class _Verdict:
    """Result of a self-test."""

    reason: str | None
    difference: float | None = None
    notes: tuple[str, ...] = ()
    code: Any = None
    """The code that ran in the model (`Kept.code`)."""


def _kept_verdict(model: PreTrainedModel, known: ModelInfo) -> _Verdict:
    """The verdict of this process or of an earlier one. A failure is not kept: other weights may pass."""
    setting = None if known.quantised else _setting(model, known)
    path = None if setting is None else file_of("self-tests", setting)
    if path is not None and read(path, lambda held: held["setting"], None) == setting:
        return _Verdict(None)
    found = _verdict(model, known)
    if path is not None and found.reason is None:
        write(path, {"setting": setting, "difference": found.difference})
    return found


def _setting(model: PreTrainedModel, known: ModelInfo) -> dict[str, str] | None:
    """Return what the verdict depends on: sources and settings of all parts; None where a part has no file."""
    files = {getattr(sys.modules.get(type(part).__module__), "__file__", None) for part in model.modules()}
    sources = [Path(file).read_bytes() for file in sorted(filter(None, files))]
    if None in files:
        return None
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "shape": known.shape,
        "attention": f"{attention_name(model.config)} {known.attention}",
        "dtype": str(model.dtype),
        "machine": machine(known.device or torch.device("meta")),
        "sources": hashlib.sha256(b"".join(sources)).hexdigest()[:16],
        "versions": " ".join(str(installed(name)) for name in ("torch", "transformers", "token-recycling")),
    }


def _verdict(model: PreTrainedModel, known: ModelInfo) -> _Verdict:
    length, began = _LENGTH, time.perf_counter()
    notes: tuple[str, ...] = ()
    windows = [reach.size for reach in known.layers.values() if reach.kind != "full"]
    if windows and max(windows) < _LONGEST:
        length += max(windows)
    elif windows:
        notes = (f"the self-test's {length} tokens do not cross the window of {max(windows)}",)
    while length > 1 and not known.fits(length - 1, len(_SMALL)):
        length -= 1
    try:
        target = Target(model)
        text = random_text(target, length)
        if known.recurrent:
            prefill(target, [text], cache := target.new_cache())
            size = bytes_of_states(recurrent_layers(cache)) / 1e6
            notes = (*notes, f"every node of a draft keeps a copy of the recurrent states, {size:.1f} MB")
        trees, scale = largest_difference(target, text, _SMALL if known.branches else shapes.branch(1 + len(_SMALL)))
        left = 2 * (time.perf_counter() - began)
        if left > _PATIENCE:
            logger.warning("trying whether %s follows tree masks, once on this machine (about %d s)", known.model, left)
        plain, behind = by_rows(target, random_text(target, max(_ROWS))), by_rows(target, text, behind_cache=True)
    except Exception as error:  # a model of an unknown kind can fail in any way
        return _Verdict(f"a forward pass over a tree raised {type(error).__name__}: {error}", notes=notes)
    difference = max(trees, plain, behind)
    tolerance = scale * (1e-3 if target.dtype == torch.float32 else 0.2)
    reason = None
    if not scale > 0:
        reason = f"all logits of {known.model} are equal, so that the self-test is meaningless; load its weights"
    elif not plain <= tolerance or (known.quantised and not difference <= tolerance):
        reason = (
            f"{depends_on_rows(known.model)} by {max(plain, behind):.1e}, where rounding explains {tolerance:.1e}: "
            "activations that are quantised as it runs share one scale or are rounded coarsely; quantise weights alone"
        )
    elif not difference <= tolerance:
        reason = (
            f"logits of a tree differ from linear decoding by {difference:.1e}, tolerance {tolerance:.1e}: "
            f"{known.model} does not follow the mask or the positions it is given"
        )
    return _Verdict(reason, difference, notes)


def random_text(target: Target, length: int, seed: int = 0) -> torch.Tensor:
    """(length,) random ids on the target's device."""
    drawn = torch.randint(0, target.embedded, (length,), generator=torch.Generator().manual_seed(seed))
    return drawn.to(target.device)


@torch.no_grad()
def largest_difference(target: Target, text: torch.Tensor, parents: np.ndarray, seed: int = 1) -> tuple[float, float]:
    """The largest difference between a tree's logits and those of passes over the sequence up to each leaf, leaves of
    one depth together, and the standard deviation of the latter.

    `text` (length,) ends with the root; the other nodes are random.
    """
    tokens = torch.cat([text[-1:], random_text(target, len(parents) - 1, seed)])
    cache = target.new_cache()
    prefill(target, [text], cache)
    length = len(text) - 1
    cross_border(target, [text], cache)
    ours = target.forward(target.inputs.of([Draft(tokens, parents)], [length], length), cache)[0]
    wanted = torch.empty_like(ours)
    paths = [path for path, below in zip(shapes.lineages(parents), shapes.children(parents), strict=True) if not below]
    for nodes in sorted(set(map(len, paths))):
        alike = torch.tensor([path for path in paths if len(path) == nodes], device=target.device)
        before = text[:-1].expand(len(alike), -1)
        if target.info.recurrent:
            wanted[alike] = _one_by_one(target, before, tokens[alike])
        else:
            ids = torch.cat([before, tokens[alike]], dim=1)
            wanted[alike] = target.eager(input_ids=ids, use_cache=False, **_counted(target, ids)).logits[:, -nodes:]
    return float((ours - wanted).abs().max()), float(wanted.float().std())


def _one_by_one(target: Target, texts: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits (batch, n, vocabulary) after the tokens `following` (batch, n) sequences, read as `generate` reads them:
    some recurrent layers read several tokens at once in another way, which is more than rounding apart.
    """
    cache = target.new_cache()
    take_over(cache)
    target.read(texts, cache, last=1)
    return torch.cat([target.read(tokens, cache) for tokens in following.split(1, dim=1)], dim=1)


def _counted(target: Target, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions as `generate` counts them, where it does: left to itself a model may begin elsewhere than at 0."""
    if "position_ids" not in target.info.arguments:
        return {}
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)}


@torch.no_grad()
def by_rows(target: Target, text: torch.Tensor, behind_cache: bool = False) -> float:
    """The largest difference between the logits after a token that is read alone, and with others that it does not see:
    the first of `text` (length,) in passes over its beginning, or the last behind a cache of the others, as the root of
    trees.
    """
    length, found = len(text) - 1 if behind_cache else 0, []
    for rows in (1, *_ROWS):
        if not target.info.fits(length, rows) or length + rows > (target.max_length or math.inf):
            continue
        if behind_cache:
            cache = target.new_cache()
            prefill(target, [text], cache)
            parents = shapes.star(rows) if target.info.branches else shapes.branch(rows)
            draft = Draft(torch.cat([text[-1:], random_text(target, rows - 1)]), parents)
            logits = target.forward(target.inputs.of([draft], [length], length), cache)
        else:
            logits = target.eager(input_ids=text[None, :rows], use_cache=False).logits
        found.append(logits[0, 0])
    return max(float((logits - found[0]).abs().max()) for logits in found)
