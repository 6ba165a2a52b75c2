"""Leaks between users: none with separate drafters, some with a shared one.

A secret is sent with one key. All that another key observes, every draft and the number of tokens of every step, is
compared exactly with the same observations on a server that never received the secret.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import tiny
from support.cases import thinned
from support.runs import fix_costs, freeze_overhead
from support.serving import keys, matrix_path, serving

from token_recycling.drafters._registry import make_drafter
from token_recycling.model.loading import Loaded
from token_recycling.model.target import Target
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.serving import engine
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.settings import Isolation, Settings

SECRET = "import os\nfor index in range(10):\n"
ASKED = {"prompt": SECRET, "max_tokens": 24, "temperature": 0}


def observed(server, key=None, **more):
    """Return all that a client observes of drafting: every step and the statistics, without times."""
    (_, *steps, (name, end)) = server.steps(key, **{**ASKED, **more})
    assert name == "end"
    usage = end["usage"]["speculation"]
    counted = {name: usage[name] for name in ("steps", "mat", "drafted_tokens", "accepted_tokens")}
    return [{**data, "seconds": None} for _, data in steps], counted


OTHERS = ("layer_skip:nodes=4", "lookahead", "suffix")
DRAFTERS = thinned(["recycling", "published:tree=chain:4", *OTHERS], kept=lambda one: one not in OTHERS)


@pytest.fixture
def fixed_costs(monkeypatch):
    """Fix the costs of forward passes and of drafting, so that tree sizes depend only on tokens and logits."""
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    freeze_overhead(monkeypatch)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_reveal_nothing_to_another_key(model, tokenizer, drafter, fixed_costs):
    settings = {"drafter": drafter, "keys": keys("a", "b"), "isolation": Isolation.per_key}
    drawn = {"temperature": 1.0, "seed": 3}
    with serving(model, tokenizer, **settings) as clean:
        unplanted = [observed(clean, "secret-b"), observed(clean, "secret-b", **drawn)]
    with serving(model, tokenizer, **settings) as server, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for planted in [pool.submit(observed, server, "secret-a", **more) for more in ({}, drawn)]:
                planted.result()
        assert [observed(server, "secret-b"), observed(server, "secret-b", **drawn)] == unplanted


def test_per_request_isolation_shares_nothing(model, tokenizer):
    with serving(model, tokenizer, isolation=Isolation.per_request) as server:
        first = observed(server)
        assert [observed(server) for _ in range(3)] == [first] * 3
        assert server.metrics()["token_recycling_drafters"] == 0


def test_shared_drafter_leaks(model, tokenizer):
    """Control: the comparison above detects a shared drafter."""
    settings = {"keys": keys("a", "b"), "isolation": Isolation.shared}
    with serving(model, tokenizer, **settings) as clean:
        steps, counted = observed(clean, "secret-b")
    with serving(model, tokenizer, **settings) as server:
        observed(server, "secret-a")
        told, more = observed(server, "secret-b")
    assert told != steps
    assert more["mat"] > counted["mat"]


def test_warm_up_request_is_not_learned(model, tokenizer, fixed_costs, monkeypatch):
    """Neither rows nor history: drafts after this prompt do not depend on the warm-up prompt."""
    prompt, found = engine._WARM_UP, []
    for warming in (prompt, "for index in range(10):"):
        monkeypatch.setattr(engine, "_WARM_UP", warming)
        with serving(model, tokenizer) as server:
            found.append(observed(server, prompt=prompt))
    assert found[0] == found[1]


# Drafters, without a server


def new_pool(loaded, **more):
    on_save = more.pop("on_save", lambda good: None)
    settings = {"drafter": "recycling:tree=8,orders=2", "isolation": "per-key", "keys": keys("a", "b"), **more}
    return DrafterPool(loaded, Settings(**settings), on_save)


@pytest.fixture
def loaded_model(model, tokenizer):
    return Loaded(model, tokenizer)


def matrix_of(drafter):
    return drafter.prepare(Target(tiny.llama(vocab_size=300)))


def learn(drafter, token):
    matrix_of(drafter).candidates[5, 0] = token
    drafter.matrix.shares[5, 0] = 1


def history(drafter):
    return matrix_of(drafter).history


def learned(drafter):
    return int(matrix_of(drafter).candidates[5, 0])


def test_each_key_starts_from_the_base_matrix(loaded_model, tmp_path):
    """Rows and history are kept per key; neither the base nor its file changes."""
    base, file = make_drafter("recycling:tree=8,orders=2"), matrix_path(tmp_path)
    learn(base, 7)
    history(base).extend([7, 8])
    base.matrix.save(file)
    written, drafters = file.read_bytes(), new_pool(loaded_model, matrix=file)
    for name, token in (("a", 100), ("b", 200)):
        drafter = drafters.acquire(name)
        assert learned(drafter) == 7
        learn(drafter, token)
        history(drafter).extend([token])
    drafters.save()
    for name, token, held in (("a", 100, [7, 8, 100]), ("b", 200, [7, 8, 200]), ("c", 7, [7, 8])):
        drafter = drafters.acquire(name)
        assert (learned(drafter), history(drafter).tokens.tolist()) == (token, held)
    assert (learned(drafters.base), history(drafters.base).tokens.tolist()) == (7, [7, 8])
    untrained = drafters.make("untrained")
    assert (learned(untrained) == 7, history(untrained).tokens.tolist()) == (False, [])
    assert (file.read_bytes(), [*tmp_path.iterdir()], len(drafters)) == (written, [file], 3)


# Drafts come only from the history: not from rows that other requests learned, nor from the request's own text.
ONLY_HISTORY = "recycling:tree=8,suffix=false,orders=1,k=1"


@pytest.mark.parametrize("isolation", Isolation)
def test_history_is_shared_only_as_far_as_isolation_allows(model, tokenizer, isolation, monkeypatch):
    monkeypatch.setattr("token_recycling.recycling.ngram_matrix.NgramMatrix.learn", lambda *_, **__: None)
    settings = {"drafter": ONLY_HISTORY, "keys": keys("a", "b"), "isolation": isolation}
    with serving(model, tokenizer, **settings) as server:
        own = [observed(server, "secret-a")[1]["drafted_tokens"] for _ in range(2)]
        others = observed(server, "secret-b")[1]["drafted_tokens"]
    assert bool(own[1] > own[0]) == (isolation is not Isolation.per_request)
    assert bool(others > own[0]) == (isolation is Isolation.shared)


SHARED = {"isolation": Isolation.shared}


def test_failed_save_is_logged_and_retried(loaded_model, tmp_path, monkeypatch, caplog):
    outcomes = []
    drafters = new_pool(loaded_model, **SHARED, matrix=matrix_path(tmp_path), on_save=outcomes.append)

    def full(*args):
        raise OSError("no space left")

    learn(drafters.acquire("a"), 9)
    with monkeypatch.context() as patch:
        patch.setattr("token_recycling.recycling.ngram_matrix.NgramMatrix.save", full)
        drafters.save()
    assert outcomes == [False]
    assert "no space left" in caplog.text
    for _ in range(2):  # an unchanged matrix is not saved again
        drafters.save()
    assert outcomes == [False, True]
    assert learned(new_pool(loaded_model, **SHARED, matrix=matrix_path(tmp_path)).acquire("b")) == 9
    learn(drafters.acquire("a"), 7)
    drafters.save()
    assert outcomes == [False, True, True], "another request may have learned"


def test_learning_during_a_save_is_saved_next_time(loaded_model, tmp_path, monkeypatch):
    """The matrix is copied between steps; requests learn while the copy is written."""
    drafters, usual = new_pool(loaded_model, **SHARED, matrix=matrix_path(tmp_path)), NgramMatrix.save
    copies = []

    def between_steps(copied):
        future = Future()
        future.set_result(copied())
        copies.append(future)
        return future

    def save(matrix, *args):
        beside = threading.Thread(target=lambda: learn(drafters.acquire("a"), 11))
        beside.start()
        beside.join(5)
        assert not beside.is_alive(), "no request waits while a matrix is written"
        usual(matrix, *args)

    running = drafters.acquire("a")
    learn(running, 9)
    with monkeypatch.context() as patch:
        patch.setattr(NgramMatrix, "save", save)
        drafters.save(True, between_steps)
    assert len(copies) == 1
    for token in (9, 11, 12):
        assert learned(new_pool(loaded_model, **SHARED, matrix=matrix_path(tmp_path)).acquire("a")) == token
        if token == 11:
            learn(running, 12)  # by a request that began before the last save
        drafters.save(in_use=True)


def test_unusable_matrix_settings_are_refused(loaded_model, tmp_path):
    with pytest.raises(ValueError, match="no matrix file"):
        new_pool(loaded_model, isolation=Isolation.per_request, matrix=matrix_path(tmp_path))
    with pytest.raises(ValueError, match="a drafter with a matrix"):
        new_pool(loaded_model, drafter="suffix", isolation="shared", matrix=matrix_path(tmp_path))
    matrix_path(tmp_path).write_bytes(b"no matrix")
    with pytest.raises(ValueError, match=str(matrix_path(tmp_path))):
        new_pool(loaded_model, matrix=matrix_path(tmp_path))


@pytest.mark.parametrize(
    ("host", "with_keys", "isolation"),
    [
        ("127.0.0.1", False, Isolation.shared),
        ("::1", False, Isolation.shared),
        ("127.0.0.1", True, Isolation.per_key),
        ("0.0.0.0", False, Isolation.per_request),
        ("::", False, Isolation.per_request),
        ("example.org", False, Isolation.per_request),
        ("0.0.0.0", True, Isolation.per_key),
    ],
)
def test_default_isolation(host, with_keys, isolation):
    settings = Settings(host=host, keys=keys("a") if with_keys else ())
    assert settings.isolation is isolation
    assert settings.isolate_forwarded == (isolation is Isolation.shared), "a key's requests may come through a proxy"


def test_per_key_isolation_needs_a_key_of_a_user():
    with pytest.raises(ValueError, match="needs an API key"):
        Settings(keys=keys("metrics"), isolation="per-key")
