"""What one user's texts tell another: nothing where drafters are kept apart, and something where they are shared.

A secret is planted through one key. What another key sees of the server is compared, bit by bit, with what it sees of
one where nothing was planted: every draft, and how many tokens every step brought.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from support import tiny
from support.runs import fix_costs, fix_work
from support.serving import keys, matrix_path, serving

from token_recycling.drafters._registry import make_drafter
from token_recycling.model.loading import Loaded
from token_recycling.model.tree_model import TreeModel
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.settings import Isolation, default_isolation

SECRET = "import os\nfor index in range(10):\n"
ASKED = {"prompt": SECRET, "max_tokens": 40, "temperature": 0}


def seen(server, key=None, **more):
    """All that a client sees of drafting: every step without its time, and the statistics without theirs."""
    (_, *steps, (name, end)) = server.steps(key, **{**ASKED, **more})
    assert name == "end"
    usage = end["usage"]["speculation"]
    counted = {name: usage[name] for name in ("steps", "mat", "drafted_tokens", "accepted_tokens")}
    return [{**data, "seconds": None} for _, data in steps], counted


OTHERS = ("layer_skip:nodes=4", "lookahead", "suffix")
DRAFTERS = ["recycling", "published:tree=chain:4", *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)]


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


# Drafters, without a server


def made(loaded, **more):
    return DrafterPool(loaded, "recycling:tree=8,orders=2", **{"isolation": Isolation.per_key, **more})


@pytest.fixture
def both(model, tokenizer):
    return Loaded(model, tokenizer)


def matrix_of(drafter):
    return drafter.prepare(TreeModel(tiny.llama(vocab_size=300)))


def learn(drafter, token):
    matrix_of(drafter).candidates[5, 0] = token
    drafter.matrix.shares[5, 0] = 1


def history(drafter):
    return matrix_of(drafter).history


def learned(drafter):
    return int(matrix_of(drafter).candidates[5, 0])


def test_a_key_begins_with_the_base_and_is_kept_beside_it(both, tmp_path):
    """Rows and past, after a restart too; the base never changes."""
    base, file = make_drafter("recycling:tree=8,orders=2"), matrix_path(tmp_path)
    learn(base, 7)
    history(base).extend([7, 8])
    base.matrix.save(file)
    written, drafters = file.read_bytes(), made(both, matrix=file)
    for name, token in (("a", 100), ("b", 200)):
        with drafters.acquire(name) as drafter:
            assert learned(drafter) == 7
            learn(drafter, token)
            history(drafter).extend([token])
    drafters.save()
    for pool in (drafters, made(both, matrix=file)):
        for name, token, held in (("a", 100, [7, 8, 100]), ("b", 200, [7, 8, 200]), ("c", 7, [7, 8])):
            with pool.acquire(name) as drafter:
                assert (learned(drafter), history(drafter).tokens.tolist()) == (token, held)
    assert (learned(drafters.base), history(drafters.base).tokens.tolist()) == (7, [7, 8])
    assert file.read_bytes() == written
    assert drafters.file("a").parent == tmp_path / "learned.matrix.keys"


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


def test_the_key_used_longest_ago_makes_room(both, tmp_path):
    for matrix, kept in ((None, 0), (matrix_path(tmp_path), 11)):
        drafters = made(both, max_keys=2, matrix=matrix)
        for token, name in enumerate("abac", start=10):
            with drafters.acquire(name) as drafter:
                learn(drafter, token)
        assert len(drafters) == 2
        with drafters.acquire("a") as drafter:
            assert learned(drafter) == 12
        with drafters.acquire("b") as drafter:
            assert learned(drafter) == kept


def test_one_that_cannot_be_saved_is_kept(both, tmp_path, monkeypatch, caplog):
    outcomes = []
    drafters = made(both, max_keys=1, matrix=matrix_path(tmp_path), on_save=outcomes.append)

    def full(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("token_recycling.recycling.ngram_matrix.NgramMatrix.save", full)
        for name in "ab":
            with drafters.acquire(name) as drafter:
                learn(drafter, 9)
    assert (len(drafters), outcomes) == (2, [False])
    assert "no space left" in caplog.text
    for _ in range(2):  # what did not change is not saved again
        drafters.save()
    assert outcomes == [False, True, True]


def test_what_is_learned_after_a_save_in_the_midst_of_a_request_is_saved_too(both, tmp_path):
    """By the next save, and by making room."""
    for end in (lambda drafters: drafters.save(), lambda drafters: drafters.acquire("b").__enter__()):
        drafters = made(both, max_keys=1, matrix=matrix_path(tmp_path))
        with drafters.acquire("a") as drafter:
            learn(drafter, 9)
            drafters.save()
            learn(drafter, 11)
        end(drafters)
        with made(both, matrix=matrix_path(tmp_path)).acquire("a") as drafter:
            assert learned(drafter) == 11


def test_nobody_waits_while_a_matrix_is_written(both, tmp_path, monkeypatch):
    """It is copied where nobody learns, one at a time; the key is used meanwhile, and what it learns is not lost."""
    drafters, at_rest, written = made(both, max_keys=1, matrix=matrix_path(tmp_path)), [], []
    usual = NgramMatrix.save

    def copied(copying):
        called = Future()
        called.set_result(copying())
        at_rest.append(called)
        return called

    def save(matrix, *args):
        def meanwhile():
            with drafters.acquire("a") as drafter:
                learn(drafter, 11)

        beside = threading.Thread(target=meanwhile)
        beside.start()
        beside.join(5)
        written.append(beside.is_alive())
        usual(matrix, *args)

    with drafters.acquire("a") as drafter:
        learn(drafter, 9)
    with monkeypatch.context() as patch:
        patch.setattr(NgramMatrix, "save", save)
        drafters.save(copied)
    assert (len(at_rest), written) == (1, [False])
    for token in (9, 11):
        with made(both, matrix=matrix_path(tmp_path)).acquire("a") as drafter:
            assert learned(drafter) == token
        drafters.save()


def test_what_is_wrong_is_said_at_start(both, tmp_path):
    with pytest.raises(ValueError, match="no matrix file"):
        made(both, isolation=Isolation.per_request, matrix=matrix_path(tmp_path))
    with pytest.raises(ValueError, match="a drafter with a matrix"):
        DrafterPool(both, "suffix", Isolation.shared, matrix_path(tmp_path))
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
    assert default_isolation(host, with_keys)[0] is isolation
