"""What one user's texts tell another: nothing where drafters are kept apart, and something where they are shared.

A secret is planted through one key. What another key sees of the server is compared, bit by bit, with what it sees of
one where nothing was planted: every draft, and how many tokens every step brought.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import tiny
from support.cases import thinned
from support.runs import fix_costs, fix_work
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


def seen(server, key=None, **more):
    """All that a client sees of drafting: every step without its time, and the statistics without theirs."""
    (_, *steps, (name, end)) = server.steps(key, **{**ASKED, **more})
    assert name == "end"
    usage = end["usage"]["speculation"]
    counted = {name: usage[name] for name in ("steps", "mat", "drafted_tokens", "accepted_tokens")}
    return [{**data, "seconds": None} for _, data in steps], counted


OTHERS = ("layer_skip:nodes=4", "lookahead", "suffix")
DRAFTERS = thinned(["recycling", "published:tree=chain:4", *OTHERS], kept=lambda one: one not in OTHERS)


@pytest.fixture
def timeless(monkeypatch):
    """What passes and drafting take is as given: trees that are to pay depend on nothing but tokens and logits."""
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    fix_work(monkeypatch)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_another_key_sees_nothing_of_a_secret(model, tokenizer, drafter, timeless):
    settings = {"drafter": drafter, "keys": keys("a", "b"), "isolation": Isolation.per_key}
    drawn = {"temperature": 1.0, "seed": 3}
    with serving(model, tokenizer, **settings) as clean:
        unplanted = [seen(clean, "secret-b"), seen(clean, "secret-b", **drawn)]
    with serving(model, tokenizer, **settings) as server, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for planted in [pool.submit(seen, server, "secret-a", **more) for more in ({}, drawn)]:
                planted.result()
        assert [seen(server, "secret-b"), seen(server, "secret-b", **drawn)] == unplanted


def test_no_request_sees_another_where_each_is_alone(model, tokenizer):
    with serving(model, tokenizer, isolation=Isolation.per_request) as server:
        first = seen(server)
        assert [seen(server) for _ in range(3)] == [first] * 3
        assert server.metrics()["token_recycling_drafters"] == 0


def test_a_shared_drafter_tells(model, tokenizer):
    """The control: the comparison of the tests above finds what is shared."""
    settings = {"keys": keys("a", "b"), "isolation": Isolation.shared}
    with serving(model, tokenizer, **settings) as clean:
        steps, counted = seen(clean, "secret-b")
    with serving(model, tokenizer, **settings) as server:
        seen(server, "secret-a")
        told, more = seen(server, "secret-b")
    assert told != steps
    assert more["mat"] > counted["mat"]


def test_the_request_that_warms_a_server_up_teaches_nobody(model, tokenizer, timeless, monkeypatch):
    """Neither rows nor history: whatever it was, drafts of its own prompt are those of a new drafter."""
    prompt, found = engine._WARM_UP, []
    for warming in (prompt, "for index in range(10):"):
        monkeypatch.setattr(engine, "_WARM_UP", warming)
        with serving(model, tokenizer) as server:
            found.append(seen(server, prompt=prompt))
    assert found[0] == found[1]


# Drafters, without a server


def made(loaded, **more):
    on_save = more.pop("on_save", lambda good: None)
    settings = {"drafter": "recycling:tree=8,orders=2", "isolation": "per-key", "keys": keys("a", "b"), **more}
    return DrafterPool(loaded, Settings(**settings), on_save)


@pytest.fixture
def both(model, tokenizer):
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


def test_a_key_begins_with_the_base_and_is_kept_beside_it(both, tmp_path):
    """Rows and history; neither the base nor its file ever changes."""
    base, file = make_drafter("recycling:tree=8,orders=2"), matrix_path(tmp_path)
    learn(base, 7)
    history(base).extend([7, 8])
    base.matrix.save(file)
    written, drafters = file.read_bytes(), made(both, matrix=file)
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


# The only source is the past: no rows are kept that another request would find, and no text of its own.
PAST_ALONE = "recycling:tree=8,suffix=false,orders=1,k=1"


@pytest.mark.parametrize("isolation", Isolation)
def test_what_another_wrote_is_drafted_only_where_all_is_shared(model, tokenizer, isolation, monkeypatch):
    monkeypatch.setattr("token_recycling.recycling.ngram_matrix.NgramMatrix.learn", lambda *_, **__: None)
    settings = {"drafter": PAST_ALONE, "keys": keys("a", "b"), "isolation": isolation}
    with serving(model, tokenizer, **settings) as server:
        own = [seen(server, "secret-a")[1]["drafted_tokens"] for _ in range(2)]
        others = seen(server, "secret-b")[1]["drafted_tokens"]
    assert bool(own[1] > own[0]) == (isolation is not Isolation.per_request)
    assert bool(others > own[0]) == (isolation is Isolation.shared)


SHARED = {"isolation": Isolation.shared}


def test_a_failure_to_save_is_logged_and_tried_again(both, tmp_path, monkeypatch, caplog):
    outcomes = []
    drafters = made(both, **SHARED, matrix=matrix_path(tmp_path), on_save=outcomes.append)

    def full(*args):
        raise OSError("no space left")

    learn(drafters.acquire("a"), 9)
    with monkeypatch.context() as patch:
        patch.setattr("token_recycling.recycling.ngram_matrix.NgramMatrix.save", full)
        drafters.save()
    assert outcomes == [False]
    assert "no space left" in caplog.text
    for _ in range(2):  # what did not change is not saved again
        drafters.save()
    assert outcomes == [False, True]
    assert learned(made(both, **SHARED, matrix=matrix_path(tmp_path)).acquire("b")) == 9


def test_what_is_learned_while_it_is_saved_is_saved_next_time(both, tmp_path, monkeypatch):
    """It is copied where nobody learns; requests come and learn while it is written."""
    drafters, usual = made(both, **SHARED, matrix=matrix_path(tmp_path)), NgramMatrix.save
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
        assert not beside.is_alive(), "nobody waits while a matrix is written"
        usual(matrix, *args)

    running = drafters.acquire("a")
    learn(running, 9)
    with monkeypatch.context() as patch:
        patch.setattr(NgramMatrix, "save", save)
        drafters.save(True, between_steps)
    assert len(copies) == 1
    for token in (9, 11, 12):
        assert learned(made(both, **SHARED, matrix=matrix_path(tmp_path)).acquire("a")) == token
        if token == 11:
            learn(running, 12)  # by a request that began before the last save
        drafters.save(in_use=True)


def test_what_is_wrong_is_said_at_start(both, tmp_path):
    with pytest.raises(ValueError, match="no matrix file"):
        made(both, isolation=Isolation.per_request, matrix=matrix_path(tmp_path))
    with pytest.raises(ValueError, match="a drafter with a matrix"):
        made(both, drafter="suffix", isolation="shared", matrix=matrix_path(tmp_path))
    matrix_path(tmp_path).write_bytes(b"no matrix")
    with pytest.raises(ValueError, match=str(matrix_path(tmp_path))):
        made(both, matrix=matrix_path(tmp_path))


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
def test_which_isolation_is_chosen(host, with_keys, isolation):
    assert Settings(host=host, keys=keys("a") if with_keys else ()).isolation is isolation
