"""Code around the model of a call: replaced functions of libraries, torch modes, and processors, criteria and streamers
that share state with the model. Output equals that of plain `generate`.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import importlib
import inspect
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import fastapi
import peft
import pydantic
import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.cases import thinned
from support.side_by_side import SideBySide
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.streamers import BaseStreamer

import token_recycling as tr
from token_recycling.model.compat import replaced_kernels
from token_recycling.model.foreign import bystanders
from token_recycling.model.foreign.search import replaced_in_libraries

pytestmark = pytest.mark.falls_back

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
IDS = tiny.prompt(1, 5).repeat(1, 2)

Call = Callable[[LlamaForCausalLM], Any]


def llama() -> LlamaForCausalLM:
    return tiny.llama(0, 0.5)


def greedy(model: LlamaForCausalLM) -> torch.Tensor:
    return model.generate(IDS, **GREEDY)


def compare(call: Call, reason: str | None) -> None:
    """Compare two calls of a plain and of an accelerated model."""
    SideBySide(llama).assert_same(call, reason, times=2)


def coarse(states: torch.Tensor) -> torch.Tensor:
    """Round to one scale for all rows, as quantization does."""
    scale = states.abs().amax() / 7 + 1e-9
    return (states / scale).round() * scale


# Functions of libraries


def on_input(function, rows=lambda states: states, place=0):
    def replaced(*arguments, **more):
        arguments = (*arguments[:place], rows(arguments[place]), *arguments[place + 1 :])
        return function(*arguments, **more)

    return replaced


def of_one_row(function):
    return lambda states, *more: function(states, *more) * (1.2 if states.shape[1] == 1 else 1.0)


def counted_in(counts):
    """Make a function stateful, as libraries do that replace it on import (nnsight, lovely-tensors)."""

    def make(function):
        def counted(*arguments, **more):
            counts["calls"] += 1
            return function(*arguments, **more)

        return counted

    return make


FUNCTIONS: dict[str, tuple[Any, str, Callable[[Any], Any], str | None]] = {
    "attention": (
        functional,
        "scaled_dot_product_attention",
        lambda f: on_input(f, coarse, 1),
        "scaled_dot_product_attention",
    ),
    "products": (functional, "linear", lambda f: on_input(f, coarse), "the function linear of torch.nn.functional"),
    "harmless": (functional, "linear", on_input, None),
    "activation": (functional, "silu", of_one_row, "silu"),
    "norm": (torch, "rsqrt", of_one_row, "rsqrt"),
    "choice": (
        torch,
        "argmax",
        lambda f: lambda scores, **more: scores.shape[-1] - 1 - f(scores.flip(-1), **more),
        "argmax",
    ),
    "cache": (Cache, "update", lambda f: on_input(f, coarse, 1), "the function update of Cache"),
    "layer of a cache": (
        DynamicLayer,
        "update",
        lambda f: on_input(f, coarse, 2),
        "the function update of DynamicLayer",
    ),
    "gradients": (torch.Tensor, "backward", counted_in(collections.Counter()), None),
    "tensor repr": (torch.Tensor, "__repr__", counted_in(collections.Counter()), None),
    "saving": (LlamaForCausalLM, "save_pretrained", counted_in(collections.Counter()), None),
    "loop": (GenerationMixin, "_sample", lambda f: lambda self, ids, **more: f(self, ids, **more)[:, :-1], "_sample"),
    "processors": (LogitsProcessorList, "__call__", lambda f: lambda self, ids, scores: scores.roll(1, -1), "__call__"),
    "criteria": (StoppingCriteriaList, "__call__", lambda f: lambda self, ids, scores: ids[:, -1] % 5 == 0, "__call__"),
    "a criterion": (
        stopping_criteria.MaxLengthCriteria,
        "__call__",
        lambda f: lambda self, ids, scores, **more: f(self, ids, scores, **more) | (ids[:, -1] % 5 == 0),
        "MaxLengthCriteria",
    ),
}


@pytest.mark.parametrize("name", thinned(FUNCTIONS, 2))
def test_replaced_library_functions_match_generate(name, monkeypatch):
    holder, function, replaced, reason = FUNCTIONS[name]
    both = SideBySide(llama)
    both.assert_same(greedy)
    with monkeypatch.context() as patch:
        patch.setattr(holder, function, replaced(getattr(holder, function)))
        compare(greedy, reason)
        both.assert_same(greedy, reason)  # replaced between calls
    both.assert_same(greedy)


def test_replaced_call_of_a_transformers_processor(monkeypatch):
    def call(self, ids, scores):
        return scores.index_fill(1, ids[0, -2:], -10.0)

    monkeypatch.setattr(logits_process.RepetitionPenaltyLogitsProcessor, "__call__", call)
    compare(lambda model: model.generate(IDS, repetition_penalty=1.1, **GREEDY), None)
    batch = torch.cat([IDS, IDS.flip(1)])
    compare(lambda model: model.generate(batch, repetition_penalty=1.1, **GREEDY), "RepetitionPenaltyLogitsProcessor")


def test_installed_libraries_have_no_replaced_functions():
    assert replaced_in_libraries() == ()
    assert replaced_kernels() == []


def test_kernels_that_torch_registers_later_are_not_foreign():
    """`torch.vmap`, which builds the masks of batches, registers kernels on first use."""
    torch.vmap(lambda row: row + 1)(torch.ones(2, 2))
    model = tr.accelerate(llama())
    model.generate(IDS, **GREEDY)
    assert model.acceleration.fallback is None
    assert replaced_kernels() == []


@pytest.mark.parametrize(
    ("operator", "kernel"),
    [
        ("silu", lambda rows: torch.sigmoid(rows) * rows * (1 + 0.9 * (rows.shape[1] == 1))),
        ("rsqrt", lambda rows: rows.pow(-0.5) * (1 + 0.1 * (rows.shape[1] == 1))),
        ("mm", lambda rows, weight: (rows[:, None] * weight.T[None]).sum(-1) * (1 + 0.1 * (len(rows) == 1))),
        ("argmax", lambda scores, dim=None, keepdim=False: scores.topk(2, -1).indices[..., 1]),
    ],
)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_replaced_torch_kernels_fall_back(operator, kernel):
    both = SideBySide(llama)
    before = both.assert_same(greedy)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(operator, kernel, "CPU")
        changed = both.assert_same(greedy, f"aten/{operator}/CPU")
        assert not torch.equal(changed, before), "the kernel must change the output"
    finally:
        library._destroy()
    assert torch.equal(both.assert_same(greedy), before)


class _Halved(torch.Tensor):
    """Halves angles, and exchanges logits, in forward passes over one row."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), more=None):
        output = super().__torch_function__(function, types, arguments, more or {})
        name = getattr(function, "__name__", "")
        one_row = ("matmul" in name and output.shape[-1] == 1) or (name == "linear" and output.shape[1] == 1)
        return output.roll(1, -1) / 2 if one_row else output


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("path", ["model.rotary_emb.inv_freq", "lm_head.weight"])
def test_tensors_of_a_subclass_fall_back(between, path):
    """Buffers, and weights that are attributes of their modules, as hypernetworks set them."""

    def halve(model):
        holder, _, name = path.rpartition(".")
        module = model.get_submodule(holder)
        tensor = getattr(module, name).detach().as_subclass(_Halved)
        module._parameters.pop(name, None)
        setattr(module, name, tensor)
        return model

    both = SideBySide(llama if between else lambda: halve(llama()))
    if between:
        both.assert_same(greedy)
        both.change(halve)
    both.assert_same(greedy, "_Halved")


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), more=None):
        arguments = (coarse(arguments[0]), *arguments[1:]) if function is functional.linear else arguments
        return function(*arguments, **(more or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        arguments = (coarse(arguments[0]), *arguments[1:]) if function is torch.ops.aten.mm.default else arguments
        return function(*arguments, **(more or {}))


@pytest.mark.parametrize("mode", [_Functions, _Operations])
def test_torch_modes_fall_back(mode):
    def call(model):
        with mode():
            return model.generate(IDS, **GREEDY)

    compare(call, mode.__name__)


@pytest.mark.parametrize(("of", "wrapper"), [("cache", partial), ("layer", lambda function: function)])
def test_cache_with_a_replaced_update_falls_back(of, wrapper):
    def call(model):
        cache = DynamicCache(config=model.config)
        thing = cache if of == "cache" else cache.layers[0]
        thing.update = wrapper(on_input(thing.update, coarse))
        return model.generate(IDS, past_key_values=cache, **GREEDY)

    compare(call, "set as update of a Dynamic")


class _Coarse(DynamicLayer):
    """A layer that compresses keys, as some packages define it."""

    def update(self, keys, values, *arguments, **more):
        return super().update(coarse(keys), values, *arguments, **more)


@pytest.mark.parametrize(
    "attributes",
    [
        {"layers": [_Coarse(), _Coarse()]},
        {"layers": [], "layer_class_to_replicate": _Coarse},
        {"layers": [], "layer_class_to_replicate": partial(_Coarse)},
        {"layers": [DynamicLayer()], "layer_class_to_replicate": lambda: _Coarse()},
    ],
    ids=["existing", "created later", "created by a partial", "after others"],
)
def test_cache_with_custom_layers_falls_back(attributes):
    def call(model):
        cache = DynamicCache(config=model.config)
        vars(cache).update(copy.deepcopy(attributes))
        return model.generate(IDS, past_key_values=cache, **GREEDY)

    compare(call, "cache layers")


def test_processor_list_with_an_overridden_call():
    class List(LogitsProcessorList):
        def __call__(self, ids, scores, **more):
            return super().__call__(ids, scores, **more).index_fill(1, ids[0, -1:], -10.0)

    class Model(LlamaForCausalLM):
        def _get_logits_processor(self, *arguments, **more):
            return List(super()._get_logits_processor(*arguments, **more))

    def model():
        model = llama()
        model.__class__ = Model
        return model

    assert torch.equal(greedy(tr.accelerate(model())), greedy(model()))


# State shared with the model


def _boost(scores: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Boost a token that depends on the model's states."""
    return scores.index_fill(1, (states.abs().sum() * 1000).long().remainder(scores.shape[-1])[None], 20.0)


def by_hidden_states(model):
    """Read hidden states, as nearest-neighbor language models do."""
    memory = SimpleNamespace()
    model.model.norm.register_forward_hook(lambda module, inputs, output: setattr(memory, "last", output[:, -1]))
    return {"logits_processor": [lambda ids, scores: _boost(scores, memory.last)]}


class _OfOneObject(LogitsProcessor):
    def __init__(self, model):
        model.model.norm.register_forward_hook(self.note)

    def note(self, module, inputs, output):
        self.last = output[:, -1]

    def __call__(self, ids, scores):
        return _boost(scores, self.last)


def by_one_object(model):
    return {"logits_processor": [_OfOneObject(model)]}


def steering_by_token(model):
    """The processor determines what the hook does in the next forward pass."""
    memory = {"strength": 0.0}
    vector = torch.randn(32, generator=torch.Generator().manual_seed(3))
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + memory["strength"] * vector)

    def processor(ids, scores):
        memory["strength"] = float(ids[0, -1] % 2)
        return scores

    return {"logits_processor": [processor]}


def a_weight(model):
    held = weakref.ref(model)

    def processor(ids, scores, found=held):
        with torch.no_grad():
            found().lm_head.weight[int(ids[0, -1])] *= 0.5
        return scores

    return {"logits_processor": [processor]}


def a_part(model):
    children, others = model.model.layers[0].__dict__["_modules"], [model.model.layers[place].mlp for place in (0, 1)]

    def processor(ids, scores):
        children["mlp"] = others[int(ids[0, -1]) % 2]
        return scores

    return {"logits_processor": [processor]}


def a_weight_by_a_class_with_a_library_module(model):
    """Like a method replaced in a class of transformers."""

    def call(self, ids, scores):
        with torch.no_grad():
            model.lm_head.weight[int(ids[0, -1])] *= 0.5
        return scores

    named = {"__module__": LogitsProcessor.__module__, "__call__": call}
    return {"logits_processor": [type("Named", (LogitsProcessor,), named)()]}


def a_weight_by_a_string(model):
    """Look the module up by its name."""
    sys.modules["a.module"] = SimpleNamespace(head=model.lm_head)

    def processor(ids, scores):
        importlib.import_module("a.module").head.weight.data.mul_(-1)
        return scores

    return {"logits_processor": [processor]}


def a_weight_by_a_program(model):
    sys.modules["a_module"] = SimpleNamespace(head=model.lm_head)

    def processor(ids, scores):
        exec("import a_module; a_module.head.weight.data.mul_(-1)")
        return scores

    return {"logits_processor": [processor]}


def a_weight_by_a_global_name(model):
    globals()["head_of_a_model"] = model.lm_head

    def processor(ids, scores):
        globals()["_".join(("head", "of", "a", "model"))].weight.data.mul_(-1)
        return scores

    return {"logits_processor": [processor]}


def a_weight_by_a_search(model):
    def processor(ids, scores):
        frame = inspect.currentframe()
        while not isinstance(found := frame.f_locals.get("model"), LlamaForCausalLM):
            frame = frame.f_back
        with torch.no_grad():
            found.lm_head.weight[int(ids[0, -1])] *= 0.5
        return scores

    return {"logits_processor": [processor]}


def the_environment(model):
    vector = torch.randn(32, generator=torch.Generator().manual_seed(3))
    os.environ["STRENGTH"] = "0"
    model.model.norm.register_forward_hook(
        lambda module, inputs, output: output + float(os.environ["STRENGTH"]) * vector
    )

    def processor(ids, scores):
        os.environ["STRENGTH"] = str(int(ids[0, -1]) % 2)
        return scores

    return {"logits_processor": [processor]}


class _Halving(BaseStreamer):
    def __init__(self, weight):
        self.weight, self.tokens = weight, 0

    def put(self, value):
        self.tokens += value.numel()
        self.halve(self.tokens % 64)

    def end(self):
        pass

    def halve(self, token):
        with torch.no_grad():
            self.weight[token] *= 0.5


def a_weight_by_a_streamer(model):
    return {"streamer": _Halving(model.lm_head.weight)}


def a_weight_by_a_text_streamer(model):
    class Negating(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            self.weight.data.mul_(-1)

    streamer = Negating(tiny.tokenizer())
    streamer.weight = model.lm_head.weight
    return {"streamer": streamer}


def a_hook_that_is_removed(model):
    handle = model.model.norm.register_forward_hook(lambda module, inputs, output: output.flip(-1))

    def criterion(ids, scores):
        if ids.shape[1] == 16:
            handle.remove()
        return torch.zeros(1, dtype=torch.bool)

    return {"stopping_criteria": [criterion]}


def length_of_the_cache(model):
    cache = DynamicCache(config=model.config)
    return {
        "past_key_values": cache,
        "stopping_criteria": [lambda ids, scores: torch.tensor([cache.get_seq_length() >= 15])],
    }


def keys_of_the_cache(model):
    cache = DynamicCache(config=model.config)
    layer = cache.layers[0]
    return {
        "past_key_values": cache,
        "logits_processor": [lambda ids, scores: _boost(scores, layer.keys[0, :, -1])],
    }


SHARED = {
    by_hidden_states: "uses setattr",
    by_one_object: "_OfOneObject",
    steering_by_token: "memory, a dict",
    a_weight: "reaches the model",
    a_weight_by_a_streamer: "reaches the model",
    a_weight_by_a_text_streamer: "reaches the model",
    a_part: "reaches the model",
    a_weight_by_a_class_with_a_library_module: "reaches the model",
    a_weight_by_a_string: "reaches too much",
    a_weight_by_a_program: "reaches too much",
    a_weight_by_a_global_name: "reaches too much",
    a_weight_by_a_search: "reaches too much",
    the_environment: "uses os",
    a_hook_that_is_removed: "may share state",
    length_of_the_cache: "reads the cache",
    keys_of_the_cache: "reads the cache",
}


@pytest.mark.parametrize("bring", SHARED)
def test_code_that_shares_state_with_the_model_falls_back(bring):
    def call(model):
        return model.generate(IDS, **{**GREEDY, **bring(model)})

    wanted = SideBySide(llama).assert_same(call, SHARED[bring])
    assert not torch.equal(wanted, greedy(llama()))


def test_code_that_reaches_too_much_is_searched_once(monkeypatch):
    """Such as a prefix tree of many titles. Each call has a new function with the same code."""
    tree = {token: {} for token in range(100_001)}

    def call(model):
        return model.generate(IDS, prefix_allowed_tokens_fn=lambda row, ids: [*range(1, len(tree) % 64)], **GREEDY)

    both = SideBySide(llama)
    both.assert_same(call, "reaches too much")
    monkeypatch.setattr(bystanders, "_reached", None)
    both.assert_same(call, "reaches too much")


@pytest.mark.parametrize("by_name", [False, True])
def test_processor_that_changes_a_library_falls_back(by_name, monkeypatch):
    """It does so between forward passes, so nothing is replaced when the call begins."""
    plain = functional.silu

    def scaled(states, **_):
        return plain(states) * 3

    def by_global(ids, scores):
        functional.silu = scaled if int(ids[0, -1]) % 2 else plain
        return scores

    def by_cell(ids, scores):
        module.silu = scaled if int(ids[0, -1]) % 2 else plain
        return scores

    module = functional
    processor = by_global if by_name else by_cell

    def call(model):
        monkeypatch.setattr(functional, "silu", plain)
        return model.generate(IDS, logits_processor=[processor], **GREEDY)

    compare(call, "changes torch.nn.functional")
    assert not torch.equal(call(llama()), greedy(llama()))


@pytest.mark.parametrize("write", ["by attribute", "by setattr", "never"])
def test_processor_that_changes_the_configuration_falls_back(write):
    class Softening(LogitsProcessor):
        def __init__(self, config):
            self.config = config

        def by_attribute(self, value):
            self.config.final_logit_softcapping = value

        def by_setattr(self, value):
            setattr(self.config, "final_logit" + "_softcapping", value)

        def __call__(self, ids, scores):
            (self.by_attribute if write == "by attribute" else self.by_setattr)(0.5 + ids.shape[1] % 5)
            return scores

    class Reading(LogitsProcessor):
        def __init__(self, config):
            self.config = config

        def __call__(self, ids, scores):
            self.seen = ids.shape[1]
            return scores[:, : self.config.vocab_size]

    def call(model):
        processor = (Reading if write == "never" else Softening)(model.config)
        more = {"return_dict_in_generate": True, "output_logits": True}
        return model.generate(IDS, logits_processor=[processor], **more, **GREEDY).logits

    reason = None if write == "never" else "may change the model's configuration"
    SideBySide(lambda: model_of(named("gemma2"))).assert_same(call, reason)


def test_streamer_for_an_event_loop_is_accelerated():
    async def streamed(model):
        loop, received = asyncio.get_running_loop(), asyncio.Queue()

        class Streamer(BaseStreamer):
            def put(self, value):
                loop.call_soon_threadsafe(received.put_nowait, value.tolist())

            def end(self):
                loop.call_soon_threadsafe(received.put_nowait, None)

        await loop.run_in_executor(None, lambda: model.generate(IDS, streamer=Streamer(), **GREEDY))
        return [received.get_nowait() for _ in range(received.qsize())]

    compare(lambda model: asyncio.run(streamed(model)), None)


def test_processor_that_switches_adapters_falls_back():
    def adapted():
        torch.manual_seed(3)
        layers = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, **layers)).eval()

    def call(model):
        def processor(ids, scores):
            (model.base_model.disable_adapter_layers if ids[0, -1] % 2 else model.base_model.enable_adapter_layers)()
            return scores

        return model.generate(input_ids=IDS, logits_processor=[processor], **GREEDY)

    SideBySide(adapted).assert_same(call, "reaches the model")


def test_stream_rejects_code_that_shares_state_with_the_model():
    model = llama()
    for bring in (by_hidden_states, a_weight):
        with pytest.raises(tr.UnsupportedModelError, match=r"processor|lambda"):
            tr.stream(model, IDS, **bring(model))


class _Application:
    """All state of a program, of which each method uses a part."""

    def __init__(self, **things):
        self.cancelled, self.seen = False, []
        vars(self).update(things)

    def stop(self, ids, scores):
        return torch.full((len(ids),), self.cancelled)

    def process(self, ids, scores):
        scores[:, 3] -= 1
        return scores

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        pass


model = None
"""A global variable as in a notebook; no processor refers to it."""


class _Reading(_Application):
    def process(self, ids, scores):
        scores[:, self.loaded["language"].config.eos_token_id or 3] -= 1
        return scores


loaded = None
"""A global variable with the name of an attribute."""


class _ReadingEither(_Application):
    def process(self, ids, scores):
        scores[:, (loaded or self.loaded)["language"].config.eos_token_id or 3] -= 1
        return scores


@pytest.mark.parametrize("kind", [_Application, _Reading, _ReadingEither])
def test_object_that_holds_the_model_falls_back_only_if_its_methods_use_it(monkeypatch, kind):
    """A method that uses the model might change it."""

    def call(one):
        monkeypatch.setitem(globals(), "model", one)
        application = kind(loaded={"language": one})
        more = {"stopping_criteria": [application.stop], "logits_processor": [application.process]}
        return one.generate(IDS, streamer=application, **more, **GREEDY)

    SideBySide(llama).assert_same(call, None if kind is _Application else "reaches the model")


@dataclasses.dataclass
class _Record:
    language: Any
    seen: list[int] = dataclasses.field(default_factory=list)

    def process(self, ids, scores):
        self.seen.append(ids.shape[1])
        return scores


class _ValidatedRecord(pydantic.BaseModel):
    language: Any
    seen: list[int] = []
    _private: Any = pydantic.PrivateAttr(None)

    def process(self, ids, scores):
        self.seen.append(ids.shape[1])
        return scores


class _UsingPrivate(_ValidatedRecord):
    def process(self, ids, scores):
        scores[:, self._private.config.eos_token_id or 3] -= 1
        return scores


def request_of(model):
    """Return a request of a web application whose endpoint uses the model."""
    application = fastapi.FastAPI()
    application.state.model = model

    @application.get("/")
    def endpoint():
        return model.generate(IDS)

    return fastapi.Request({"type": "http", "asgi": {}, "headers": [], "app": application, "endpoint": endpoint})


class _Asking:
    def __init__(self, model):
        self.request = request_of(model)

    def process(self, ids, scores):
        assert not self.request.headers
        return scores


def private(model):
    record = _UsingPrivate(language=None)
    record._private = model
    return record


class _Step:
    def __init__(self, holder):
        self.token = holder.language.config.eos_token_id


class _DerivedStep(_Step):
    pass


def constructing(model, kind=_Step):
    holder = _Record(model)

    def process(ids, scores):
        scores[:, kind(holder).token or 3] -= 1
        return scores

    return SimpleNamespace(process=process)


class _Constructed:
    def __init__(self, model):
        self.token = model.config.eos_token_id or 3

    def process(self, ids, scores):
        scores[:, self.token if isinstance(self, __class__) else 0] -= 1
        return scores


def validated(model):
    @pydantic.validate_call(config={"arbitrary_types_allowed": True})
    def process(ids: torch.Tensor, scores: torch.Tensor):
        scores[:, model.config.eos_token_id or 3] -= 1
        return scores

    return SimpleNamespace(process=process)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_Record, None),
        (lambda model: _ValidatedRecord(language=model), None),
        (private, "reaches the model"),
        (validated, "reaches the model"),
        (constructing, "reaches the model"),
        (partial(constructing, kind=_DerivedStep), "reaches the model"),
        (_Constructed, None),
        (_Asking, None),
    ],
)
def test_processor_falls_back_only_if_its_own_code_uses_the_model(make, reason):
    """Code of dataclasses, pydantic and web frameworks, which leads to the model, does not count."""

    def call(model):
        bound = make(model)
        return model.generate(IDS, logits_processor=[bound.process], **GREEDY), getattr(bound, "seen", None)

    SideBySide(llama).assert_same(call, reason)


def test_processor_that_sets_its_own_attributes_is_accelerated():
    def call(model):
        memory = SimpleNamespace(tokens=0)

        def processor(ids, scores):
            setattr(memory, "tokens", ids.shape[1])  # noqa: B010
            return torch.where(scores > scores.mean(), scores, scores - memory.tokens)

        return model.generate(IDS, logits_processor=[processor], **GREEDY)

    compare(call, None)


def test_traced_module_matches_generate():
    model = llama()
    model.model.layers[0].mlp = torch.jit.trace(model.model.layers[0].mlp, torch.randn(1, 3, 32))
    wanted = greedy(model)
    assert torch.equal(greedy(tr.accelerate(model)), wanted)


def counted_choices():
    calls = itertools.count()
    return lambda row, ids: [token for token in range(64) if (token + next(calls)) % 3]


def used_once():
    used = set()

    def allowed(row, ids):
        used.add(int(ids[-1]))
        return [token for token in range(64) if token not in used]

    return allowed


class Shrinking:
    def __init__(self):
        self.least = 0

    def __call__(self, row, ids):
        self.least += 1
        return [*range(self.least % 50, 64)]


def by_row():
    return lambda row, ids: [*range(row, 64, 2)]


@pytest.mark.parametrize(
    ("make", "reason", "rows"),
    [
        (counted_choices, "next", 2),
        (used_once, "used", 1),
        (used_once, "used", 2),
        (Shrinking, "Shrinking", 2),
        (by_row, None, 2),
    ],
)
def test_stateful_prefix_functions_of_a_batch_fall_back(make, reason, rows):
    """Rows of a batch advance at different speeds, which would change the order of updates to the function's state."""
    ids = torch.cat([IDS, IDS.roll(1, 1)])[:rows]
    SideBySide(llama).assert_same(
        lambda model: model.generate(ids, prefix_allowed_tokens_fn=make(), **GREEDY), reason if rows > 1 else None
    )


class Sums:
    """A tensor that is created in inference mode and written to between tokens."""

    def __init__(self):
        self.sums = torch.zeros(64)

    def process(self, ids, scores):
        self.sums[ids[0, -1]] += 1
        return scores - self.sums

    def stop(self, ids, scores):
        self.sums += 1
        return (self.sums[:1] > 9).expand(len(ids))

    def put(self, value):
        self.sums[value.flatten()[-1]] += 1

    def end(self):
        self.sums += 1


@pytest.mark.parametrize(
    ("name", "of", "rows"),
    [
        ("logits_processor", lambda one: [one.process], 1),
        ("stopping_criteria", lambda one: StoppingCriteriaList([one.stop]), 1),
        ("stopping_criteria", lambda one: StoppingCriteriaList([one.stop]), 2),
        ("streamer", lambda one: SimpleNamespace(put=one.put, end=one.end), 1),
    ],
)
def test_code_can_write_to_inference_tensors(name, of, rows):
    """Such tensors are writable only within inference mode."""

    def call(model):
        with torch.inference_mode():
            one = Sums()
            return model.generate(IDS.repeat(rows, 1), **{name: of(one)}, **GREEDY), one.sums

    SideBySide(llama).assert_same(call)


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_code_can_write_to_current_and_earlier_ids(name):
    """As in `generate`, writing to the current ids changes the sequence; writing to earlier ones does not."""

    def call(model):
        ids, shown = IDS.clone(), []

        def note(ids, scores):
            shown.append(ids)
            if len(shown) == 4:
                ids[0, -2] = 3
            if len(shown) > 5:
                shown[-3].fill_(7)
            return scores if name == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool)

        return [model.generate(ids, **{name: [note]}, **GREEDY), *shown]

    SideBySide(llama).assert_same(call)


class Automaton:
    """A processor and streamer whose attributes have names with another meaning in this package."""

    reading_prompt = True

    def first_state(self) -> int:
        return 0

    def __call__(self, ids, scores):
        return scores.roll(1, 1)

    def put(self, tokens):
        self.reading_prompt = False

    def end(self):
        """Do nothing."""


def test_attributes_with_names_of_this_package_have_no_effect():
    compare(lambda model: model.generate(IDS, logits_processor=[Automaton()], streamer=Automaton(), **GREEDY), None)
