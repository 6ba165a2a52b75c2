"""SGLang's own NGRAM worker with trees from a matrix, around STAND-INS for its CUDA operations: `nox -s sglang`.

Tested: the algorithm is registered and treated as NGRAM; trees, masks and rows of logits have the form that SGLang's
worker expects; greedy outputs equal those of transformers, with and without overlap. Not tested: anything on a GPU.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from support import tiny

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang has an environment of its own: nox -s sglang", allow_module_level=True)

from support import sglang_standins  # isort: skip (it lets SGLang be imported)

from sglang.srt.speculative import ngram_worker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from token_recycling.engines import sglang as adapter
from token_recycling.engines.engine import EngineOptions, Replica

NODES = 8


@pytest.fixture
def worker(monkeypatch):
    """Return a function that makes the worker with stand-ins for its CUDA operations."""
    sglang_standins.stand_in(monkeypatch.setattr)
    return lambda target, vocab_size: sglang_standins.worker(target, Replica(vocab_size, NODES - 1, EngineOptions()))


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_outputs_equal_those_of_transformers_in_fewer_steps(worker, overlap):
    model = tiny.llama(seed=2)
    prompts = [tiny.prompt(seed, 3 + 5 * seed)[0].tolist() for seed in range(3)]
    scheduler = sglang_standins.Scheduler(model, prompts, NODES, overlap)
    made = worker(scheduler, 64)
    for _ in range(30):
        scheduler.step(made)
    said = [list(request.output_ids) for request in scheduler.requests]
    for prompt, text in zip(prompts, said, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=len(text), do_sample=False)[0, len(prompt) :].tolist()
        assert text == wanted
    assert sum(map(len, said)) > 1.3 * 30 * 3, "more than one token a step"


def test_logits_of_every_node_are_learned(worker):
    """The counting model emits the next number after every node, so logits learned for the wrong token would show."""
    scheduler = sglang_standins.Scheduler(tiny.counting_llama(16), [[3, 4]], NODES, overlap=False)
    made = worker(scheduler, 16)
    for _ in range(24):
        scheduler.step(made)
    matrix = made.trees.recycler.matrix
    assert [matrix.look_up(token)[0][0] for token in range(16)] == [(token + 1) % 16 for token in range(16)]


def test_logits_of_rejected_nodes_are_learned(worker, monkeypatch):
    scheduler = sglang_standins.Scheduler(tiny.llama(seed=2), [[5, 6, 7]], NODES, overlap=False)
    made, learned = worker(scheduler, 64), []
    learn = made.trees.recycler.learn_logits
    monkeypatch.setattr(
        made.trees.recycler, "learn_logits", lambda *given: (learned.extend(given[0].tolist()), learn(*given))
    )
    for _ in range(20):
        scheduler.step(made)
    text = [5, 6, 7, *scheduler.requests[0].output_ids]
    stand_there = {tuple(text[place : place + 3]) for place in range(len(text) - 2)}
    assert any(tuple(context[::-1]) not in stand_there for context in learned)


def test_algorithm_is_registered_and_treated_as_ngram():
    adapter.register()
    algorithm = SpeculativeAlgorithm.from_string("token_recycling")
    assert algorithm.is_ngram()
    assert algorithm.is_speculative()
    assert not algorithm.has_draft_kv()
    assert not algorithm.carries_draft_hidden_states(), "like NGRAM; the base class has no default"
    assert issubclass(algorithm.factory(None), ngram_worker.NGRAMWorker)
    with pytest.raises(ValueError, match="cpu"):
        algorithm.handle_server_args(SimpleNamespace(device="cpu"))


def test_unsupported_version_is_refused(monkeypatch):
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    with pytest.raises(RuntimeError, match=r"SGLang .*got 0\.6\.0"):
        adapter.register()


def test_worker_with_another_signature_is_refused(monkeypatch):
    monkeypatch.setattr(ngram_worker.NGRAMWorker, "_prepare_draft_tokens", lambda self, batches: None)
    with pytest.raises(RuntimeError, match=r"_prepare_draft_tokens .*got \(self, batches\)"):
        adapter.worker_class()
