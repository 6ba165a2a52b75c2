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
import functools
import logging
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
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
from .compat import LOOP, plain_loop, times_written
from .fingerprint import describe, parts_of, place
from .foreign import (
    Foreign,
    decides,
    foreign_code,
    functions_in,
    home_of,
    is_own_class,
    listed,
    observes,
    own_attributes,
    own_class,
    why_not_at_all,
)
from .prefill import first_pass, prefill
from .reach import Reach, Variable, numbers_in, objects_in, reach_of, variables_of_modules
from .target import Target
from .undo import Restorable

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
_SMALL = 4096
"""Numbers of a tensor that are looked at in every call; of others, where torch has counted a write."""
_PATIENCE = 1.0
"""Seconds that are not worth a message."""


def foreign_of(target: Target) -> tuple[Foreign, ...]:
    """Return the foreign code of a model, found once for each form of it."""
    return _found(target)[1]


def _found(target: Target) -> tuple[list[Any], tuple[Foreign, ...], str | None]:
    kept, code = target.kept, target.kept.code
    known = kept.recall("foreign code", values_matter=False)
    if known is None or known[0] is not code:
        kept.forget("foreign code")
        known = code, foreign_code(target.model), why_not_at_all(target.model)
        kept.get("foreign code", lambda: known, values_matter=False)
    return known


def why_not(target: Target, batch: int) -> str | None:
    """Return why foreign code in a model prevents accelerating a call with `batch` sequences, or None. Code is tried
    once for each form of it.
    """
    _, foreign, reason = _found(target)
    if reason is not None or not foreign:
        return reason
    return _tried(target, foreign, batch, lambda: try_out(target, foreign, batch))


def _tried(target: Target, foreign: Sequence[Foreign], what: Hashable, trial: Callable[[], T]) -> T:
    """Return the result of a trial of the same code, or make it."""
    volatile = _volatile(target)

    def key() -> Hashable:
        known: dict[tuple[int, int], _Reached] = {}
        return "trial", what, target.dtype, tuple(_signature(target, piece, volatile, known) for piece in foreign)

    known = target.kept.recall(key(), values_matter=False)
    if known is None:
        if target.kept.count("trial") >= _MOST_TRIALS:
            target.kept.forget("trial")
        known = (trial(),)
        target.kept.get(key(), lambda: known, values_matter=False)
    result: T = known[0]
    return result


def _volatile(target: Target) -> set[tuple[str, str]]:
    """Return descriptions of code, and names of its variables, that forward passes have changed: counters and logs."""
    return target.kept.get("volatile", set, values_matter=False)


def _signature(
    target: Target, piece: Foreign, volatile: Collection[tuple[str, str]], known: dict[tuple[int, int], _Reached]
) -> Hashable:
    """Return something equal for code that does the same, whatever it counts in its `volatile` variables. The tensors
    and objects that it reaches count where it may decide by them: another steering vector is no other code, unless all
    of its numbers are the same, such as 0.
    """
    reached = _reached(target, piece, known)
    values, things = reached.described({name for _, name in volatile})
    if piece.module is not None and not is_own_class(own_class(piece.module)):
        values, things = [*values, piece.module.training], [*things]
        attributes = [*own_attributes(piece.module).items(), *piece.module.named_parameters(recurse=False)]
        attributes += piece.module.named_buffers(recurse=False)
        changing = {name for what, name in volatile if what == piece.what}
        _describe(target, attributes, reached.decides, changing, values, things)
    return piece.what, reached.codes, tuple(values), tuple(map(id, things))


def _describe(
    target: Target,
    variables: Iterable[tuple[str, Any]],
    decides: bool,
    volatile: Collection[str],
    values: list[Any],
    things: list[Any],
) -> None:
    """Add variables, but for `volatile` ones, to `values` and `things` as `fingerprint.describe` does."""
    for name, value in variables:
        if name in volatile or isinstance(value, (FunctionType, ModuleType)):
            continue
        if isinstance(value, torch.Tensor) and (not decides or isinstance(value, torch.nn.Parameter)):
            values += (name, value.shape, _only_number(target, value))
        elif decides or isinstance(value, _PLAIN):
            values.append(name)
            describe([*value] if isinstance(value, deque) else value, values, things)


_ADAPTERS = "peft."
"""Where the modules of a library are whose code reads nothing but the modules that it belongs to."""


class _Reached:
    """What a piece of code and the modules of its model give it to read, looked up once for a call."""

    def __init__(self, target: Target, piece: Foreign) -> None:
        self._target = target
        self._described: tuple[list[Any], list[Any]] | None = None
        if str(home_of(piece.code)).startswith(_ADAPTERS):
            reach = Reach([*functions_in(piece.code)])
            self.names: set[str] = set()
        else:
            reach = reach_of(piece.code, _objects_of(piece))
            self.names = reach.names
        self.holders = reach.holders
        self.variables = [*reach.variables, *variables_of_modules(parts_of(target.model), self.names)]
        self.codes = tuple(function.__code__ for function in reach.functions)
        self.decides = decides(reach.functions)

    def described(self, volatile: Collection[str]) -> tuple[list[Any], list[Any]]:
        """Describe the values of the variables, but for `volatile` ones."""
        if self._described is None:
            values: list[Any] = []
            things: list[Any] = []
            reads = ((variable.name, variable.read()) for variable in self.variables)
            _describe(self._target, reads, self.decides, volatile, values, things)
            self._described = values, things
        return self._described


def _objects_of(piece: Foreign) -> dict[str, Any]:
    if piece.module is None:
        return {}
    kind = own_class(piece.module)
    return {} if is_own_class(kind) or kind.__module__.startswith(_ADAPTERS) else objects_in(piece.module)


def _reached(target: Target, piece: Foreign, known: dict[tuple[int, int], _Reached]) -> _Reached:
    """Return what a piece of code reaches, alike for all modules of a class that hold no objects of their own."""
    key = id(piece.code), id(piece.module) if _objects_of(piece) else 0
    if key not in known:
        known[key] = _Reached(target, piece)
    return known[key]


def _only_number(target: Target, tensor: torch.Tensor) -> float | None:
    """Return the number that a tensor is full of, or None: zeros can hide what code does with other numbers."""
    known: dict[int, tuple[Any, ...]] = target.kept.get("numbers of tensors", dict, values_matter=False)
    form = times_written([tensor]), place(tensor)
    of, before, number = known.get(id(tensor), (None, None, None))
    if of is None or of() is not tensor or before != form or tensor.numel() <= _SMALL:
        number = None
        if tensor.numel() and not tensor.is_complex() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()
            number = float(least) if bool(least == most) else None
        known[id(tensor)] = weakref.ref(tensor), form, number
    return number


def mixes_sequences(target: Target) -> bool:
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


def try_out(target: Target, foreign: Sequence[Foreign], batch: int) -> str | None:
    """Return why a model with foreign code cannot be accelerated for calls with `batch` sequences, or None."""
    if not foreign:
        return None
    began = time.perf_counter()
    try:
        with _undone(target, foreign) as changes:
            stuck = [piece.what for piece, variables in changes.saved for one in variables if one.cannot_be_copied]
            if stuck:
                return f"{', '.join(stuck)}: it reads a Python generator, which cannot be put back after a trial"
            difference = _difference(target, foreign, batch)
            stateful, draws = changes(), changes.draws
    except Exception as error:  # foreign code can fail in any way
        return f"{listed(foreign)}: a forward pass over a tree raised {type(error).__name__}: {error}"
    finally:
        if time.perf_counter() - began > _PATIENCE:
            logger.warning("tried whether %s treats rows alike: %.1f s", listed(foreign), time.perf_counter() - began)
    if difference is not None:
        return f"{listed(foreign)}: {difference}"
    if draws:
        return f"{listed(foreign)}: it uses random numbers, one more with every forward pass"
    deciding = [piece.what for piece in stateful if not observes(piece)]
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
def _difference(target: Target, foreign: Sequence[Foreign], batch: int) -> str | None:
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


def _behind(target: Target, texts: torch.Tensor, parents: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """Logits (batch, nodes, vocabulary) after the nodes of a tree that follows prompts (batch, length)."""
    cache = target.new_cache()
    prefill(target, list(texts), cache)
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
def _rows_are_independent(target: Target, foreign: Sequence[Foreign]) -> bool:
    """Whether sequences of a batch have the logits that each has alone."""
    texts, tokens = _texts(target, numbers_in(foreign), 3)
    parents = _TREE if target.info.branches else shapes.branch(len(_TREE))
    together = _behind(target, texts, parents, tokens)
    alone = torch.cat([_behind(target, text[None], parents, tokens) for text in texts])
    return _beyond_rounding(target, together, alone, alone.float().std()) is None


def _texts(target: Target, numbers: Sequence[int], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def _random_tokens(target: Target, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, target.embedded, (count,), generator=generator).to(target.device)


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


# State


class _Changes:
    """What foreign code has changed since the beginning."""

    def __init__(self, target: Target, foreign: Sequence[Foreign]) -> None:
        known: dict[tuple[int, int], _Reached] = {}
        self.saved: list[tuple[Foreign, list[Restorable]]] = []
        self._attributes: list[tuple[Foreign, str, dict[str, Any], set[str]]] = []
        self._deciding: set[int] = set()
        self._names: list[tuple[Foreign, set[str]]] = []
        self._modules = [(module.__dict__, set(module.__dict__)) for module in parts_of(target.model)]
        seen: dict[int, _Reached] = {}
        for piece in foreign:
            reached = _reached(target, piece, known)
            variables, holders = (reached.variables, reached.holders) if id(reached) not in seen else ([], [])
            seen[id(reached)] = reached
            if piece.module is not None:
                variables = [*variables, *_variables_of(piece.module)]
                holders = [*holders, ("", piece.module.__dict__)]
            self.saved.append((piece, [*map(Restorable, variables)]))
            self._attributes += [(piece, path, attributes, set(attributes)) for path, attributes in holders]
            self._names.append((piece, reached.names))
            if reached.decides:
                self._deciding.add(id(piece))
        self._random = _states_of_generators()

    def __call__(self) -> list[Foreign]:
        """Return the code that may decide by variables that have changed."""
        changed = {id(piece) for piece, variables in self.saved if any(one.changed() for one in variables)}
        changed |= {id(piece) for piece, *_ in self._new_attributes()}
        return [piece for piece, _ in self.saved if id(piece) in changed & self._deciding]

    def _new_attributes(self) -> Iterator[tuple[Foreign, str, dict[str, Any], str]]:
        """Attributes that a first pass has made, with the code that may have done so."""
        for piece, path, attributes, before in self._attributes:
            for name in attributes.keys() - before:
                yield piece, path, attributes, name
        for number, (attributes, before) in enumerate(self._modules):
            for name in attributes.keys() - before:
                yield from ((piece, f"{number}.", attributes, name) for piece, names in self._names if name in names)

    @property
    def draws(self) -> bool:
        """Whether random numbers of the process were used."""
        return _states_of_generators() != self._random

    def undo(self) -> set[tuple[str, str]]:
        """Put everything back; return code, by its description, with the names of the variables that had changed."""
        changed = {(piece.what, one.name) for piece, variables in self.saved for one in variables if one.changed()}
        for piece, path, attributes, name in [*self._new_attributes()]:
            changed.add((piece.what, path + name))
            attributes.pop(name, None)
        for _, variables in self.saved:
            for one in variables:
                one.restore()
        return changed


def _states_of_generators() -> tuple[Any, ...]:
    """States of the generators of random numbers that a process has: Python's, numpy's and torch's."""
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], bytes(torch.get_rng_state().numpy())  # type: ignore[index]


def _variables_of(module: torch.nn.Module) -> Iterator[Variable]:
    """The attributes and buffers of a module with foreign code."""
    own = module.__dict__
    for name in own_attributes(module):
        yield Variable(name, functools.partial(own.get, name), functools.partial(own.__setitem__, name))
    for name, _ in module.named_buffers(recurse=False):
        yield Variable(name, functools.partial(getattr, module, name), functools.partial(setattr, module, name))


@contextlib.contextmanager
def _undone(target: Target, foreign: Sequence[Foreign]) -> Iterator[_Changes]:
    """Put back, after the block, what foreign code keeps and the state of random number generators."""
    devices = {parameter.device for parameter in target.model.parameters() if parameter.device.type == "cuda"}
    host, numbers = random.getstate(), np.random.get_state()
    changes = _Changes(target, foreign)
    try:
        with torch.random.fork_rng(devices=devices):
            yield changes
    finally:
        _volatile(target).update(changes.undo())
        random.setstate(host)
        np.random.set_state(numbers)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, dict, set, tuple, deque)
