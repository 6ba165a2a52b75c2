"""Trials: does a model read a tree as it reads the tree's paths?

`verdict` tries a model of a family that was not compared when this library was made, or with quantized weights. The
logits after every node of a tree, from one forward pass with a cache, are compared with those of ordinary forward
passes over the same path without one, on a short random sequence. Forward passes of several sizes show whether the
logits after a token depend on how many tokens are read with it. Cost: fourteen short forward passes.

`why_not` tries plain code (`foreign.plain`) and adapters. The reference is transformers' own `generate` on the
same model, forced along the paths of a small tree. Its logits are compared with those of our passes: over the
prompt, over a branching tree, and over other numbers of nodes, for a batch of as many sequences as the call has. The
texts contain numbers that the code names, as ids of tokens and as numbers of rows. Code that draws random numbers or
writes to a tensor of its own is refused. Cost: some twenty short forward passes for each form of the code.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from .._util.device import lasting
from ..trees.draft import Draft, Tree, branch, star
from ..trees.templates import parse_paths
from .compat import LOOP, plain_loop
from .foreign import Foreign, listed
from .foreign.plain import Numbers, Reach, form_of, numbers_in
from .info import ModelInfo, depends_on_rows
from .parts import own_class
from .prefill import cross_border, first_pass, prefill
from .target import Target

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

_PATIENCE = 1.0
"""Seconds that are not worth a message."""

_WIDE_TREE = parse_paths("0 1 00 01 10 010").parents
_TEST_LENGTH, _LONGEST_WINDOW = 24, 512
_KERNEL_ROWS = (2, 7, 16, 33)
"""Rows of forward passes: kernels differ with them, from one row to two at the latest."""

_TREE = parse_paths("0 1 00").parents
_LENGTH = 12
_ROWS = (1, 5, 33)
_MOST_ROWS = 512
"""Rows that a number in the code is tried as."""
_MOST_NUMBERS = 8
_TOLERANCE = {4: 2e-4, 8: 2e-4}
"""Difference that rounding explains, in standard deviations of the logits, by bytes of a number."""
_TOLERANCE_16_BITS = 0.05
"""The same for the root of the mean square of differences, in 16 bits."""
_MOST_TRIALS = 64
"""Results that are kept for one model."""


# Families


@dataclass(frozen=True)
class Verdict:
    """Result of a self-test."""

    reason: str | None
    difference: float | None = None
    notes: tuple[str, ...] = ()


def verdict(model: PreTrainedModel, info: ModelInfo) -> Verdict:
    """Try a model for which `info` names no reason against it; never raises for a model."""
    length, began = _TEST_LENGTH, time.perf_counter()
    notes: tuple[str, ...] = ()
    windows = [reach.size for reach in info.layers.values() if reach.kind != "full"]
    if windows and max(windows) < _LONGEST_WINDOW:
        length += max(windows)
    elif windows:
        notes = (f"the self-test's {length} tokens do not cross the window of {max(windows)}",)
    while length > 1 and not info.fits(length - 1, len(_WIDE_TREE)):
        length -= 1
    try:
        target = Target(model)
        text = random_tokens(target, length)
        cache = target.new_cache()
        if cache.states is not None:
            prefill(target, [text], cache)
            size = cache.states.nbytes / 1e6
            notes = (*notes, f"every node of a draft keeps a copy of the recurrent states, {size:.1f} MB")
        parents = _WIDE_TREE if info.branches else branch(1 + len(_WIDE_TREE))
        trees, scale = largest_difference(target, text, parents)
        left = 2 * (time.perf_counter() - began)
        if left > _PATIENCE:
            logger.warning("trying whether %s follows tree masks, once on this machine (about %d s)", info.model, left)
        plain = _differs_by_rows(target, random_tokens(target, max(_KERNEL_ROWS)))
        behind = _differs_by_rows(target, text, behind_cache=True)
    except Exception as error:  # a model of an unknown kind can fail in any way
        return Verdict(f"a forward pass over a tree raised {type(error).__name__}: {error}", notes=notes)
    difference = max(trees, plain, behind)
    tolerance = scale * (1e-3 if target.dtype == torch.float32 else 0.2)
    reason = None
    if not scale > 0:
        reason = f"all logits of {info.model} are equal, so that the self-test is meaningless; load its weights"
    elif not plain <= tolerance or (info.quantised and not difference <= tolerance):
        reason = (
            f"{depends_on_rows(info.model)} by {max(plain, behind):.1e}, where rounding explains {tolerance:.1e}: "
            "activations that are quantised as it runs share one scale or are rounded coarsely; quantise weights alone"
        )
    elif not difference <= tolerance:
        reason = (
            f"logits of a tree differ from linear decoding by {difference:.1e}, tolerance {tolerance:.1e}: "
            f"{info.model} does not follow the mask or the positions it is given"
        )
    return Verdict(reason, difference, notes)


@torch.no_grad()
def largest_difference(target: Target, text: torch.Tensor, parents: np.ndarray, seed: int = 1) -> tuple[float, float]:
    """Return the largest difference between a tree's logits and those of passes over the sequence up to each leaf,
    leaves of one depth together, and the standard deviation of the latter.

    `text` (length,) ends with the root; the other nodes are random.
    """
    tokens = torch.cat([text[-1:], random_tokens(target, len(parents) - 1, seed)])
    ours = _behind(target, text[None], parents, tokens[1:])[0]
    expected = torch.empty_like(ours)
    for leaves in _leaf_paths(parents).values():
        alike = torch.tensor(leaves, device=target.device)
        nodes = alike.shape[1]
        before = text[:-1].expand(len(alike), -1)
        if target.info.recurrent:
            expected[alike] = _one_by_one(target, before, tokens[alike])
        else:
            ids = torch.cat([before, tokens[alike]], dim=1)
            expected[alike] = target.eager(input_ids=ids, use_cache=False, **_counted(target, ids)).logits[:, -nodes:]
    return float((ours - expected).abs().max()), float(expected.float().std())


def _leaf_paths(parents: np.ndarray) -> dict[int, list[Sequence[int]]]:
    """Return the paths from the root to the leaves of a tree, by their number of nodes."""
    by_nodes: dict[int, list[Sequence[int]]] = {}
    tree = Tree(parents)
    for path, below in zip(tree.lineages, tree.children, strict=True):
        if not below:
            by_nodes.setdefault(len(path), []).append(path)
    return dict(sorted(by_nodes.items()))


def _one_by_one(target: Target, texts: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits (batch, n, vocabulary) after the tokens `following` (batch, n) sequences, read as `generate` reads them:
    some recurrent layers read several tokens at once in another way, which is more than rounding apart.
    """
    cache = target.new_cache()
    target.read(texts, cache, last=1)
    return torch.cat([target.read(tokens, cache) for tokens in following.split(1, dim=1)], dim=1)


def _counted(target: Target, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions as `generate` counts them, where it does: left to itself a model may begin elsewhere than at 0."""
    if "position_ids" not in target.arguments:
        return {}
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)}


@torch.no_grad()
def _differs_by_rows(target: Target, text: torch.Tensor, behind_cache: bool = False) -> float:
    """Return the largest difference between the logits after a token that is read alone, and with others that it does
    not see: the first of `text` (length,) in passes over its beginning, or the last behind a cache of the others, as
    the root of trees.
    """
    length, results = len(text) - 1 if behind_cache else 0, []
    for rows in (1, *_KERNEL_ROWS):
        if not target.info.fits(length, rows) or length + rows > (target.max_length or math.inf):
            continue
        if behind_cache:
            parents = star(rows) if target.info.branches else branch(rows)
            logits = _behind(target, text[None], parents, random_tokens(target, rows - 1))
        else:
            logits = target.eager(input_ids=text[None, :rows], use_cache=False).logits
        results.append(logits[0, 0])
    return max(float((logits - results[0]).abs().max()) for logits in results)


# Foreign code


def why_not(target: Target, foreign: Sequence[Foreign], searched: Sequence[Reach], batch: int) -> str | None:
    """Return why foreign code in a model, and what it reaches, prevents accelerating a call with `batch` sequences, or
    None. Plain code and adapters are tried once for each form of them; other code is left to `generate`.
    """
    for reach in searched:
        if reach.reason is not None:
            return f"{reach.description}: {reach.reason}; code in a model is accelerated only without state"
    return _tried(target, foreign, searched, batch, lambda: try_out(target, foreign, searched, batch))


def mixes_sequences(target: Target, foreign: Sequence[Foreign], searched: Sequence[Reach]) -> bool:
    """Whether foreign code may look at all sequences of a batch; tried once for each form of it."""
    if any(reach.reason is not None for reach in searched):
        return True

    def look() -> bool:
        try:
            return not _rows_are_independent(target, searched)
        except Exception:  # foreign code can fail in any way, as where it has an entry for each sequence
            return True

    return _tried(target, foreign, searched, "batch", look)


def _tried(
    target: Target, foreign: Sequence[Foreign], searched: Sequence[Reach], what: Hashable, trial: Callable[[], T]
) -> T:
    """Return the result of a trial of the same code, or make it; what it appends to lists is removed."""
    kept = target.kept
    numbers: Numbers = kept.get("numbers of tensors", dict, of="form")
    results: dict[Hashable, T] = kept.get("trials", dict, of="form")
    form = what, target.dtype, form_of(foreign, searched, numbers)
    if form not in results:
        with kept.lock, lasting():  # one thread tries it while others of the model wait
            if form not in results:
                if len(results) >= _MOST_TRIALS:
                    results.clear()
                lengths = [(notes, len(notes)) for reach in searched for notes in reach.notes]
                try:
                    results[form] = trial()
                finally:
                    for notes, length in lengths:
                        del notes[length:]
    return results[form]


def try_out(target: Target, foreign: Sequence[Foreign], searched: Sequence[Reach], batch: int) -> str | None:
    """Return why a model with plain code or adapters cannot be accelerated for calls with `batch` sequences, or None.
    Tensors that the code writes to, and random numbers, are put back.
    """
    began = time.perf_counter()
    devices = {parameter.device for parameter in target.model.parameters() if parameter.device.type == "cuda"}
    copies = [(tensor, tensor.detach().clone()) for reach in searched for tensor in reach.tensors]
    try:
        with torch.random.fork_rng(devices=devices):
            before = _random_states(devices)
            difference = _difference(target, searched, batch)
            draws = not all(map(torch.equal, before, _random_states(devices)))
        if difference is None and draws:
            difference = "it uses random numbers, one more with every forward pass"
        if any(not torch.equal(tensor, copied) for tensor, copied in copies):
            difference = "it writes to a tensor that it reads in every forward pass"
    except Exception as error:  # foreign code can fail in any way
        difference = f"a forward pass over a tree raised {type(error).__name__}: {error}"
    finally:
        with torch.no_grad():
            for tensor, copied in copies:
                if not torch.equal(tensor, copied):
                    tensor.copy_(copied)
        if time.perf_counter() - began > _PATIENCE:
            logger.warning("tried whether %s treats rows alike: %.1f s", listed(foreign), time.perf_counter() - began)
    return None if difference is None else f"{listed(foreign)}: {difference}"


def _random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


# Comparison


class _Forced(LogitsProcessor):
    """Lets `generate` emit given tokens (batch, n)."""

    def __init__(self, tokens: torch.Tensor, prompt_length: int) -> None:
        self._tokens, self._prompt_length = tokens, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        forced = self._tokens[:, input_ids.shape[1] - self._prompt_length].to(scores.device)
        result = torch.full_like(scores, float("-inf"))
        return result.scatter_(1, forced[:, None], 0.0)


@torch.no_grad()
def _difference(target: Target, searched: Sequence[Reach], batch: int) -> str | None:
    """Return how logits of trees differ from those of `generate`, or None if rounding explains it."""
    numbers = numbers_in(searched)
    texts, tokens = _texts(target, numbers, batch)
    parents = _TREE if target.info.branches else branch(len(_TREE))
    tokens = tokens[: len(parents) - 1]
    paths = [path for alike in _leaf_paths(parents).values() for path in alike]

    def plain(path: Sequence[int]) -> torch.Tensor:
        """Logits (batch, nodes, vocabulary) after the nodes of a path of the tree."""
        return _generated(target, texts, tokens[[node - 1 for node in path[1:]]].expand(batch, -1))

    wanted: dict[int, torch.Tensor] = {}
    for path in paths:
        logits = plain(path)
        wanted |= {node: logits[:, step] for step, node in enumerate(path)}
    scale = torch.stack([*wanted.values()]).float().std()

    def off(logits: torch.Tensor, expected: torch.Tensor) -> float | None:
        return _beyond_rounding(target, logits, expected, scale)

    if not float(scale) > 0:
        return "all logits are equal, so that a trial is meaningless"
    what = "logits differ by {:.1e} standard deviations "
    for turn in ("", "in a second pass "):
        logits = _behind(target, texts, parents, tokens)
        if logits.shape[1] != len(parents):
            return f"of {len(parents)} tokens the model returns the logits of {logits.shape[1]}"
        for node, expected in wanted.items():
            if size := off(logits[:, node], expected):
                return what.format(size) + f"{turn}between a tree and single tokens"
        again = plain(paths[-1])
        for step, node in enumerate(paths[-1]):
            if size := off(again[:, step], wanted[node]):
                return what.format(size) + "between equal calls of generate"
    if batch > 1:
        others = torch.cat([texts[:1], texts[1:].flip(1)])
        if size := off(_behind(target, others, parents, tokens)[0], _behind(target, texts, parents, tokens)[0]):
            return what.format(size) + "by the other sequences of a batch"
    if batch == 1 and not target.info.recurrent and target.info.border is None:
        logits = first_pass(target, texts[0], Draft(torch.cat([texts[0, -1:], tokens]), parents), target.new_cache())
        for node, expected in wanted.items():
            if size := off(logits[:, node], expected):
                return what.format(size) + "where a draft is read with the prompt"
    longest = target.max_length or _MOST_ROWS + _LENGTH
    more = [count + 1 for count in numbers if _ROWS[-1] <= count < min(_MOST_ROWS, longest - _LENGTH)]
    child = tokens[:1]
    for rows in (*_ROWS, *more[:_MOST_NUMBERS]):
        if not target.info.fits(texts.shape[1] - 1, rows):
            continue
        shape = star(rows) if target.info.branches else branch(rows)
        nodes = torch.cat([child, random_tokens(target, rows, 2)])[: rows - 1]
        logits = _behind(target, texts, shape, nodes)
        if size := off(logits[:, 0], wanted[0]):
            return what.format(size) + f"between passes of {rows} and of single tokens"
        if rows > 1 and (size := off(logits[:, 1], wanted[1])):
            return what.format(size) + f"between passes of {rows} and of single tokens"
    return None


def _behind(target: Target, texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """Return logits (batch, n, vocabulary) after the n nodes of a tree whose root is the last token of each prompt
    (batch, length); `nodes` (n - 1,) are the others.
    """
    cache = target.new_cache()
    prefill(target, list(texts), cache)
    cross_border(target, list(texts), cache)
    drafts = [Draft(torch.cat([text[-1:], nodes.to(text.device)]), parents) for text in texts]
    length = texts.shape[1] - 1
    return target.forward(target.inputs.of(drafts, [length] * len(texts), length), cache)


def _beyond_rounding(target: Target, logits: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float | None:
    """Return the difference in units of `scale` if rounding does not explain it, else None."""
    difference = (logits.float() - expected.float().to(logits.device)) / scale.to(logits.device)
    tolerance = _TOLERANCE.get(target.dtype.itemsize)
    if tolerance is None:
        size, tolerance = float(difference.pow(2).mean().sqrt()), _TOLERANCE_16_BITS
    else:
        size = float(difference.abs().max())
    return None if size <= tolerance else size


@torch.no_grad()
def _rows_are_independent(target: Target, searched: Sequence[Reach]) -> bool:
    """Whether sequences of a batch have the logits that each has alone."""
    texts, tokens = _texts(target, numbers_in(searched), 3)
    parents = _TREE if target.info.branches else branch(len(_TREE))
    together = _behind(target, texts, parents, tokens)
    alone = torch.cat([_behind(target, text[None], parents, tokens) for text in texts])
    return _beyond_rounding(target, together, alone, alone.float().std()) is None


def _texts(target: Target, numbers: Sequence[int], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts (batch, length) and tokens (n,) of the tree, random but for `numbers` that are ids."""
    length = _LENGTH + len(numbers)
    while length > 4 and not target.info.fits(length - 1, len(_TREE)):
        length -= 1
    texts = torch.stack([random_tokens(target, length, row) for row in range(batch)])
    tokens = random_tokens(target, len(_TREE) - 1, batch)
    named = torch.tensor([number for number in numbers if number < target.embedded], dtype=torch.long)
    named = named[: length - 3].to(target.device)
    if len(named):
        texts[:, 1 : 1 + len(named)] = named
        tokens[-len(named) :] = named[-len(tokens) :]
    return texts, tokens


def _generated(target: Target, texts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits (batch, n + 1, vocabulary) of `generate` after prompts (batch, length) and after each of the tokens
    `forced` (batch, n). Processors and criteria of the model are left out: the loop applies them as `generate` does.
    """
    steps = forced.shape[1] + 1
    processors = LogitsProcessorList([_Forced(torch.cat([forced, texts[:, -1:]], dim=1), texts.shape[1])])
    criteria = StoppingCriteriaList([MaxLengthCriteria(texts.shape[1] + steps)])

    def sample(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        prepared |= {"logits_processor": processors, "stopping_criteria": criteria}
        return plain_loop()(model, input_ids, **prepared)

    view, plain = copy.copy(target.eager), own_class(target.eager)
    view.__class__ = type(plain.__name__, (plain,), {LOOP: sample, "__module__": plain.__module__})
    view.generation_config = GenerationConfig()
    output = GenerationMixin.generate(
        view,
        texts,
        generation_config=GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    return torch.stack(output.logits, dim=1)


def random_tokens(target: Target, count: int, seed: int = 0) -> torch.Tensor:
    """Return (count,) random ids on the target's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.embedded, (count,), generator=generator).to(target.device)
