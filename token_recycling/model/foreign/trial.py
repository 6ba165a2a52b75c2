"""Trials of foreign code: does a model with plain code (`plain`) or adapters give the same logits for trees as for
text?

The reference is transformers' own `generate` on the same model, forced along the paths of a small tree. Its logits are
compared with those of our passes: over the prompt, over a branching tree, over other numbers of nodes, distinct and
equal, and after longer prompts, for a batch of the call's size. Numbers that the code names are tried as token ids, as
numbers of rows and as lengths, which the nodes of a tree reach and its root does not. Code that uses random numbers,
writes to a tensor of its own or carries data from step to step is refused. Cost: about thirty forward passes per form
of the code, and up to twelve for each number that it names.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..._util.device import outside_inference_mode
from ...trees.draft import Draft, branch, star
from ...trees.templates import parse_paths
from ..compat import LOOP, plain_loop
from ..parts import own_class, parts_of, registered_attention
from ..runner import first_pass
from ..self_test import clamped, leaf_paths, random_tokens, spread, tree_logits, unmasked
from ..target import Target
from .decisions import decides_by_numbers, distant_rows_change_others, large_rows_change_others
from .plain import Gists, Reachable, form_of, numbers_in, reachable
from .search import Foreign, listed

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

_PATIENCE = 1.0
"""Seconds above which the time of a trial is logged."""

_TREE = parse_paths("0 1 00").parents
_LENGTH = 12
_PADDING = 3
"""Padding tokens before the prompts of a trial for padded calls."""
_ROWS = (1, 5, 33)
_OTHERS = 10
"""Nodes of a tree of which some are made large; with the root, not a usual number of heads."""
_LONG = 128
"""Length of a prompt that exceeds most thresholds, whatever numbers the code names."""
_MOST_ROWS = 512
"""Upper limit of the numbers in the code that are tried as a number of rows or a prompt length."""
_MOST_NUMBERS = 8
_TOLERANCE = {4: 2e-4, 8: 2e-4}
"""Largest difference explained by rounding, in standard deviations of the logits, by bytes of a number."""
_TOLERANCE_16_BITS = 0.05
"""The same in 16 bits, for the root mean square of the differences."""
_LARGEST_16_BITS = 0.5
"""The same in 16 bits, for the largest difference: that of one biased token hardly adds to a mean."""
_MOST_TRIALS = 64
"""Results kept per model."""


def why_not(target: Target, foreign: Sequence[Foreign], batch: int, padded: bool) -> str | None:
    """Return why foreign code in a model, or an object that it reaches, prevents accelerating a call with `batch`
    sequences, `padded` or not, or None. Plain code and adapters are tried once per form; other code is refused.
    """
    searched = reachable(target.model, foreign)
    for reach in searched:
        if reach.reason is not None:
            return f"{reach.description}: {reach.reason}; only stateless code in a model is accelerated"
    # Accelerated calls replace attention registered by name, and must give the same results. Numbers of classes may be
    # sizes of weights.
    registered = {id(code) for _, code in registered_attention(target.model)}
    sizes = {size for weight in target.model.parameters() for size in weight.shape} if searched else ()
    for reach in searched:
        whole = reach.is_class or id(reach.code) in registered
        for number in numbers_in([reach], of_modules=whole):
            if reach.is_class and number in sizes:
                continue
            if _MOST_ROWS <= number < (target.max_length or math.inf):
                return f"{reach.description}: it names {number}, on which it may branch beyond the tokens of a trial"
    what = batch, padded
    return _tried(target, foreign, searched, what, lambda: try_out(target, foreign, searched, *what))


def mixes_sequences(target: Target, foreign: Sequence[Foreign]) -> bool:
    """Return whether foreign code may read across the sequences of a batch; tried once per form of the code."""
    searched = reachable(target.model, foreign)
    if any(reach.reason is not None for reach in searched):
        return True

    def look() -> bool:
        try:
            return not _rows_are_independent(target, searched)
        except Exception:  # foreign code can fail in any way, as with one entry per sequence
            return True

    return _tried(target, foreign, searched, "batch", look)


def _tried(
    target: Target, foreign: Sequence[Foreign], searched: Sequence[Reachable], what: Hashable, trial: Callable[[], T]
) -> T:
    """Return the cached result of a trial of the same code, or run the trial."""
    facts = target.facts
    results: dict[Hashable, T] = facts.get("trials", dict, of="form")
    training = tuple(part.training for part in parts_of(target.model))
    packed = target.prepacked and tuple(layer.least for layer in target.prepacked.layers)  # bypass replaced functions
    form = what, target.dtype, training, packed, _form(target, foreign, searched)
    if form not in results:
        with facts.lock:  # one thread runs the trial; others that use the model wait
            if form not in results:
                if len(results) >= _MOST_TRIALS:
                    results.clear()
                with target.turns()():
                    results[form] = outside_inference_mode(trial)()
    return results[form]


def values_of(target: Target, foreign: Sequence[Foreign]) -> Hashable:
    """Return a value that equals later ones while foreign code reads the same values."""
    return _form(target, foreign, reachable(target.model, foreign))


def _form(target: Target, foreign: Sequence[Foreign], searched: Sequence[Reachable]) -> Hashable:
    """Return `form_of` the code, with the gists that are cached for the model."""
    gists: Gists = target.facts.get("gists of tensors", dict, of="form")
    return form_of(foreign, searched, gists)


def try_out(
    target: Target, foreign: Sequence[Foreign], searched: Sequence[Reachable], batch: int, padded: bool
) -> str | None:
    """Return why a model with plain code or adapters cannot be accelerated for calls such as those of `why_not`, or
    None. Tensors that the code writes to, and random states, are restored.
    """
    began = time.perf_counter()
    devices = {parameter.device for parameter in target.model.parameters() if parameter.device.type == "cuda"}
    copies = [(tensor, tensor.detach().clone()) for reach in searched for tensor in reach.tensors]
    try:
        with torch.random.fork_rng(devices=devices):
            before = _random_states(devices)
            difference = _difference(target, foreign, searched, batch, padded)
            draws = not all(map(torch.equal, before, _random_states(devices)))
        if difference is None and draws:
            difference = "it uses random numbers in every forward pass"
        if any(not torch.equal(tensor, copied) for tensor, copied in copies):
            difference = "it writes to a tensor that it reads in every forward pass"
    except _CarriedError as error:
        difference = str(error)
    except Exception as error:  # foreign code can fail in any way
        difference = f"a forward pass over a tree raised {type(error).__name__}: {error}"
    finally:
        with torch.no_grad():
            for tensor, copied in copies:
                if not torch.equal(tensor, copied):
                    tensor.copy_(copied)
        if time.perf_counter() - began > _PATIENCE:
            logger.warning("checked whether %s treats rows alike: %.1f s", listed(foreign), time.perf_counter() - began)
    return None if difference is None else f"{listed(foreign)}: {difference}"


def _random_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


# Comparison


class _CarriedError(Exception):
    """Code carries data of its own in the arguments of a call, which accelerated calls drop."""


class _Forced(LogitsProcessor):
    """Forces `generate` to emit the given tokens (batch, n)."""

    def __init__(self, tokens: torch.Tensor, prompt_length: int) -> None:
        self._tokens, self._prompt_length = tokens, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        forced = self._tokens[:, input_ids.shape[1] - self._prompt_length].to(scores.device)
        result = torch.full_like(scores, float("-inf"))
        return result.scatter_(1, forced[:, None], 0.0)


@torch.no_grad()
def _difference(
    target: Target, foreign: Sequence[Foreign], searched: Sequence[Reachable], batch: int, padded: bool
) -> str | None:
    """Return how logits of trees differ from those of `generate`, or None if rounding explains it."""
    texts, tokens = _texts(target, numbers_in(searched), batch)
    parents = _TREE if target.info.branches else branch(len(_TREE))
    tokens = tokens[: len(parents) - 1]
    paths = [path for alike in leaf_paths(parents).values() for path in alike]

    def plain(path: Sequence[int], padding: int = 0) -> torch.Tensor:
        """Return logits (batch, nodes, vocabulary) after the nodes of a path of the tree."""
        return _generated(target, texts, tokens[[node - 1 for node in path[1:]]].expand(batch, -1), padding)

    wanted: dict[int, torch.Tensor] = {}
    for path in paths:
        logits = plain(path)
        wanted |= {node: logits[:, step] for step, node in enumerate(path)}
    scale = spread(torch.stack([*wanted.values()]))

    def off(logits: torch.Tensor, expected: torch.Tensor) -> float | None:
        return _beyond_rounding(target, logits, expected, scale)

    if not float(scale) > 0:
        return "all logits are equal, so a trial is meaningless"
    if searched and (name := decides_by_numbers(target, searched, texts, parents, tokens)):
        return f"{name} branches for all rows of a pass on a number that it computes; use torch.where"
    what = "logits differ by {:.1e} standard deviations "
    for turn in ("", "in a second pass "):
        logits = tree_logits(target, texts, parents, tokens)
        if logits.shape[1] != len(parents):
            return f"out of {len(parents)} tokens, the model returns the logits of {logits.shape[1]}"
        if logits.shape[2] > target.vocab_size:
            return f"the model returns {logits.shape[2]} logits for a vocabulary of {target.vocab_size}"
        for node, expected in wanted.items():
            if size := off(logits[:, node], expected):
                return what.format(size) + f"{turn}between a tree and single tokens"
        again = plain(paths[-1])
        for step, node in enumerate(paths[-1]):
            if size := off(again[:, step], wanted[node]):
                return what.format(size) + "between equal calls of generate"
    if padded and (size := off(plain(paths[-1], _PADDING), torch.stack([wanted[node] for node in paths[-1]], dim=1))):
        return what.format(size) + "after padding"
    own = [piece for piece in foreign if not piece.is_known]
    if target.info.fits(texts.shape[1] - 1, 1 + _OTHERS):
        large = large_rows_change_others(target, own, texts, random_tokens(target, _OTHERS, 4))
        if large is not None and (size := off(*large)):
            return what.format(size) + "where other nodes are large or zero"
        distant = distant_rows_change_others(target, texts, random_tokens(target, _OTHERS, 4))
        if distant is not None and (size := off(*distant)):
            return what.format(size) + "where other nodes are at distant positions"
    for logits, expected, where in _further_passes(target, searched, texts, tokens, parents, wanted):
        if size := off(logits, expected):
            return what.format(size) + where
    return None


def _further_passes(
    target: Target,
    searched: Sequence[Reachable],
    texts: torch.Tensor,
    tokens: torch.Tensor,
    parents: np.ndarray,
    wanted: dict[int, torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Yield logits of passes other than the one over the tree `parents`, their expected values, and a description of
    the case for the message if they differ; see `_difference`.
    """
    if len(texts) > 1:
        others = torch.cat([texts[:1], texts[1:].flip(1)])
        logits, expected = (tree_logits(target, batch, parents, tokens)[0] for batch in (others, texts))
        yield logits, expected, "by the other sequences of a batch"
    elif not target.info.recurrent and target.info.length_threshold is None:
        draft = Draft(torch.cat([texts[0, -1:], tokens]), parents)
        logits = first_pass(target, texts[0], draft, target.new_cache())
        for node, expected in wanted.items():
            yield logits[:, node], expected, "where a draft is read with the prompt"
    longest = (target.max_length or _MOST_ROWS + _LENGTH) - len(parents)
    numbers = [number for number in numbers_in(searched) if number < min(_MOST_ROWS, longest)]
    for rows in (*_ROWS, *[number + 2 for number in numbers if number + 2 > _ROWS[-1]][:_MOST_NUMBERS]):
        if target.info.fits(texts.shape[1] - 1, rows):
            for logits, expected in _passes_over(target, texts, tokens[:1], rows, wanted):
                yield logits, expected, f"between passes of {rows} and of single tokens"
    beyond = [max(number + _LENGTH, min(2 * number, _MOST_ROWS)) for number in numbers if number >= _LENGTH]
    # Prompts of exactly the named length and one more: the prompt is read in parts, and the tree's nodes are beyond it.
    at = [number + more for number in numbers[:_MOST_NUMBERS] for more in (0, 1)]
    lengths = (_LONG, *beyond[:_MOST_NUMBERS], *at)
    cases = [
        (random_tokens(target, length, 3), tokens[:1], f"after a prompt of {length} tokens")
        for length in dict.fromkeys(min(length, longest) for length in lengths)
    ]
    some = random_tokens(target, 3, 5)
    repeating = some[[2, 2, 0, 1, 0, 1, 2, 2]], some.repeat(3)  # for code that compares tokens
    cases += [(text, text[:1], "after a prompt that repeats itself") for text in repeating]
    for text, child, where in cases if searched else ():
        if target.info.fits(len(text) - 1, len(parents)):
            expected = _generated(target, text[None], child[None])
            logits = tree_logits(target, text[None], parents, torch.cat([child, tokens[1:]]))[:, :2]
            yield logits, expected, where


def _passes_over(
    target: Target, texts: torch.Tensor, child: torch.Tensor, rows: int, wanted: dict[int, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits of nodes in passes over `rows` nodes for each of the prompts (batch, length), and their expected
    logits: of the root, and of `child` (1,) below it. First the children are distinct, except the first and the last.
    Then all are equal, so that they compete for anything that a pass divides among its rows.
    """
    distinct = torch.cat([child, random_tokens(target, rows, 2)])[: rows - 1]
    if not target.info.branches:
        logits = tree_logits(target, texts, branch(rows), distinct)
        yield logits[:, :2], torch.stack([wanted[0], wanted[1]], dim=1)[:, :rows]
        return
    distinct[-1:] = child
    for nodes in (distinct, child.expand(rows - 1)):
        logits = tree_logits(target, texts, star(rows), nodes)
        yield logits[:, 0], wanted[0]
        if rows > 1:
            equal = 1 + (nodes == child).nonzero().flatten()
            yield logits[:, equal], wanted[1][:, None].expand(-1, len(equal), -1)


def _beyond_rounding(target: Target, logits: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float | None:
    """Return the difference in units of `scale` if rounding does not explain it, else None."""
    difference = (clamped(logits) - clamped(expected).to(logits.device)) / scale.to(logits.device)
    largest, tolerance = float(difference.abs().max()), _TOLERANCE.get(target.dtype.itemsize)
    if tolerance is not None:
        return None if largest <= tolerance else largest
    mean = float((difference.pow(2).sum() / unmasked(expected).numel()).sqrt())
    return None if mean <= _TOLERANCE_16_BITS and largest <= _LARGEST_16_BITS else largest


@torch.no_grad()
def _rows_are_independent(target: Target, searched: Sequence[Reachable]) -> bool:
    """Return whether the sequences of a batch have the logits that each has alone."""
    texts, tokens = _texts(target, numbers_in(searched), 3)
    parents = _TREE if target.info.branches else branch(len(_TREE))
    together = tree_logits(target, texts, parents, tokens)
    alone = torch.cat([tree_logits(target, text[None], parents, tokens) for text in texts])
    return _beyond_rounding(target, together, alone, spread(alone)) is None


def _texts(target: Target, numbers: Sequence[int], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts (batch, length) and tokens (n,) of the tree: random, except `numbers` that are token ids."""
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


def _generated(target: Target, texts: torch.Tensor, forced: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Return logits (batch, n + 1, vocabulary) of `generate` after prompts (batch, length), left-padded by `padding`
    tokens, and after each of the tokens `forced` (batch, n). Processors and criteria of the model are left out: the
    loop applies them as `generate` does.
    """
    steps = forced.shape[1] + 1
    masked = {"attention_mask": functional.pad(torch.ones_like(texts), (padding, 0))} if padding else {}
    texts = functional.pad(texts, (padding, 0))
    processors = LogitsProcessorList([_Forced(torch.cat([forced, texts[:, -1:]], dim=1), texts.shape[1])])
    criteria = StoppingCriteriaList([MaxLengthCriteria(texts.shape[1] + steps)])

    def sample(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        prepared |= {"logits_processor": processors, "stopping_criteria": criteria}
        return plain_loop()(model, input_ids, **prepared)

    view, plain = copy.copy(target.eager), own_class(target.eager)
    view.__class__ = type(plain.__name__, (plain,), {LOOP: sample, "__module__": plain.__module__})
    view.generation_config = GenerationConfig()
    prepare, given = view.prepare_inputs_for_generation, []

    @functools.wraps(prepare)
    def preparing(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs.keys())
        return prepare(*args, **kwargs)

    vars(view)["prepare_inputs_for_generation"] = preparing
    output = GenerationMixin.generate(
        view,
        texts,
        **masked,
        generation_config=GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    if carried := {name for keys in given[1:] for name in keys - given[0]} - {target.cache_argument}:
        raise _CarriedError(f"it carries {min(carried)} from step to step")
    return torch.stack(output.logits, dim=1)
