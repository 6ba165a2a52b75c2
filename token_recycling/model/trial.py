"""A trial of foreign code: does a model with it still read a tree as `generate` reads its paths?

The reference is transformers' own `generate` on the same model, with hooks, adapters and overridden methods as they
are, forced along the paths of a small tree. Its logits are compared with those of our passes: over the prompt, over a
branching tree, and over other numbers of nodes, for a batch of as many sequences as the call has. The texts contain
numbers that the code names, as ids of tokens and as numbers of rows. Both sides are run twice, so that code that
decides by state of its own or by random numbers is found. The state that hooks and modules keep, and that of random
number generators, is put back afterwards. Cost: some twenty short forward passes for each form of the code.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..trees import shapes
from ..trees.draft import Draft
from ..trees.templates import parse_paths
from .fingerprint import describe
from .foreign import (
    ATTRIBUTES_OF_TORCH,
    Foreign,
    decides,
    foreign_code,
    functions_in,
    is_own_class,
    listed,
    names_in,
    numbers_in,
    observes,
    own_attributes,
    own_class,
    values_in,
    why_not_at_all,
)
from .prefill import first_pass, prefill
from .tree_model import TreeModel

logger = logging.getLogger("token_recycling")

T = TypeVar("T")

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
_DEEP = 3
"""Containers within each other whose content is put back."""
_PATIENCE = 1.0
"""Seconds that are not worth a message."""


def foreign_of(target: TreeModel) -> tuple[Foreign, ...]:
    """Return the foreign code of a model, found once for each form of it."""
    return _found(target)[1]


def _found(target: TreeModel) -> tuple[list[Any], tuple[Foreign, ...], str | None]:
    kept, code = target.kept, target.kept.code
    known = kept.recall("foreign code", values_matter=False)
    if known is None or known[0] is not code:
        kept.forget("foreign code")
        known = code, foreign_code(target.model), why_not_at_all(target.model)
        kept.get("foreign code", lambda: known, values_matter=False)
    return known


def why_not(target: TreeModel, batch: int) -> str | None:
    """Return why foreign code in a model prevents accelerating a call with `batch` sequences, or None. Code is tried
    once for each form of it.
    """
    _, foreign, reason = _found(target)
    if reason is not None or not foreign:
        return reason
    return _tried(target, foreign, batch, lambda: try_out(target, foreign, batch))


def _tried(target: TreeModel, foreign: Sequence[Foreign], what: Hashable, trial: Callable[[], T]) -> T:
    """Return the result of a trial of the same code, or make it."""
    volatile = _volatile(target)

    def key() -> Hashable:
        return "trial", what, target.dtype, tuple(_signature(piece, volatile) for piece in foreign)

    known = target.kept.recall(key(), values_matter=False)
    if known is None:
        if target.kept.count("trial") >= _MOST_TRIALS:
            target.kept.forget("trial")
        known = (trial(),)
        target.kept.get(key(), lambda: known, values_matter=False)
    result: T = known[0]
    return result


def _volatile(target: TreeModel) -> set[tuple[str, str]]:
    """Return descriptions of code, and names of its variables, that forward passes have changed: counters and logs."""
    return target.kept.get("volatile", set, values_matter=False)


def _signature(piece: Foreign, volatile: Collection[tuple[str, str]]) -> Hashable:
    """Return something equal for code that does the same, whatever it counts in its `volatile` variables. The tensors
    and objects that it holds count where it may decide by them: another steering vector is no other code.
    """
    things: list[Any] = []
    values: list[Any] = []
    held = dict(values_in(piece.code))
    if piece.module is not None and not is_own_class(own_class(piece.module)):
        held |= own_attributes(piece.module)
        values.append(piece.module.training)
    whole = decides(piece)
    for name, value in held.items():
        if (piece.what, name) not in volatile and (whole or isinstance(value, _PLAIN[:-1])):
            values.append(name)
            describe(value, values, things)
    code = tuple(function.__code__ for function in functions_in(piece.code))
    return piece.what, code, tuple(values), tuple(map(id, things))


def mixes_sequences(target: TreeModel) -> bool:
    """Whether foreign code in a model may look at all sequences of a batch, so that none may join or leave it."""
    foreign = foreign_of(target)
    if not foreign:
        return False

    def look() -> bool:
        try:
            with _undone(target, foreign):
                return not _rows_are_independent(target, foreign)
        except Exception:  # foreign code can fail in any way, as where it has an entry for each sequence
            return True

    return _tried(target, foreign, "batch", look)


def try_out(target: TreeModel, foreign: Sequence[Foreign], batch: int) -> str | None:
    """Return why a model with foreign code cannot be accelerated for calls with `batch` sequences, or None."""
    if not foreign:
        return None
    began = time.perf_counter()
    try:
        with _undone(target, foreign) as changes:
            difference = _difference(target, foreign, batch)
            stateful = changes()
    except Exception as error:  # foreign code can fail in any way
        return f"{listed(foreign)}: a forward pass over a tree raised {type(error).__name__}: {error}"
    finally:
        if time.perf_counter() - began > _PATIENCE:
            logger.warning("tried whether %s treats rows alike: %.1f s", listed(foreign), time.perf_counter() - began)
    if difference is not None:
        return f"{listed(foreign)}: {difference}"
    deciding = [piece.what for piece in stateful if decides(piece) and not observes(piece)]
    if deciding:
        return f"{', '.join(deciding)}: it keeps state from pass to pass and may decide by it"
    return None


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
def _difference(target: TreeModel, foreign: Sequence[Foreign], batch: int) -> str | None:
    """Return how logits of trees differ from those of `generate`, or None if rounding explains it."""
    numbers = numbers_in(foreign)
    texts, tokens = _texts(target, numbers, batch)
    parents = _TREE if target.info.branches else shapes.branch(len(_TREE))
    tokens = tokens[: len(parents) - 1]
    paths = [path for path, below in zip(shapes.lineages(parents), shapes.children(parents), strict=True) if not below]

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
        shape = shapes.star(rows) if target.info.branches else shapes.branch(rows)
        nodes = torch.cat([child, _random_tokens(target, rows, 2)])[: rows - 1]
        logits = _behind(target, texts, shape, nodes)
        if size := off(logits[:, 0], wanted[0]):
            return what.format(size) + f"between passes of {rows} and of single tokens"
        if rows > 1 and (size := off(logits[:, 1], wanted[1])):
            return what.format(size) + f"between passes of {rows} and of single tokens"
    return None


def _behind(target: TreeModel, texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """Logits (batch, nodes, vocabulary) after the nodes of a tree that follows prompts (batch, length)."""
    cache = target.new_cache()
    prefill(target, list(texts), cache)
    drafts = [Draft(torch.cat([text[-1:], nodes.to(text.device)]), parents) for text in texts]
    length = texts.shape[1] - 1
    return target.forward(target.inputs.of(drafts, [length] * len(texts), length), cache)


def _beyond_rounding(
    target: TreeModel, logits: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor
) -> float | None:
    """Return the difference in units of `scale` if rounding does not explain it, else None."""
    difference = (logits.float() - expected.float().to(logits.device)) / scale.to(logits.device)
    tolerance = _TOLERANCE.get(target.dtype.itemsize)
    if tolerance is None:
        size, tolerance = float(difference.pow(2).mean().sqrt()), _TOLERANCE_16_BITS
    else:
        size = float(difference.abs().max())
    return None if size <= tolerance else size


@torch.no_grad()
def _rows_are_independent(target: TreeModel, foreign: Sequence[Foreign]) -> bool:
    """Whether sequences of a batch have the logits that each has alone."""
    texts, tokens = _texts(target, numbers_in(foreign), 3)
    parents = _TREE if target.info.branches else shapes.branch(len(_TREE))
    together = _behind(target, texts, parents, tokens)
    alone = torch.cat([_behind(target, text[None], parents, tokens) for text in texts])
    return _beyond_rounding(target, together, alone, alone.float().std()) is None


def _texts(target: TreeModel, numbers: Sequence[int], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts (batch, length) and tokens (n,) of the tree, random but for `numbers` that are ids."""
    length = _LENGTH + len(numbers)
    while length > 4 and not target.info.fits(length - 1, len(_TREE)):
        length -= 1
    texts = torch.stack([_random_tokens(target, length, row) for row in range(batch)])
    tokens = _random_tokens(target, len(_TREE) - 1, batch)
    named = torch.tensor([number for number in numbers if number < target.embedded], dtype=torch.long)
    named = named[: length - 3].to(target.device)
    if len(named):
        texts[:, 1 : 1 + len(named)] = named
        tokens[-len(named) :] = named[-len(tokens) :]
    return texts, tokens


def _random_tokens(target: TreeModel, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.embedded, (count,), generator=generator).to(target.device)


def _generated(target: TreeModel, texts: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits (batch, n + 1, vocabulary) of `generate` after prompts (batch, length) and after each of the tokens
    `forced` (batch, n). Processors and criteria of the model are left out: the loop applies them as `generate` does.
    """
    steps = forced.shape[1] + 1
    processors = LogitsProcessorList([_Forced(torch.cat([forced, texts[:, -1:]], dim=1), texts.shape[1])])
    criteria = StoppingCriteriaList([MaxLengthCriteria(texts.shape[1] + steps)])

    def sample(model: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        prepared |= {"logits_processor": processors, "stopping_criteria": criteria}
        return GenerationMixin._sample(model, input_ids, **prepared)

    view, plain = copy.copy(target.eager), own_class(target.eager)
    view.__class__ = type(plain.__name__, (plain,), {"_sample": sample, "__module__": plain.__module__})
    view.generation_config = GenerationConfig()
    output = GenerationMixin.generate(
        view,
        texts,
        attention_mask=torch.ones_like(texts),
        generation_config=GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        ),
    )
    return torch.stack(output.logits, dim=1)


# State


@contextlib.contextmanager
def _undone(target: TreeModel, foreign: Sequence[Foreign]) -> Iterator[Callable[[], list[Foreign]]]:
    """Put back, after the block, what foreign code keeps and the state of random number generators. Yields a function
    that returns the code whose state has changed.
    """
    devices = {parameter.device for parameter in target.model.parameters() if parameter.device.type == "cuda"}
    host, numbers = random.getstate(), np.random.get_state()
    saved = [(piece, [*_cells_of(piece)]) for piece in foreign]
    names = [(piece, attributes, set(attributes)) for piece in foreign for attributes in _attributes_of(piece)]
    try:
        with torch.random.fork_rng(devices=devices):
            yield lambda: [piece for piece, cells in saved if any(cell.changed() for cell in cells)]
    finally:
        changed = {(piece.what, cell.name) for piece, cells in saved for cell in cells if cell.changed()}
        for piece, attributes, before in names:
            for name in attributes.keys() - before:  # made by a first pass
                changed.add((piece.what, name))
                del attributes[name]
        _volatile(target).update(changed)
        random.setstate(host)
        np.random.set_state(numbers)
        for _, cells in saved:
            for cell in cells:
                cell.restore()


class _Cell:
    """Something that foreign code can write: a cell of a closure, attributes, a global variable, a container."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.name, self._read, self._write = name, read, write
        self._value = self._read()
        self._copy = _copied(self._value)

    def changed(self) -> bool:
        value = self._read()
        return not _equal(value, self._copy if value is self._value else self._value)

    def restore(self) -> None:
        if not self.changed():
            return
        value = self._value
        if isinstance(value, (list, dict, set)):
            value.clear()
            value.extend(self._copy) if isinstance(value, list) else value.update(self._copy)
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(self._copy)
        elif _is_counter(value):
            value = self._copy
        self._write(value)


def _is_counter(value: Any) -> bool:
    return type(value).__module__ == "itertools" or isinstance(value, Iterator)


def _copied(value: Any) -> Any:
    """Return a copy of plain values, containers, tensors and iterators; other objects as they are."""
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value).__module__ == "itertools":
        return copy.copy(value)
    return value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and value.shape == other.shape
            and bool(torch.equal(value, other))
        )
    if type(value).__module__ == "itertools":
        return repr(value) == repr(other)
    if isinstance(value, (list, dict, set)) and isinstance(other, (list, dict, set)):
        return len(value) == len(other) and _same_items(value, other)
    try:
        return value is other or bool(value == other)
    except Exception:  # objects that cannot be compared
        return False


def _same_items(value: Any, other: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(value[key], other[key]) for key in value)
    if isinstance(value, set):
        return bool(value == other)
    return all(_equal(one, two) for one, two in zip(value, other, strict=True))


def _cells_of(piece: Foreign) -> Iterator[_Cell]:
    """Each thing that foreign code can write."""
    for function in functions_in(piece.code):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield _of_cell(name, cell)
                yield from _of_object(cell.cell_contents)
        for name in names_in(function.__code__):
            if name in function.__globals__:
                yield _of_item(function.__globals__, name)
                yield from _of_object(function.__globals__[name])
    if isinstance(piece.code, MethodType):
        yield from _of_object(piece.code.__self__)
    elif not isinstance(piece.code, (FunctionType, type)):
        yield from _of_object(piece.code)
    for name, value in values_in(piece.code):
        yield from _of_container(name, value)
    if piece.module is not None:
        yield from _of_object(piece.module)
        for name in piece.module._buffers:
            yield _of_item(piece.module._buffers, name)


def _attributes_of(piece: Foreign) -> Iterator[dict[str, Any]]:
    """The attributes of the objects that foreign code is or belongs to."""
    holders = [piece.module, piece.code.__self__ if isinstance(piece.code, MethodType) else piece.code]
    for holder in holders:
        if not isinstance(holder, (type, FunctionType)) and isinstance(getattr(holder, "__dict__", None), dict):
            yield holder.__dict__


def _of_container(name: str, value: Any, depth: int = 0) -> Iterator[_Cell]:
    """A list, dictionary or set, and those in it."""
    if isinstance(value, (list, dict, set)) and depth < _DEEP:
        yield _of_item({name: value}, name)
        for item in value.values() if isinstance(value, dict) else value:
            yield from _of_container(name, item, depth + 1)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _of_cell(name: str, cell: Any) -> _Cell:
    return _Cell(name, lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value))


def _of_item(items: Any, name: str) -> _Cell:
    return _Cell(name, lambda: items.get(name), lambda value: items.__setitem__(name, value))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, dict, set, tuple, torch.Tensor)


def _of_object(holder: Any) -> Iterator[_Cell]:
    """The plain attributes of an object."""
    attributes = getattr(holder, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(holder, (type, FunctionType, ModuleType)):
        return
    for name, value in list(attributes.items()):
        if name not in ATTRIBUTES_OF_TORCH and (isinstance(value, _PLAIN) or type(value).__module__ == "itertools"):
            yield _of_item(attributes, name)
