"""SGLang's own NGRAM worker with trees from a matrix, around STAND-INS for its CUDA operations: `nox -s sglang`.

What is shown: the algorithm is registered and taken for NGRAM; the trees, masks and rows of logits are what SGLang's
worker wants; greedy texts are those of transformers, with results at once and one step later. What is not shown:
anything that runs on a GPU.
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
    """A function that makes the worker, its CUDA operations stood in for."""
    sglang_standins.stand_in(monkeypatch.setattr)
    return lambda target, vocab_size: sglang_standins.worker(target, Replica(vocab_size, NODES - 1, EngineOptions()))


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_texts_are_those_of_transformers_in_fewer_steps(worker, overlap):
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
    assert sum(map(len, said)) > 1.3 * 30 * 3, "more than a token a step"


def test_every_node_teaches_what_follows_it(worker):
    """The counting model says the next number after every node; a row that came to another would show."""
    scheduler = sglang_standins.Scheduler(tiny.counting_llama(16), [[3, 4]], NODES, overlap=False)
    made = worker(scheduler, 16)
    for _ in range(24):
        scheduler.step(made)
    matrix = made.trees.recycler.matrix
    assert [matrix.look_up(token)[0][0] for token in range(16)] == [(token + 1) % 16 for token in range(16)]


def test_rejected_nodes_teach_too(worker, monkeypatch):
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


def test_the_algorithm_is_registered_and_taken_for_ngram():
    adapter.register()
    algorithm = SpeculativeAlgorithm.from_string("token_recycling")
    assert algorithm.is_ngram()
    assert algorithm.is_speculative()
    assert not algorithm.has_draft_kv()
    assert not algorithm.carries_draft_hidden_states(), "as NGRAM, where the base class does not say"
    assert issubclass(algorithm.factory(None), ngram_worker.NGRAMWorker)
    with pytest.raises(ValueError, match="cpu"):
        algorithm.handle_server_args(SimpleNamespace(device="cpu"))


def test_another_version_is_refused(monkeypatch):
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    with pytest.raises(RuntimeError, match=r"SGLang .*got 0\.6\.0"):
        adapter.register()


def test_a_worker_of_another_form_is_refused(monkeypatch):
    monkeypatch.setattr(ngram_worker.NGRAMWorker, "_prepare_draft_tokens", lambda self, batches: None)
    with pytest.raises(RuntimeError, match=r"_prepare_draft_tokens .*got \(self, batches\)"):
        adapter.worker_class()
