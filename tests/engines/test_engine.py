"""Shared parts of the engine adapters, without an engine: options, sequences, chains and trees, files."""

import json
import os
import subprocess
import sys
import tomllib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cases import paired, thinned
from support.pages_of_docs import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from token_recycling._util.topk import packed_candidates
from token_recycling.engines import engine
from token_recycling.engines.engine import EngineOptions, Replica, StepCosts
from token_recycling.engines.vllm import expand_batch_to_tokens, expands
from token_recycling.recycling.ngram_matrix import NgramMatrix

VOCABULARY = 16


def counting(tokens):
    """Logits (n, 16) of a model that counts: after token t come t + 1, t + 2, ..."""
    following = (torch.tensor(tokens)[:, None] + 1 + torch.arange(VOCABULARY)) % VOCABULARY
    return torch.empty(len(tokens), VOCABULARY).scatter_(
        1, following, torch.linspace(6, -6, VOCABULARY).repeat(len(tokens), 1)
    )


def chain_replica(**options):
    return Replica(VOCABULARY, 6, EngineOptions.parse({"k": 4, **options}), chains=True)


def draft_chain(recycler, record, tokens, depth=6):
    """Return the tokens drafted for a request."""
    read = np.array(tokens)
    return recycler.recycler_of(record, read).draft(read, depth)["token"][1:].tolist()


def learned_replica(**options):
    """Return a replica that has learned the counting model's logits after every token."""
    recycler = chain_replica(**options)
    ngrams = np.full((VOCABULARY, recycler.options.orders), -1)
    ngrams[:, 0] = np.arange(VOCABULARY)
    recycler.learn_logits(ngrams, counting(list(range(VOCABULARY))))
    return recycler


def test_another_sequence_of_a_request_is_read_from_its_start():
    """As after a preemption whose tokens change; the earlier sequence ended with another token at that place."""
    drafts, other = [], [1, 2, 3, 9, 1, 2, 3]
    for again in (True, False):
        recycler, request = chain_replica(), SimpleNamespace()
        draft_chain(recycler, request, [5, 6, 7])
        drafts.append(draft_chain(recycler, request if again else SimpleNamespace(), other))
    assert drafts[0] == drafts[1] != []


def test_chain_follows_the_best_candidates_up_to_its_limit():
    recycler, request = learned_replica(), SimpleNamespace()
    assert draft_chain(recycler, request, [9, 3, 4]) == [5, 6, 7, 8, 9, 10]
    assert draft_chain(recycler, request, [9, 3, 4], 2) == [5, 6]
    assert len(draft_chain(recycler, request, [9, 3, 4], 99)) == 6, "no more tokens than the engine verifies"


def test_sequence_that_is_not_a_continuation_is_read_again():
    recycler, request = chain_replica(), SimpleNamespace()
    draft_chain(recycler, request, [1, 9, 5, 2, 1, 9])
    assert draft_chain(recycler, request, [1, 9, 5]) == []
    assert draft_chain(recycler, request, [7, 3, 7, 3, 7, 3, 7, 3], 2) == [7, 3]


def test_whole_output_of_an_ended_request_is_drafted():
    """The last tokens are recorded when the request is deleted or replaced by another sequence."""
    recycler, request, text = chain_replica(k=1, orders=1), SimpleNamespace(), [1, 2, 3, *range(5, 16), 4]
    draft_chain(recycler, request, text[:3])
    draft_chain(recycler, request, text)
    assert draft_chain(recycler, SimpleNamespace(), text[:10]) == [], "the request may continue"
    del request
    assert draft_chain(recycler, SimpleNamespace(), text[:10]) == text[10:]
    again = SimpleNamespace()
    for other in ([1, 2, 9], [1, 2, 9, 12, 7, 4, 8, 14], [8, 8, 8]):
        draft_chain(recycler, again, other)
    assert draft_chain(recycler, SimpleNamespace(), [1, 2, 9, 12])[:4] == [7, 4, 8, 14]


def test_recorder_of_an_ended_request_is_freed():
    replica = chain_replica()
    recorder = weakref.ref(replica.begin(np.array([3, 4])).recorder)
    for _ in range(2):  # the first recognizes the end of a request
        replica.begin(np.array([5]))
    assert recorder() is None


def test_outcome_of_a_draft_is_counted_once():
    """It is counted with the next draft or at the end, and not at all if the draft was not verified."""
    replica = learned_replica(suffix=False)
    recycler, calibration = replica.begin(np.array([3, 4])), replica.matrix.calibration
    recycler.draft(np.array([3, 4]), 6)
    recycler.observe([5, 6], ends=False)
    recycler.observe([9], ends=False)
    assert not calibration.any()
    recycler.draft(np.array([3, 4, 5, 6, 9]), 6)
    counted = calibration.copy()
    assert counted.sum(axis=0).tolist() == [3, 12]
    recycler.forget_draft()
    recycler.draft(np.array([3, 4, 5, 6, 9, 10]), 6)
    np.testing.assert_array_equal(calibration, counted)
    recycler.observe([11], ends=True)
    recycler.observe([12], ends=True)
    assert calibration.sum(axis=0).tolist() == [4, 16], "11 is one of the four candidates after 10"


def test_matrix_stays_unchanged_without_learning():
    frozen, request = chain_replica(learns=False), SimpleNamespace()
    frozen.learn_logits(np.array([[1, -1, -1]]), counting([1]))
    draft_chain(frozen, request, [1, 2, 1])
    draft_chain(frozen, request, [1, 2, 1, 2])
    assert not frozen.matrix.filled.any()
    assert not frozen.matrix.calibration.any()
    assert not len(frozen.matrix.history)


class Event:
    """STAND-IN for a CUDA event."""

    def __init__(self, device):
        self.said = []

    def record(self):
        self.said.append("recorded")

    def synchronize(self):
        self.said.append("waited for")


def test_logits_on_a_gpu_are_learned_a_step_later_and_before_saving(monkeypatch, tmp_path):
    """Logits on the CPU are declared to be on a CUDA device."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(engine, "packed_candidates", lambda logits, k: packed_candidates(logits.told, k))
    recycler, ngrams = chain_replica(matrix=str(tmp_path / "m")), np.full((2, 3), -1)
    for step in range(3):
        ngrams[:, 0] = step, 10 + step
        shown = SimpleNamespace(told=counting([9, 10 + step]), device=torch.device("cuda"))
        recycler.observe_logits(ngrams[1:].copy(), shown, np.array([1]))
        assert recycler._observed[-1].arrived.said == ["recorded"]
        recycler.learn_observed(newest=False)
        assert recycler.matrix.filled.nonzero()[0].tolist() == list(range(10, 10 + step)), "at most the previous step"
    recycler.save()
    assert [recycler.matrix.look_up(token)[0][0] for token in (10, 11, 12)] == [11, 12, 13]


class OperationRecorder(TorchDispatchMode):
    """Records operations that synchronize with a device, and copies to the host."""

    def __init__(self):
        super().__init__()
        self.waits, self.copies = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits.append(func)
        if func == torch.ops.aten._to_copy.default and str((kwargs or {}).get("device")) == "cpu":
            self.copies.append((tuple(made.shape), made.dtype, kwargs.get("non_blocking")))
        return made


def test_observing_on_a_gpu_is_one_asynchronous_copy_of_candidates(monkeypatch):
    """48 requests with 16 rows each, as fake tensors on a CUDA device."""
    monkeypatch.setattr(torch, "Event", Event)
    recycler, rows = Replica(49_152, 15, EngineOptions()), np.arange(0, 768, 2)
    with FakeTensorMode(), OperationRecorder() as seen:
        logits = torch.empty(768, 50_000, device="cuda", dtype=torch.bfloat16).narrow(1, 0, 49_152)
        recycler.observe_logits(np.zeros((len(rows), 3), np.int64), logits, rows)
    assert seen.copies == [((2, 768, 8), torch.int32, True)]
    assert not seen.waits


def test_matrix_file_of_an_engine_can_be_read_by_the_package(tmp_path):
    path = tmp_path / "folder" / "engine.matrix"
    first = learned_replica(matrix=str(path))
    first.save()
    read = NgramMatrix(VOCABULARY, k=4)
    read.load(path)
    assert np.array_equal(read.candidates, first.matrix.candidates)
    again = Replica(VOCABULARY, 6, EngineOptions(k=4, matrix=str(path)))
    assert again.matrix.look_up(3) == first.matrix.look_up(3)


def test_unusable_matrix_file_is_refused_at_start(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no matrix file .*learns is false"):
        Replica(VOCABULARY, 6, EngineOptions(k=4, learns=False, matrix=str(tmp_path / "missing")))
    monkeypatch.setattr("token_recycling.engines.engine.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="needs safetensors"):
        Replica(16, 4, EngineOptions(matrix=str(tmp_path / "matrix")))


def test_one_process_saves_new_content_at_intervals(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("token_recycling.engines.engine.time.monotonic", lambda: now[0])
    path = tmp_path / "engine.matrix"
    recycler = learned_replica(matrix=str(path))
    now[0] = 129.0
    recycler.save_if_due()
    assert not path.exists()
    now[0] = 130.0
    recycler.save_if_due()
    assert path.exists()
    path.unlink()
    recycler.save()
    other = Replica(VOCABULARY, 6, recycler.options, saves=False)
    other.learn_logits(np.array([[1, -1, -1]]), counting([1]))
    other.save()
    assert not path.exists(), "nothing new was learned, and other processes do not write"


def test_failed_save_is_logged_and_retried(tmp_path, caplog):
    path = tmp_path / "file" / "engine.matrix"
    recycler = learned_replica(matrix=str(path))
    (tmp_path / "file").write_text("no folder")
    recycler.save()
    assert "could not be saved" in caplog.text
    (tmp_path / "file").unlink()
    recycler.save()
    assert path.exists()


@pytest.mark.parametrize("tokens", thinned([np.int64, np.int32], every=2))
def test_warm_up_compiles_and_leaves_no_trace(tokens, tmp_path):
    """Engines have token ids of 32 bits, which need their own compilation."""
    recycler = Replica(VOCABULARY, 6, EngineOptions(matrix=str(tmp_path / "m")))
    recycler.warm_up(tokens)
    assert not recycler.matrix.filled.any()
    assert not len(recycler.matrix.history)
    assert not list(tmp_path.iterdir())


def test_values_are_expanded_to_the_tokens_of_their_request():
    assert expands(expand_batch_to_tokens)
    assert not expands(lambda x, cu_num_tokens, num_tokens, **_: torch.full((num_tokens,), 0.25))
    top_k = expand_batch_to_tokens(torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 2]), 2)
    assert top_k.tolist() == [5, 5]
    assert top_k.dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 2}, "'order'"),
        ({"k": "8"}, "k .*'8'"),
        ({"suffix": 1}, "suffix .*1"),
        ({"token_cost": 1}, "token_cost"),
        ("k=8", "'k=8'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        EngineOptions.parse(options)


ALONE = """
import importlib.metadata, sys

ALLOWED = {"numpy", "numba", "llvmlite", "filelock", "token_recycling", "llama_cpp"}
OTHERS = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()} - ALLOWED
assert {"torch", "transformers", "safetensors"} <= OTHERS


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"{name} is refused here", name=name)


sys.meta_path.insert(0, Refuse())

import numpy as np
import token_recycling.engines.llama_cpp
from token_recycling.engines.engine import EngineOptions, Replica

recycler = Replica(16, 6, EngineOptions(k=4), chains=True)
recycler.learn_logits(np.array([[3, -1, -1]]), np.eye(16, dtype=np.single)[[5]])
read = np.array([9, 3])
print(recycler.begin(read).draft(read, 6)["token"][1])
"""


@pytest.mark.nightly
def test_llama_cpp_needs_no_torch_transformers_or_safetensors(tmp_path):
    """Its names are STAND-INS, in a process that refuses packages other than numpy, numba and filelock."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text('__version__ = "0.3.36"')
    (tmp_path / "llama_cpp" / "llama_speculative.py").write_text("LlamaDraftModel = object")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    ran = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["5"]


def learned_costs(seconds, steps=400, most=64, token_cost=0.06):
    """Return costs learned from steps of all sizes that take `seconds(tokens)`, every 20th three times as long."""
    costs, random = StepCosts(0.01 * (1 + token_cost * np.arange(most))), np.random.default_rng(5)
    for step in range(steps):
        tokens = int(random.integers(1, 25))
        costs.record_time(tokens, seconds(tokens) * random.lognormal(0, 0.05) * (3 if step % 20 == 0 else 1))
    return costs


@pytest.mark.measured
def test_falling_costs_are_learned_and_drafts_are_extended_to_the_cheapest_step():
    """As measured with vLLM's CPU build in float32: two tokens take longer than one, three to six take least."""
    measured = {1: 0.050, 2: 0.061, **dict.fromkeys(range(3, 7), 0.043)}
    costs = learned_costs(lambda tokens: measured.get(tokens, 0.050 + 0.003 * (tokens - 7)))
    assert costs.seconds[1] > costs.seconds[0] > 1.05 * costs.seconds[4]
    assert 3 <= costs.filled(1, 25) <= 6
    assert 3 <= costs.filled(2, 25) <= 6
    assert costs.filled(12, 12) == 12
    assert np.all(np.diff(costs.cheapest) >= 0)
    assert np.all(costs.cheapest <= costs.seconds)


@pytest.mark.measured
@pytest.mark.parametrize(("dearer", "stops"), [(1.9, True), (1.2, False)])
def test_drafts_that_lose_time_stop_and_drafts_that_gain_continue(dearer, stops):
    """A token with a forecast of 0.95 is accepted three times in five; a step of two takes 1.9 or 1.2 times as long."""
    costs, forecast = StepCosts(np.array([1.0, dearer])), np.array([0.95], np.float32)
    lost = drafted = 0.0
    for step in range(200):
        (nodes,) = costs.paying([forecast])
        drafted += nodes - 1
        accepted = int(nodes > 1 and step % 5 < 3)
        costs.record_time(nodes, (1.0, dearer)[nodes - 1])
        costs.record_outcome(1, nodes, nodes - 1, accepted)
        lost += (1.0, dearer)[nodes - 1] - 1 - accepted
    assert (drafted < 20) == stops
    assert lost < 0.04 * 200


@pytest.mark.measured
def test_fewer_drafts_are_sent_after_losses_until_many_steps_have_passed():
    """One of four tokens is accepted, in steps of five that take four times as long as steps of one."""
    costs, likely = StepCosts(np.array([1.0, 1.6, 4.0, 4.0, 4.0])), [np.array([0.9])]
    assert costs.paying(likely) == [2]
    for _ in range(20):
        costs.record_outcome(1, 5, 4, 1)
    assert costs.paying(likely) == [1]
    for _ in range(5 * 256):
        costs.record_outcome(1, 1, 0, 0)
    assert costs.paying(likely) == [2]


@pytest.mark.measured
def test_tokens_of_several_drafts_are_verified_if_they_pay():
    """Three tokens take 1.4, each further one 0.2: a probability of 0.43 pays. Forecasts have been correct so far."""
    costs = StepCosts(1 + 0.2 * np.arange(20))
    for _ in range(300):
        costs.record_outcome(1, 2, 1, 1)
    assert costs.paying([np.array([0.99, 0.98, 0.1]), np.array([0.2]), np.empty(0)]) == [3, 1, 1]
    assert costs.paying([np.empty(0)]) == [1]


ENTRY = """
import importlib.metadata, json, logging, sys
logging.basicConfig(level=0)
import sglang
sys.argv[1:] = json.loads(sys.argv[1])
entries = importlib.metadata.entry_points(group="sglang.srt.plugins")
(entry,) = [entry for entry in entries if entry.dist.name == "plugin"]
entry.load()()
print("heavy" if {"numba", "torch"} & {*sys.modules} else "light")
"""
PLUGIN = """[sglang.srt.plugins]
token_recycling = token_recycling.engines:register_sglang
"""


RELEASES = ["0.4.9", "0.5.22", "0.5.24", "0.6.0rc1", "1.0"]
OTHERS: list[list[str]] = [[], ["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm=EAGLE3"]]


@pytest.mark.parametrize(("release", "arguments"), paired(RELEASES, OTHERS))
def test_sglang_start_without_the_algorithm_is_silent(release, arguments, tmp_path):
    """An EMPTY MODULE stands in for SGLang: any use of it would raise."""
    ran = start_of_sglang(release, arguments, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "light\n", "")


@pytest.mark.parametrize(
    "arguments", thinned([["--speculative-algorithm", "TOKEN_RECYCLING"], ["-x=token_recycling"]], every=2)
)
def test_start_of_an_unsupported_sglang_with_the_algorithm_names_the_supported_ones(arguments, tmp_path):
    ran = start_of_sglang("0.5.24", arguments, tmp_path)
    assert "SGLang must be >= 0.5.23 and < 0.5.24, got 0.5.24" in ran.stderr


def start_of_sglang(release, arguments, path):
    """Run the plug-in's entry point, as in pyproject.toml, in a process of SGLang."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"] == {
        "token_recycling": "token_recycling.engines:register_sglang"
    }
    (path / "sglang").mkdir()
    (path / "sglang" / "__init__.py").write_text(f"__version__ = {release!r}")
    for name, files in (("sglang", {}), ("plugin", {"entry_points.txt": PLUGIN})):
        folder = path / f"{name}-{release}.dist-info"
        folder.mkdir()
        for file, text in {"METADATA": f"Name: {name}\nVersion: {release}\n", **files}.items():
            (folder / file).write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT)))}
    command = [sys.executable, "-c", ENTRY, json.dumps(arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
