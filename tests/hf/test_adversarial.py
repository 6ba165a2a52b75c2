"""Code in and around a model that depends on state which trials never exercise. Every output equals that of plain
`generate`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import operator
import random
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from support import tiny
from support.cases import thinned
from support.side_by_side import SideBySide
from torch import manual_seed
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import token_recycling as tr

pytestmark = pytest.mark.falls_back

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
IDS = tiny.prompt(1, 9)
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(5))
AFTER = 15
"""Number of forward passes after which code changes its behavior, in the second call."""
SELDOM = 33.0
"""A token that begins no forward pass of a trial. As a float it equals none of the numbers that trials look for."""

PASSES = 0
NAMES: dict[str, int] = {}
CONTEXT: ContextVar[int] = ContextVar("passes", default=0)


def llama() -> LlamaForCausalLM:
    return tiny.llama(0, 0.3)


def on_layer(model: Any, hook: Callable[..., Any], path: str = "model.layers.0") -> None:
    model.get_submodule(path).register_forward_hook(hook)


Bring = Callable[[Any], dict[str, Any]]


def when(count: Callable[[Any], Any]) -> Bring:
    """Make a hook that adds a vector after it has counted `AFTER` forward passes."""

    def bring(model):
        on_layer(model, lambda module, inputs, output: output + VECTOR if count(module) > AFTER else output)
        return {}

    return bring


def adding(make: Callable[[], Callable[[], Any]]) -> Bring:
    """Make a hook that adds a vector times a number, without a branch; `make` creates the numbers for each model."""

    def bring(model):
        strength = make()
        on_layer(model, lambda module, inputs, output: output + VECTOR * strength())
        return {}

    return bring


def by_global(module):
    global PASSES
    PASSES += 1
    return PASSES


def by_dictionary(module):
    NAMES["n"] = NAMES.get("n", 0) + 1
    return NAMES["n"]


def by_context(module):
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def by_instance_dictionary(module):
    module.__dict__["passes"] = module.__dict__.get("passes", 0) + 1
    return module.passes


def by_buffer(module):
    if not hasattr(module, "count"):
        module.register_buffer("count", torch.zeros(1))
    module.count.add_(1)
    return module.count


def by_seldom_written_buffer(model):
    """No trial triggers a write to the buffer."""
    embedding = model.model.embed_tokens
    embedding.register_buffer("sum", torch.zeros(1))

    def hook(module, inputs, output):
        module.sum[0] += (inputs[0][:, :1] == SELDOM).float().sum()
        return output + module.sum * VECTOR

    embedding.register_forward_hook(hook)
    return {}


def by_config(module):
    config = module.self_attn.config
    config.update({"passes": getattr(config, "passes", 0) + 1})
    return config.passes


def by_import(module):
    import os

    os.environ["PASSES"] = str(int(os.environ.get("PASSES", "0")) + 1)
    return int(os.environ["PASSES"])


def by_default(module, seen=collections.Counter()):  # noqa: B006
    seen["n"] += 1
    return seen["n"]


def by_tensor() -> Callable[[Any], Any]:
    count = torch.zeros(1)
    return lambda module: count.add_(1)


def by_view() -> Callable[[Any], Any]:
    count = torch.zeros(4)

    def add(module, one=count[2:3]):
        one += 1
        return count[2]

    return add


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def __call__(self, module):
        self.n += 1
        return self.n


class Steps:
    def __init__(self):
        self.n = 0

    def step(self):
        self.n += 1
        return self.n

    @property
    def strength(self):
        return 1.0 if self.step() > AFTER else 0.0


def largest():
    steps = Steps()
    return lambda: min(1, max(0, steps.step() - AFTER))


def property_of_object():
    steps = Steps()
    return lambda: steps.strength


def seldom(numbers: Callable[[], float]) -> Callable[[], bool]:
    return lambda: numbers() < 0.15


class Steering(NamedTuple):
    """An immutable tuple whose calls depend on global state."""

    strength: float

    def __call__(self, module, inputs, output):
        return output + self.strength * VECTOR if by_global(module) > AFTER else output


def by_a_list_of_another_hook(model):
    """One hook appends to a list; another hook depends on the list's length."""
    rows = []
    on_layer(model, lambda *given: rows.append(1))
    on_layer(model, lambda module, inputs, output: output + VECTOR if len(rows) > 5 else None, "model.layers.1")
    return {}


def noise(model):
    on_layer(model, lambda module, inputs, output: output + torch.randn_like(output))
    return {}


class Disguised:
    def __init__(self):
        self.passes = 0

    def __call__(self, module, inputs, output):
        self.passes += 1
        return output + VECTOR if self.passes > AFTER else output


Disguised.__module__ = "peft.tuners.lora"


class Counting:
    passes = 0

    def __call__(self, module, inputs, output):
        Counting.passes += 1
        return output + VECTOR if Counting.passes > AFTER else output


class DisguisedByInheritance(Counting):
    """Defines no method itself."""


DisguisedByInheritance.__module__ = "peft.tuners.lora.layer"


def _plain_helper(states):
    return STEERING.scale(states)


def _other_helper(states):
    return STEERING.add(states)


STEERING = types.ModuleType("steering")
"""A user's module: one function is plain, the other has the name of a torch operation."""
exec(
    "passes = [0]\n"
    "def scale(states):\n    return states * 1.5\n"
    f"def add(states):\n    passes[0] += 1\n    return states + 1 if passes[0] > {AFTER} else states\n",
    vars(STEERING),
)


def seed_by_name(module):
    """The seed is 3 before each call."""
    manual_seed(int(torch.initial_seed()) + 1)
    return 2 * int(torch.initial_seed())


@dataclass
class Output(CausalLMOutputWithPast):
    def __post_init__(self):
        super().__post_init__()
        if self.logits is not None and by_global(self) > AFTER:
            self.logits = self.logits.roll(1, -1)


def with_output(model):
    def forward(self, *args, **kwargs):
        output = LlamaForCausalLM.forward(self, *args, **kwargs)
        return Output(logits=output.logits, past_key_values=output.past_key_values)

    model.forward = types.MethodType(forward, model)
    return {}


def strength_between_calls(model):
    """Change the vector between calls, outside the hook."""
    vector = model.__dict__.setdefault("vector", torch.zeros(32))
    if not vector.any():
        on_layer(model, lambda module, inputs, output: torch.cat([output[:, :-1], output[:, -1:] + vector], 1))
    vector += 0.5
    return {}


def cache_length(model):
    def hook(module, inputs, kwargs, output):
        cache = next(value for value in kwargs.values() if hasattr(value, "get_seq_length"))
        return output + VECTOR if cache.get_seq_length() > 15 else output

    model.model.layers[1].register_forward_hook(hook, with_kwargs=True)
    return {}


def processor(make: Callable[[Any], Callable[[Any, Any], Any]]) -> Bring:
    return lambda model: {"logits_processor": [make(model)]}


def _scale(model: Any, ids: Any) -> None:
    model.model.layers[0].self_attn.scaling = 1.0 if ids[0, -1] % 2 else 0.1


def by_weak_reference(model):
    reference = weakref.ref(model)
    return lambda ids, scores: _scale(reference(), ids) or scores


def by_proxy(model):
    proxy = weakref.proxy(model)
    return lambda ids, scores: _scale(proxy, ids) or scores


def model_of_context(model):
    current: ContextVar[Any] = ContextVar("model", default=model)
    return lambda ids, scores: _scale(current.get(), ids) or scores


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def process(self, ids, scores):
        _scale(self.inner(), ids)
        return scores


def by_bound_method(model):
    return Holder(lambda: model).process


class Forwarding:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["_inner"], name)


def by_wrapper(model):
    wrapper = Forwarding(model)
    return lambda ids, scores: _scale(wrapper, ids) or scores


def by_weight_view(model):
    row = model.model.layers[0].mlp.down_proj.weight.detach()[1:].t()

    def process(ids, scores):
        row.mul_(0.5 if ids[0, -1] % 2 else 1.5)
        return scores

    return process


def by_generator(model):
    def states():
        while True:
            ids = yield
            _scale(model, ids)

    running = states()
    next(running)
    return lambda ids, scores: running.send(ids) or scores


def by_setattr(model):
    own = functional.silu

    def process(ids, scores):
        setattr(functional, "silu", (lambda states: own(states) * 1.5) if ids[0, -1] % 2 else own)  # noqa: B010
        return scores

    return process


def by_bound_library_method(model):
    scale = model.model.layers[0].mlp.down_proj.weight.data.mul_

    def process(ids, scores):
        scale(0.5 if ids[0, -1] % 2 else 1.5)
        return scores

    return process


CASES: dict[str, Bring] = {
    "a global": when(by_global),
    "a dictionary": when(by_dictionary),
    "a context variable": when(by_context),
    "the dictionary of a module": when(by_instance_dictionary),
    "a buffer": when(by_buffer),
    "a rarely written buffer": by_seldom_written_buffer,
    "the configuration": when(by_config),
    "an import": when(by_import),
    "a default": when(by_default),
    "a tensor": lambda model: when(by_tensor())(model),
    "a view": lambda model: when(by_view())(model),
    "slots": lambda model: when(Slots())(model),
    "a list shared by two hooks": by_a_list_of_another_hook,
    "a named tuple": lambda model: on_layer(model, Steering(3.0)) or {},
    "min and max": adding(largest),
    "a property": adding(property_of_object),
    "a vector": strength_between_calls,
    "noise": noise,
    "Python random numbers": adding(lambda: seldom(random.random)),
    "NumPy random numbers": adding(lambda: seldom(np.random.default_rng(1).random)),
    "the length of the cache": cache_length,
    "a weak reference": processor(by_weak_reference),
    "a proxy": processor(by_proxy),
    "a bound method": processor(by_bound_method),
    "a wrapper": processor(by_wrapper),
    "a view of a weight": processor(by_weight_view),
    "a generator": processor(by_generator),
    "a torch function set by setattr": processor(by_setattr),
    "manual_seed by name": when(seed_by_name),
    "a user's module": lambda model: (
        on_layer(model, lambda module, inputs, output: _plain_helper(_other_helper(output))) or {}
    ),
    "a bound method of a weight": processor(by_bound_library_method),
    "a class with peft as its module": lambda model: on_layer(model, Disguised()) or {},
    "an empty class with peft as its module": lambda model: on_layer(model, DisguisedByInheritance()) or {},
    "an output": with_output,
    "a model in a context variable": processor(model_of_context),
}


def _outputs(prepare: Callable[[Any], Any], bring: Bring) -> list[torch.Tensor]:
    global PASSES
    PASSES = Counting.passes = STEERING.passes[0] = 0
    NAMES.clear()
    by_default.__defaults__[0].clear()
    CONTEXT.set(0)
    model, own = llama(), functional.silu
    prepare(model)
    outputs = []
    try:
        arguments = bring(model)
        for call in range(2):
            if call and bring is strength_between_calls:
                bring(model)
            torch.manual_seed(3)
            random.seed(3)
            outputs.append(model.generate(IDS, **arguments, **GREEDY))
    finally:
        functional.silu = own
    return outputs


@functools.cache
def plain() -> torch.Tensor:
    return llama().generate(IDS, **GREEDY)


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_code_with_hidden_state_matches_generate(name, monkeypatch):
    bring = CASES[name]
    monkeypatch.setenv("PASSES", "0")
    wanted = _outputs(lambda model: model, bring)
    assert not all(torch.equal(output, plain()) for output in wanted), "the code must change the output"
    monkeypatch.setenv("PASSES", "0")
    assert all(map(torch.equal, _outputs(tr.accelerate, bring), wanted))


class LastRow(torch.nn.Module):
    """A module that treats the last row of a pass differently."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given, **named):
        output = self.inner(*given, **named).clone()
        output[:, -1] += VECTOR
        return output


class Hook(torch.nn.Module):
    def forward(self, module, inputs, output):
        return LastRow(torch.nn.Identity())(output)


class Scaling(contextlib.ContextDecorator):
    """A context manager, usable as a decorator, that counts its calls."""

    def __init__(self, linear):
        self.linear, self.passes = linear, 0

    def __enter__(self):
        self.passes += 1
        self.linear.weight.data.mul_(2 if self.passes % 2 else 0.5)

    def __exit__(self, *error):
        pass


def generated(linear):
    context = Scaling(linear)

    @contextlib.contextmanager
    def scaled():
        with context:
            yield

    return scaled()


def decorated(make: Callable[[Any], Any]) -> Bring:
    """Wrap a library's method in a library's decorator around a user's context manager."""

    def bring(model):
        linear = model.model.layers[0].mlp.down_proj
        linear.forward = make(linear)(linear.forward)
        return {}

    return bring


def replaced_by(make: Callable[[LastRow], Any]) -> Bring:
    """Replace a method with one from a library that calls a user's module."""

    def bring(model):
        mlp = model.model.layers[0].mlp
        mlp.__dict__["forward"] = make(LastRow(copy.deepcopy(mlp)))
        return {}

    return bring


def shadowed(model):
    mlp = model.model.layers[0].mlp
    mlp.__dict__["down_proj"] = LastRow(mlp.down_proj)
    return {}


def in_a_list(model):
    layers = list(model.model.layers)
    del model.model.layers
    model.model.layers = [LastRow(layers[0]), *layers[1:]]
    return {}


HELD_BY_LIBRARIES: dict[str, Bring] = {
    "a bound call of a module": replaced_by(lambda module: module.__call__),
    "a bound method of a container": replaced_by(lambda module: torch.nn.Sequential(module).forward),
    "a container": replaced_by(torch.nn.Sequential),
    "a module": replaced_by(lambda module: module),
    "an operator": replaced_by(lambda module: functools.partial(operator.call, module)),
    "a mock": replaced_by(lambda module: mock.MagicMock(side_effect=module)),
    "a hook": lambda model: on_layer(model, Hook().__call__) or {},
    "a decorator": decorated(Scaling),
    "a decorator by a generator": decorated(generated),
    "an attribute that hides a module": shadowed,
    "a list of layers": in_a_list,
}


@pytest.mark.parametrize("name", thinned(HELD_BY_LIBRARIES, 2))
def test_user_code_held_by_library_objects_matches_generate(name):

    def brought():
        model = llama()
        HELD_BY_LIBRARIES[name](model)
        return model

    SideBySide(brought).assert_same(lambda model: model.generate(IDS, **GREEDY), "", times=2)
