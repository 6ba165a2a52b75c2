"""What is checked when vLLM loads the proposer, without an engine: versions, signatures, configurations."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import vllm
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from token_recycling.engines import vllm as adapter
from token_recycling.engines.versions import check_version


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    """vLLM puts its kernels in place when an engine is made; without one they cannot be tried."""
    monkeypatch.setattr(adapter, "_repair_cpu_sampler", lambda: None)


def config(**parallel):
    """As much of vLLM's configuration as is asked for."""
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


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0", "0.33.1", "0.33.0rc1+cpu"])
def test_known_versions_are_taken(version):
    check_version("vLLM", version, adapter.LOWEST, adapter.BEYOND)


@pytest.mark.parametrize("version", ["0.21.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=r"expected vLLM from 0\.22 to before 0\.34.*got " + version):
        adapter.TokenRecycling(config())


def test_another_signature_is_refused(monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self, logits, metadata, more: None)
    with pytest.raises(RuntimeError, match=r"expected GPUModelRunner\._sample\(self, logits, spec_decode_metadata\)"):
        adapter.TokenRecycling(config())


def test_stages_in_a_pipeline_are_refused():
    with pytest.raises(ValueError, match=r"pipeline_parallel_size.*2"):
        adapter.TokenRecycling(config(pipeline_parallel_size=2))


@pytest.mark.parametrize("kind", ["is_hybrid", "is_attention_free"])
def test_models_with_recurrent_layers_are_refused(kind):
    recurrent = config()
    setattr(recurrent.model_config, kind, True)
    with pytest.raises(ValueError, match="recurrent layers"):
        adapter.TokenRecycling(recurrent)


def test_the_second_runner_and_asynchronous_scheduling_are_refused():
    """vLLM itself chooses neither for a proposer of its users, unless it is told to."""
    asynchronous = config()
    asynchronous.scheduler_config.async_scheduling = True
    second = config()
    second.use_v2_model_runner = True
    for wrong in (asynchronous, second):
        with pytest.raises(ValueError, match="model runner V1"):
            adapter.TokenRecycling(wrong)


def test_the_runner_is_said_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(adapter, "logger", logging.getLogger("said"))
    caplog.set_level(logging.INFO, "said")
    adapter.TokenRecycling(config())
    assert "V1" in caplog.text


def test_an_attribute_that_is_read_while_decoding_and_is_missing_is_refused_at_load(monkeypatch):
    monkeypatch.setattr(InputBatch, "__init__", lambda self: setattr(self, "req_ids", []))
    with pytest.raises(RuntimeError, match=r"InputBatch.*num_computed_tokens_cpu, token_ids_cpu"):
        adapter.TokenRecycling(config())


def test_wrong_options_are_refused():
    wrong = config()
    wrong.additional_config = {"token_recycling": {"tree": 8}}
    with pytest.raises(ValueError, match=r"token_recycling has no option 'tree'"):
        adapter.TokenRecycling(wrong)


@pytest.mark.parametrize(("ranks", "writes"), [({}, True), ({"rank": 1}, False), ({"data_parallel_index": 1}, False)])
def test_one_process_of_all_writes_the_file(ranks, writes, tmp_path):
    made = config(**ranks)
    made.additional_config = {"token_recycling": {"matrix": str(tmp_path / "m")}}
    recycler = adapter.TokenRecycling(made).recycler
    recycler.matrix.shares[3] = 1
    recycler.lessons = 1
    recycler.save()
    assert (tmp_path / "m").exists() == writes


def test_the_hook_is_put_in_once_and_leaves_others_alone(monkeypatch):
    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self, logits, spec_decode_metadata: (logits, "sampled"))
    adapter.TokenRecycling(config())
    hooked = GPUModelRunner._sample
    adapter.TokenRecycling(config())
    assert GPUModelRunner._sample is hooked
    assert hooked(SimpleNamespace(drafter="another"), 5, None) == (5, "sampled")
    assert hooked(SimpleNamespace(), None, None) == (None, "sampled")


def test_the_proposer_needs_nothing_of_transformers():
    """vLLM wants another version than the rest of the package does."""
    asked = "import sys, token_recycling.engines.vllm; print([m for m in sys.modules if m.startswith('transformers')])"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
