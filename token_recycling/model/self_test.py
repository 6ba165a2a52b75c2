"""Self-test: does a model compute the same logits for a tree as for the tree's paths?

It decides about families that the tests of this library do not cover, and about quantized weights. The logits after
every node of a tree, from one forward pass with a cache, are compared with those of ordinary forward passes over the
same path without one, on a short random sequence. Forward passes of several sizes show whether the logits after a token
depend on how many tokens are read with it; so does a change of the embeddings by no more than rounding. Cost: sixteen
short forward passes, once per machine if the model passes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._util.device import machine
from .._util.files import facts_file, read_facts, write_facts
from .._util.versions import installed
from ..trees.draft import Draft, Tree, branch
from ..trees.templates import parse_paths
from .compat import attention_name
from .info import ModelInfo, depends_on_rows
from .kv_cache import TreeCache
from .prefill import cross_threshold, prefill
from .target import PassInputs, Target

logger = logging.getLogger("token_recycling")

_PATIENCE = 1.0
"""Seconds above which the time of a test is logged."""

_TREE = parse_paths("0 1 00 01 10 010").parents
_LENGTH, _LONGEST_WINDOW = 24, 512
_KERNEL_ROWS = (2, 7, 16, 33)
"""Rows of forward passes: kernels differ between them, at the latest between one row and two."""
_ROUNDING = 1e-6
"""Relative change of embeddings in float32, about the rounding error of a forward pass. Logits of the tested families
change by at most 7e-5 of their standard deviation; where layers round their input to 16 bits, by 2e-2.
"""
_MASKED = 5000.0
"""Absolute value above which a logit counts as masked, e.g. by a bias of -1e9 on the padding of a vocabulary. Masked
logits would inflate the standard deviation that differences are compared with.
"""


@dataclass(frozen=True)
class Verdict:
    """Result of a self-test."""

    reason: str | None
    difference: float | None = None
    notes: tuple[str, ...] = ()


def stored_verdict(target: Target) -> Verdict:
    """Return the verdict of this process or of an earlier one. A failure is not stored: other weights may pass."""
    setting = None if target.info.quantized else _setting(target)
    path = None if setting is None else facts_file("self-tests", setting)
    if path is not None and read_facts(path, lambda content: content["setting"], None) == setting:
        return Verdict(None)
    result = verdict(target)
    if path is not None and result.reason is None:
        write_facts(path, {"setting": setting, "difference": result.difference})
    return result


def _setting(target: Target) -> dict[str, str] | None:
    """Return the values that the verdict depends on: sources and settings of all parts; None if a part has no file."""
    model = target.model
    files = {getattr(sys.modules.get(type(part).__module__), "__file__", None) for part in model.modules()}
    sources = [Path(file).read_bytes() for file in sorted(filter(None, files))]
    if None in files:
        return None
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "shape": target.shape,
        "attention": f"{attention_name(model.config)} {target.info.attention}",
        "dtype": str(target.dtype),
        "machine": machine(target.device),
        "sources": hashlib.sha256(b"".join(sources)).hexdigest()[:16],
        "versions": " ".join(str(installed(name)) for name in ("torch", "transformers", "token-recycling")),
    }


def verdict(target: Target) -> Verdict:
    """Test a model; never raises for one."""
    info, began = target.info, time.perf_counter()
    length, notes = _tested_length(info)
    try:
        text = random_tokens(target, length)
        cache = target.new_cache()
        if cache.states is not None:
            prefill(target, [text], cache)
            size = cache.states.nbytes / 1e6
            notes += (f"every node of a draft keeps a copy of the recurrent states, {size:.1f} MB",)
        parents = _TREE if info.branches else branch(1 + len(_TREE))
        trees, scale = largest_difference(target, text, parents)
        left = 2 * (time.perf_counter() - began)
        if left > _PATIENCE:
            logger.warning("testing whether %s follows tree masks, once on this machine (about %d s)", info.name, left)
        many = random_tokens(target, max(_KERNEL_ROWS))
        plain = max(_differs_by_rows(target, many), _differs_by_rounding(target, many))
        behind = _differs_by_rows(target, text, behind_cache=True)
    except Exception as error:  # a model of an unknown kind can fail in any way
        return Verdict(f"a forward pass over a tree raised {type(error).__name__}: {error}", notes=notes)
    difference = max(trees, plain, behind)
    tolerance = scale * (1e-3 if target.dtype == torch.float32 else 0.2)
    reason = None
    if not scale > 0:
        reason = f"all logits of {info.name} are equal, so the self-test is meaningless; load its weights"
    elif not plain <= tolerance or (info.quantized and not difference <= tolerance):
        reason = (
            f"{depends_on_rows(info.name)} by {max(plain, behind):.1e}, where rounding explains {tolerance:.1e}: "
            "activations quantized at run time share one scale or are rounded coarsely; quantize only the weights"
        )
    elif not difference <= tolerance:
        reason = (
            f"logits of a tree differ from linear decoding by {difference:.1e}, tolerance {tolerance:.1e}: "
            f"{info.name} does not follow the mask or the positions it is given"
        )
    return Verdict(reason, difference, notes)


def _tested_length(info: ModelInfo) -> tuple[int, tuple[str, ...]]:
    """Return the length of the test sequence, more than short windows and less than the model's length threshold; and
    notes on its limits.
    """
    length, notes = _LENGTH, tuple[str, ...]()
    window = max((reach.size for reach in info.layers.values() if reach.kind != "full"), default=0)
    if window < _LONGEST_WINDOW:
        length += window
    else:
        notes = (f"the self-test's {length} tokens do not cross the window of {window}",)
    while length > 1 and not info.fits(length - 1, len(_TREE)):
        length -= 1
    return length, notes


@torch.no_grad()
def largest_difference(target: Target, text: torch.Tensor, parents: np.ndarray) -> tuple[float, float]:
    """Return the largest difference between a tree's logits and those of passes over the sequence up to each leaf, with
    leaves of one depth in one batch, and the standard deviation of the latter.

    `text` (length,) ends with the root; the other nodes are random.
    """
    tokens = torch.cat([text[-1:], random_tokens(target, len(parents) - 1, seed=1)])
    ours = tree_logits(target, text[None], parents, tokens[1:])[0]
    expected = torch.empty_like(ours)
    for leaves in leaf_paths(parents).values():
        alike = torch.tensor(leaves, device=target.device)
        nodes = alike.shape[1]
        before = text[:-1].expand(len(alike), -1)
        if target.info.recurrent:
            expected[alike] = _one_by_one(target, before, tokens[alike])
        else:
            ids = torch.cat([before, tokens[alike]], dim=1)
            expected[alike] = target.eager(input_ids=ids, use_cache=False, **_counted(target, ids)).logits[:, -nodes:]
    return largest_deviation(ours, expected), float(spread(expected))


def largest_deviation(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between logits, where all masked values are equal."""
    return float((clamped(logits) - clamped(expected)).abs().max())


def clamped(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in float32 with one value for all that are masked."""
    return logits.float().clamp(-_MASKED, _MASKED)


def unmasked(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits (n,) in float32 that are not masked."""
    logits = logits.float()
    return logits[logits.abs() < _MASKED]


def spread(logits: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation () of logits, estimated from their median absolute deviation: masked and other
    extreme values count little. It is not > 0 where most of the logits are equal.
    """
    own = unmasked(logits)
    return 1.4826 * (own - own.median()).abs().median()


def leaf_paths(parents: np.ndarray) -> dict[int, list[Sequence[int]]]:
    """Return the paths from the root to the leaves of a tree, by number of nodes."""
    by_nodes: dict[int, list[Sequence[int]]] = {}
    tree = Tree(parents)
    for path, below in zip(tree.lineages, tree.children, strict=True):
        if not below:
            by_nodes.setdefault(len(path), []).append(path)
    return dict(sorted(by_nodes.items()))


def _one_by_one(target: Target, texts: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return logits (batch, n, vocabulary) after the tokens `following` (batch, n) sequences, read one by one as in
    `generate`: some recurrent layers compute several tokens differently, by more than rounding.
    """
    cache = target.new_cache()
    target.read(texts, cache, last=1)
    return torch.cat([target.read(tokens, cache) for tokens in following.split(1, dim=1)], dim=1)


def _counted(target: Target, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return positions as `generate` counts them, if it does: by default a model may start elsewhere than at 0."""
    if "position_ids" not in target.arguments:
        return {}
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)}


@torch.no_grad()
def _differs_by_rows(target: Target, text: torch.Tensor, behind_cache: bool = False) -> float:
    """Return the largest difference between the logits after a token read alone and with others that it does not see:
    the first of `text` (length,) in passes over its beginning, or the last as the root of trees, after a cache of the
    others.
    """
    length, results = len(text) - 1 if behind_cache else 0, []
    for rows in (1, *_KERNEL_ROWS):
        if not target.info.fits(length, rows) or length + rows > (target.max_length or math.inf):
            continue
        if behind_cache:
            logits = tree_logits(target, text[None], branch(rows), random_tokens(target, rows - 1))
        else:
            logits = target.eager(input_ids=text[None, :rows], use_cache=False).logits
        results.append(logits[0, 0])
    return max(largest_deviation(logits, results[0]) for logits in results)


@torch.no_grad()
def _differs_by_rounding(target: Target, text: torch.Tensor) -> float:
    """Return the largest difference between the logits after the tokens of `text` (length,) when all embeddings change
    by no more than rounding; 0 unless in float32. Layers that round their input coarsely amplify such differences,
    which passes over other numbers of tokens have as well, but seldom in a few tokens.
    """
    if target.dtype != torch.float32:
        return 0.0
    generator, ids = torch.Generator().manual_seed(0), text[None, : target.max_length]

    def changed(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        return output * (1 + _ROUNDING * signs.to(output.device))

    plain = target.eager(input_ids=ids, use_cache=False).logits
    handle = target.model.get_input_embeddings().register_forward_hook(changed)
    try:
        rounded = target.eager(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return largest_deviation(rounded, plain)


def tree_logits(target: Target, texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """Return logits (batch, n, vocabulary) after the n nodes of a tree whose root is the last token of each prompt
    (batch, length); `nodes` (n - 1,) are the others.
    """
    cache, inputs = before_tree(target, texts, parents, nodes)
    return target.forward(inputs, cache)


def before_tree(
    target: Target, texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor
) -> tuple[TreeCache, PassInputs]:
    """Return a cache of the prompts without their last tokens, and the inputs of the pass of `tree_logits` after it;
    raise ValueError if the cache does not count the tokens read.
    """
    cache, length = target.new_cache(), texts.shape[1] - 1
    prefill(target, list(texts), cache)
    cross_threshold(target, list(texts), cache)
    if cache.length != length:  # such as if the first layer is skipped
        raise ValueError(f"{length} tokens were read, but the cache counts {cache.length}")
    drafts = [Draft(torch.cat([text[-1:], nodes.to(text.device)]), parents) for text in texts]
    return cache, target.inputs.of(drafts, [length] * len(texts), length)


def random_tokens(target: Target, count: int, seed: int = 0) -> torch.Tensor:
    """Return (count,) random ids on the target's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.embedded, (count,), generator=generator).to(target.device)
