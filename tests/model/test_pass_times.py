"""What passes take: what a process begins with, what it learns, and what it leaves for the next."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny

import token_recycling as tr
from token_recycling._util import files
from token_recycling.model.pass_times import PassTimes, prior, setting
from token_recycling.model.target import Target

pytestmark = pytest.mark.measured

DEAR = 1 + 0.5 * np.arange(8)


@pytest.fixture
def target():
    return Target(tiny.llama(max_position_embeddings=100_000))


@pytest.fixture(autouse=True)
def nothing_said():
    files._say.cache_clear()


def new(target):
    """As another process would begin."""
    return PassTimes(np.linspace(1, 2, 8), setting(target))


def taught(target, shape=DEAR, steps=200):
    """Steps have taken as `shape` says, in hundredths of a second."""
    known = new(target)
    for step in range(steps):
        nodes = step % len(shape) + 1
        known.curve(1, 10).took(nodes, 0.01 * shape[nodes - 1])
    return known


def test_what_one_process_learned_is_what_the_next_begins_with(target):
    assert new(target).curve(1, 10).relative == pytest.approx(np.linspace(1, 2, 8))
    known = taught(target)
    known.keep()
    assert new(target).curve(1, 10).relative == pytest.approx(DEAR, rel=0.1)
    assert new(target).curve(1, 5000).relative == pytest.approx(DEAR, rel=0.1), "other lengths begin with it too"
    assert new(target).curve(2, 10).relative == pytest.approx(DEAR[1::2] / DEAR[1], rel=0.1)
    path = files.facts_file("costs", setting(target))
    path.unlink()
    known.keep()
    assert not path.exists(), "once a minute at most"


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(target, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "file"))
    taught(target).keep()
    assert str(tmp_path / "file") in caplog.text


def test_a_text_leaves_what_it_taught(model, own_cache):
    tr.generate(model, tiny.prompt(0, 6), drafter="recycling", max_new_tokens=40, do_sample=True)
    (path,) = (own_cache / "costs").iterdir()
    held = json.loads(path.read_text())
    assert held["setting"] == setting(Target(model))
    assert [(one["texts"], one["length"], len(one["relative"])) for one in held["curves"]] == [(1, 256, 64)]


@pytest.mark.usefixtures("switching_often")
def test_texts_end_while_others_begin(target):
    """One thread keeps what was learned while another asks for lengths and numbers of texts that are new."""
    known = PassTimes(np.linspace(1, 2, 64), setting(target))

    def begins():
        for texts in range(1, 40):
            for length in (10, 1000, 4000, 16_000, 64_000):
                known.curve(texts, length).took(1, 0.01)

    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begins)
        while not beginning.done():
            known.keep()
        beginning.result()


@pytest.mark.parametrize(("shape", "steps"), [(DEAR, 15), (np.array([1.0, *[20] * 7]), 200)])
def test_a_few_steps_and_what_cannot_be_true_are_not_kept(target, own_cache, shape, steps):
    """Two nodes that take as long as ten passes: other work was in the way."""
    taught(target, shape, steps).keep()
    assert not own_cache.exists()


def test_another_setting_has_times_of_its_own(model):
    others = tiny.llama(intermediate_size=48), tiny.llama().to(torch.bfloat16), tiny.llama(attn_implementation="eager")
    for other in others:
        assert setting(Target(other)) != setting(Target(model)) == setting(Target(tiny.llama(seed=9)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_that_knows_nothing_takes_more_nodes_for_dearer_but_cheaper_than_passes_of_their_own(device):
    weights = {"bytes_read": 10**9, "device": torch.device(device)}
    seconds = prior(SimpleNamespace(**weights, prepacked=None))
    more = np.diff(seconds)
    assert (more > 0).all()
    assert (more < seconds[0] / 2).all()
    for eight in (1.2, 1.5, 1.9):  # as measured when the weights were packed
        packed = prior(SimpleNamespace(**weights, prepacked=SimpleNamespace(eight=eight)))
        if device == "cpu":
            assert packed[7] / packed[0] == pytest.approx(eight)
        assert packed[0] == seconds[0]


@pytest.mark.parametrize("text", ["", '{"curves": [3]}', '{"curves": [{"texts": 1, "length": 256}]}'])
def test_a_damaged_file_is_noticed_once_and_replaced(target, caplog, text):
    path = files.facts_file("costs", setting(target))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        known = taught(target)
        known.curve(1, 3000)
        known.keep()
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(path) in said
    assert new(target).curve(1, 10).relative == pytest.approx(DEAR, rel=0.1)


@pytest.mark.parametrize("relative", [[1, 2], [1] * 7 + [0.5], [2] * 8, [1] * 7 + [1e9]])
def test_a_shape_that_cannot_be_true_is_not_used(target, relative):
    held = {"curves": [{"texts": 1, "length": 256, "relative": relative}]}
    files.write_facts(files.facts_file("costs", setting(target)), held)
    assert new(target).curve(1, 10).relative == pytest.approx(np.linspace(1, 2, 8))
