"""Models quantized by other libraries: weight-only quantization is accelerated; inexact kernels are refused."""

from pathlib import Path

import pytest
import torch
import transformers

import token_recycling as tr

MODELS = Path(__file__).parents[2] / "models"
COARSE = "depend on how many tokens are read at once"


@pytest.mark.parametrize("config", ["IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(config, fresh, assert_same_text):
    torchao = pytest.importorskip("torchao.quantization")
    model = fresh()
    torchao.quantize_(model, getattr(torchao, config)())
    assert_same_text(model)


def test_torchao_through_transformers(fresh, assert_same_text):
    torchao = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    assert_same_text(fresh(quantization_config=config))


@pytest.mark.parametrize("config", ["Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig"])
def test_torchao_with_activations_is_refused(config, fresh):
    """Rounding to 8 bits amplifies the last bits of a product, which depend on the number of rows."""
    torchao = pytest.importorskip("torchao.quantization")
    model = fresh()
    torchao.quantize_(model, getattr(torchao, config)())
    with pytest.raises(tr.UnsupportedModelError, match=COARSE):
        tr.accelerate(model)


def four_bits(kind, **more):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **more)


DOUBLE = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}


@pytest.mark.parametrize(("kind", "more"), [("nf4", DOUBLE), ("fp4", {"bnb_4bit_compute_dtype": torch.float32})])
def test_bitsandbytes_in_4_bits_is_refused_or_exact(kind, more, fresh, assert_same_text):
    """With AVX-512 its kernel for few tokens rounds to bfloat16; otherwise products are torch's."""
    model = fresh(quantization_config=four_bits(kind, **more), device_map="cpu")
    try:
        assert_same_text(model)
    except tr.UnsupportedModelError as error:
        assert COARSE in str(error)  # noqa: PT017


def test_bitsandbytes_8_bit_is_refused(fresh):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(tr.UnsupportedModelError, match=COARSE):
        tr.accelerate(fresh(quantization_config=config, device_map="cpu"))


@pytest.mark.parametrize("kind", ["qint8", "qint2", "qfloat8"])
def test_quanto(kind, fresh, assert_same_text):
    quanto = pytest.importorskip("optimum.quanto")
    model = fresh()
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    assert_same_text(model)


def test_quanto_with_calibrated_activations(fresh, assert_same_text):
    quanto = pytest.importorskip("optimum.quanto")
    model = fresh()
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    with torch.no_grad(), quanto.Calibration():
        model(torch.arange(1, 65)[None])
    quanto.freeze(model)
    assert_same_text(model)


def test_quanto_through_transformers(fresh, assert_same_text):
    pytest.importorskip("optimum.quanto")
    assert_same_text(fresh(quantization_config=transformers.QuantoConfig(weights="int8")))


def test_gptq(assert_same_text, tmp_path, monkeypatch):
    gptqmodel = pytest.importorskip("gptqmodel")
    monkeypatch.chdir(tmp_path)  # it writes a log to the current folder
    prompts = sorted((MODELS / "prompts").glob("*.py"))[:8]
    model = gptqmodel.GPTQModel.load(str(MODELS / "target"), gptqmodel.QuantizeConfig(bits=4, group_size=32))
    model.quantize([prompt.read_text(encoding="utf-8") for prompt in prompts], batch_size=1)
    model.save("quantized")
    how = {"device_map": "cpu", "dtype": torch.float32}
    assert_same_text(transformers.AutoModelForCausalLM.from_pretrained("quantized", **how))
