"""Prepacked weights: used only by accelerated passes, and only while they equal the model's weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.cases import thinned
from support.tiny import llama
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from token_recycling import accelerate, accelerated, decelerate, generate
from token_recycling.model import prepacking
from token_recycling.model.prepacking import prepack, prepacked_of

PROMPT = torch.arange(3, 15)[None]
BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no products in bfloat16"
)


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use packed weights for every number of rows and every size of model."""
    monkeypatch.setattr(prepacking, "_FASTER", float("inf"))
    monkeypatch.setattr(prepacking, "_LEAST_BYTES", 0)


@pytest.fixture
def packed_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the products with packed weights."""
    rows: list[int] = []
    product = prepacking.packed_product()

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return product(x, *others)

    monkeypatch.setattr(prepacking, "packed_product", lambda: counted)
    return rows


def _texts(model: nn.Module, tokens: int = 24) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BFLOAT16)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_equal_those_of_the_layers(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    model = llama(attention_bias=bias, mlp_bias=bias).to(dtype)
    packed = prepack(model)
    assert packed is not None
    assert len(packed.layers) == len(_linears(model))
    assert packed.nbytes == sum(layer.weight.nbytes for layer in _linears(model))
    for rows in (1, 2, 7, 40):
        for layer in packed.layers:
            x = torch.randn(1, rows, layer.weight.shape[1], dtype=dtype)
            with torch.no_grad():
                expected = nn.functional.linear(x, layer.weight, layer.module.bias)
            torch.testing.assert_close(layer.product(x).detach(), expected)
            with torch.no_grad(), packed.used(), torch.autocast("cpu", torch.bfloat16):
                assert layer.module(x).dtype == torch.bfloat16, "as without packed weights"


def test_only_accelerated_passes_use_packed_weights(packed_products: list[int]) -> None:
    model = llama()
    expected, logits = _texts(model), model(PROMPT).logits
    accelerate(model)
    packed_products.clear()
    assert torch.equal(_texts(model), expected)
    assert packed_products
    packed_products.clear()
    assert torch.equal(model(PROMPT).logits, logits), "the user's own forward passes are unchanged"
    assert not packed_products


@pytest.mark.parametrize("before", [False, True], ids=["packed by accelerate", "packed before, as by load"])
def test_decelerate_drops_only_what_accelerate_packed(before: bool) -> None:
    model = llama()
    packed = prepack(model, True) if before else None
    for _ in range(2):
        with accelerated(accelerate(accelerate(model))):
            accelerate(model)
        assert prepacked_of(model) is not None
        decelerate(model)
        assert prepacked_of(model) is packed
        assert any("forward" in vars(layer) for layer in _linears(model)) == before
    accelerate(model, prepack=False)
    assert prepacked_of(model) is None
    assert not any("forward" in vars(layer) for layer in _linears(model))


def test_decelerate_within_a_temporary_acceleration_drops_packed_weights() -> None:
    model = accelerate(llama())
    with accelerated(model):
        decelerate(model)
        assert prepacked_of(model) is None


def _through_data(weight: nn.Parameter, model: nn.Module) -> None:
    weight.data.mul_(-1)


def _other_data(weight: nn.Parameter, model: nn.Module) -> None:
    weight.data = -weight.data


def _another(weight: nn.Parameter, model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(-weight.detach())


def _transposed(weight: nn.Parameter, model: nn.Module) -> None:
    for layer in model.model.layers:
        square = layer.self_attn.q_proj.weight
        square.data = square.data.t()


@pytest.mark.parametrize("change", thinned([_through_data, _other_data, _another, _transposed], 2))
def test_changed_weights_take_effect_and_are_packed_again(change, packed_products: list[int]) -> None:
    model, plain = llama(), llama()
    plain.load_state_dict(model.state_dict())
    accelerate(model)
    before = _texts(model)
    for changed in (model, plain):
        change(changed.lm_head.weight, changed)
    expected = _texts(plain)
    assert not torch.equal(expected, before), "the change alters the output"
    assert torch.equal(_texts(model), expected)
    packed_products.clear()
    accelerate(model)
    assert torch.equal(_texts(model), expected)
    assert packed_products, "packed again"


@pytest.mark.parametrize("part", [(5, slice(None)), (slice(None), 5)], ids=["a row", "a column"])
def test_write_to_a_row_or_column_through_data_is_detected(part) -> None:
    """The weights of one token, neuron or head."""
    model = llama(vocab_size=600)
    assert prepack(model) is not None
    assert prepacked_of(model) is not None
    model.lm_head.weight.data[part] *= 3
    assert prepacked_of(model) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own_layers(copied) -> None:
    model = accelerate(llama())
    expected = _texts(model)
    other = copied(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(_texts(other), expected)
    accelerate(other)
    assert prepacked_of(other) is not None
    assert torch.equal(_texts(other), expected)


def test_single_calls_and_blocks_use_packed_weights_but_pack_none(packed_products: list[int]) -> None:
    model = llama()

    def texts() -> list[torch.Tensor]:
        with accelerated(model):
            within = _texts(model)
        return [within, generate(model, PROMPT, max_new_tokens=40, do_sample=False, pad_token_id=0)]

    expected = texts()
    assert not packed_products
    packed = prepack(model)
    packed_products.clear()
    assert all(map(torch.equal, texts(), expected))
    assert packed_products
    assert prepacked_of(model) is packed


class Scaled(nn.Linear):
    """Scales its results, as layers do whose class a library replaces in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(input)


def test_replaced_class_of_a_packed_layer_is_called() -> None:
    """Also in a copy, which has no packed weights."""
    plain = llama()
    packed = accelerate(llama(), prepack=True)
    for model in (plain, packed, copied := copy.deepcopy(packed)):
        model.model.layers[0].mlp.up_proj.__class__ = Scaled
    wanted = plain(PROMPT).logits
    for model in (packed, copied):
        torch.testing.assert_close(model(PROMPT).logits, wanted)
        assert torch.equal(_texts(model), _texts(plain))
        assert model.acceleration.fallback is None


class ByName(LlamaMLP):
    """Calls its layers by the name of their argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(input=self.act_fn(self.gate_proj(input=x)) * self.up_proj(input=x))


def test_packed_layers_can_be_called_by_name(packed_products: list[int]) -> None:
    model = llama()
    wanted = _texts(model)
    for layer in model.model.layers:
        layer.mlp.__class__ = ByName
    assert torch.equal(_texts(accelerate(model, prepack=True)), wanted)
    assert model.acceleration.fallback is None
    assert packed_products


@pytest.mark.falls_back
def test_replaced_function_is_tried_again_with_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed products bypass it."""
    model = llama()
    monkeypatch.setattr(functional, "linear", lambda x, *others, own=functional.linear: own(1.5 * x, *others))
    wanted = _texts(model)
    for packs in (False, True):
        assert torch.equal(_texts(accelerate(model, prepack=packs)), wanted)
        assert (model.acceleration.fallback is not None) == packs


def test_packing_takes_at_most_a_quarter_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    needed = sum(layer.weight.nbytes for layer in _linears(model))
    monkeypatch.setattr(prepacking, "memory", lambda device: 4 * needed - 1)
    assert prepack(model) is None
    assert prepack(model, True) is not None, "unless requested"
    prepack(model, False)
    monkeypatch.setattr(prepacking, "memory", lambda device: 4 * needed)
    assert prepack(model) is not None


def test_packed_weights_are_used_only_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, packed_products: list[int]
) -> None:
    monkeypatch.setattr(prepacking, "_FASTER", 0.97)
    monkeypatch.setattr(
        prepacking, "_seconds", lambda layers, rows, packed: dict.fromkeys(layers, 0.5 if packed and rows >= 4 else 1.0)
    )
    model = accelerate(llama())
    packed_products.clear()
    _texts(model)
    assert packed_products
    assert min(packed_products) >= 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_unsupported_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    assert prepack(model) is None
    with pytest.raises(ValueError, match="no linear layers in float32 or bfloat16"):
        accelerate(model, prepack=True)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 4), pytest.param(torch.bfloat16, 1, marks=BFLOAT16)])
def test_reproducible_calls_measure_nothing(
    dtype: torch.dtype, least: int, packed_products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama().to(dtype)
    prepack(model)
    packed_products.clear()
    generate(model, PROMPT, max_new_tokens=20, do_sample=False, pad_token_id=0, reproducible=True)
    assert not packed_products, "their use depends on measurements"
    monkeypatch.setattr(prepacking, "_seconds", None)
    accelerate(model, reproducible=True)
    packed = prepacked_of(model)
    assert packed.fixed
    assert {layer.least for layer in packed.layers} == {least}
    _texts(model)
    assert packed_products
    assert min(packed_products) >= least
