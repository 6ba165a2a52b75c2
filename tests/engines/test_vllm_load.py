"""Checks when vLLM loads the proposer, without an engine: versions, signatures, configurations."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: nox -s vllm")

import vllm
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from token_recycling.engines import vllm as adapter


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """vLLM registers its kernels when an engine is made; without one they cannot be called."""
    monkeypatch.setattr(adapter, "_repair_cpu_sampler", lambda: None)


def config(**parallel):
    """Return the fields of vLLM's configuration that are read."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"pipeline_parallel_size": 1, "data_parallel_rank": 0, "data_parallel_index": 0, "rank": 0, **parallel}
        ),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: 32,
            max_model_len=64,
            skip_tokenizer_init=True,
            is_hybrid=False,
            is_attention_free=False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=False),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("version", "known"), [("0.21.2", False), ("0.22.0", True), ("0.33.0rc1+cpu", True), ("0.34.0", False)]
)
def test_unsupported_versions_are_refused(version, known, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    if known:
        adapter.VLLM(config())
        return
    with pytest.raises(RuntimeError, match=f"vLLM .*got {version}"):
        adapter.VLLM(config())


def config_with(path, value):
    """Return a configuration with one value replaced."""
    made = config()
    part, _, name = path.rpartition(".")
    setattr(getattr(made, part) if part else made, name, value)
    return made


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size.*2"),
        ("model_config.is_hybrid", True, "recurrent layers"),
        ("model_config.is_attention_free", True, "recurrent layers"),
        ("scheduler_config.async_scheduling", True, "model runner V1"),
        ("use_v2_model_runner", True, "model runner V1"),
        ("additional_config", {"token_recycling": {"tree": 8}}, "'tree'"),
    ],
)
def test_unsupported_configurations_are_refused(path, value, match):
    with pytest.raises(ValueError, match=match):
        adapter.VLLM(config_with(path, value))


def test_predicted_text_is_ignored_without_a_tokenizer():
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"prediction": "text"}))
    assert adapter.VLLM(config())._predicted(request) == ()


def test_changed_signature_is_refused(monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self, logits, metadata, more: None)
    with pytest.raises(RuntimeError, match=r"_sample .*got \(self, logits, metadata, more\)"):
        adapter.VLLM(config())


def test_missing_attribute_is_refused_at_load(monkeypatch):
    monkeypatch.setattr(InputBatch, "__init__", lambda self: setattr(self, "req_ids", []))
    with pytest.raises(RuntimeError, match=r"InputBatch.*num_computed_tokens_cpu, token_ids_cpu"):
        adapter.VLLM(config())


@pytest.mark.parametrize(("ranks", "writes"), [({}, True), ({"rank": 1}, False), ({"data_parallel_index": 1}, False)])
def test_only_one_process_writes_the_file(ranks, writes, tmp_path):
    made = config(**ranks)
    made.additional_config = {"token_recycling": {"matrix": str(tmp_path / "m")}}
    recycler = adapter.VLLM(made).recycler
    recycler.matrix.shares[3] = 1
    recycler.matrix.lessons = 1
    recycler.save()
    assert (tmp_path / "m").exists() == writes


def test_hook_is_installed_once_and_ignores_other_drafters(monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self, logits, spec_decode_metadata: (logits, "sampled"))
    adapter.VLLM(config())
    hooked = GPUModelRunner._sample
    adapter.VLLM(config())
    assert GPUModelRunner._sample is hooked
    assert hooked(SimpleNamespace(drafter="another"), 5, None) == (5, "sampled")
    assert hooked(SimpleNamespace(), None, None) == (None, "sampled")


def test_proposer_does_not_import_transformers():
    """vLLM requires another version of transformers than the rest of the package."""
    asked = "import sys, token_recycling.engines.vllm; print([m for m in sys.modules if m.startswith('transformers')])"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
