"""Times of forward passes: the initial estimate, what a process learns, and what it saves for the next."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny
from support.running import Texts

import token_recycling as tr
from token_recycling._util import files
from token_recycling.model.pass_times import PassTimes, pass_times, prior, setting
from token_recycling.model.target import Target

pytestmark = pytest.mark.measured

STEEP = 1 + 0.5 * np.arange(8)


@pytest.fixture
def target():
    return Target(tiny.llama(max_position_embeddings=100_000))


@pytest.fixture(autouse=True)
def no_warning_logged():
    files._say.cache_clear()


def initial_times(target):
    """Return the times that another process would start from."""
    return PassTimes(np.linspace(1, 2, 8), setting(target))


def learned_times(target, shape=STEEP, steps=200):
    """Return times after some steps, which took `shape` hundredths of a second by number of nodes."""
    times = initial_times(target)
    for step in range(steps):
        nodes = step % len(shape) + 1
        times.curve(1, 10).record_time(nodes, 0.01 * shape[nodes - 1])
    return times


def test_next_process_starts_from_the_saved_times(target):
    assert initial_times(target).curve(1, 10).relative == pytest.approx(np.linspace(1, 2, 8))
    times = learned_times(target)
    times.keep()
    assert initial_times(target).curve(1, 10).relative == pytest.approx(STEEP, rel=0.1)
    assert initial_times(target).curve(1, 5000).relative == pytest.approx(STEEP, rel=0.1), "at other lengths too"
    assert initial_times(target).curve(2, 10).relative == pytest.approx(STEEP[1::2] / STEEP[1], rel=0.1)
    path = files.facts_file("costs", setting(target))
    path.unlink()
    times.keep()
    assert not path.exists(), "once a minute at most"


def test_unwritable_folder_is_logged_and_harmless(target, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "file"))
    learned_times(target).keep()
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.parametrize("in_batch", [False, True])
def test_generation_saves_its_measured_times(model, own_cache, in_batch):
    if in_batch:
        texts = Texts(model)
        texts.join(tiny.prompt(0, 6), 40, seed=0)
        texts.finish()
    else:
        tr.generate(model, tiny.prompt(0, 6), drafter="recycling", max_new_tokens=40, do_sample=True)
    (path,) = (own_cache / "costs").iterdir()
    saved = json.loads(path.read_text())
    assert saved["setting"] == setting(Target(model))
    assert [(one["texts"], one["length"], len(one["relative"])) for one in saved["curves"]] == [(1, 256, 64)]


@pytest.mark.usefixtures("switching_often")
def test_times_are_saved_while_another_thread_adds_curves(target):
    times = PassTimes(np.linspace(1, 2, 64), setting(target))

    def add_curves():
        for sequences in range(1, 40):
            for length in (10, 1000, 4000, 16_000, 64_000):
                times.curve(sequences, length).record_time(1, 0.01)

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add_curves)
        while not adding.done():
            times.keep()
        adding.result()


@pytest.mark.parametrize(("shape", "steps"), [(STEEP, 15), (np.array([1.0, *[20] * 7]), 200)])
def test_few_or_implausible_measurements_are_not_saved(target, own_cache, shape, steps):
    """Two nodes that take 20 times as long as one: other work interfered."""
    learned_times(target, shape, steps).keep()
    assert not own_cache.exists()


def test_times_depend_on_shape_dtype_and_attention_but_not_on_weights(model):
    others = tiny.llama(intermediate_size=48), tiny.llama().to(torch.bfloat16), tiny.llama(attn_implementation="eager")
    for other in others:
        assert setting(Target(other)) != setting(Target(model)) == setting(Target(tiny.llama(seed=9)))


def test_times_depend_on_the_threads_and_on_how_steps_are_made(target):
    """Also within a process."""
    ways, threads = [], torch.get_num_threads()
    try:
        for count, kind in ((1, ""), (1, "captured"), (2, "")):
            torch.set_num_threads(count)
            ways.append((pass_times(target, kind), setting(target, kind)))
            assert pass_times(target, kind) is ways[-1][0]
    finally:
        torch.set_num_threads(threads)
    for one, other in combinations(ways, 2):
        assert one[0] is not other[0]
        assert one[1] != other[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prior_cost_of_a_node_is_positive_and_less_than_half_a_pass(device):
    weights = {"bytes_read": 10**9, "device": torch.device(device)}
    seconds = prior(SimpleNamespace(**weights, prepacked=None))
    more = np.diff(seconds)
    assert (more > 0).all()
    assert (more < seconds[0] / 2).all()
    for eight in (1.2, 1.5, 1.9):  # as measured at packing
        packed = prior(SimpleNamespace(**weights, prepacked=SimpleNamespace(eight=eight)))
        if device == "cpu":
            assert packed[7] / packed[0] == pytest.approx(eight)
        assert packed[0] == seconds[0]


@pytest.mark.parametrize("text", ["", '{"curves": [3]}', '{"curves": [{"texts": 1, "length": 256}]}'])
def test_damaged_file_is_logged_once_and_replaced(target, caplog, text):
    path = files.facts_file("costs", setting(target))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        times = learned_times(target)
        times.curve(1, 3000)
        times.keep()
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(path) in message
    assert initial_times(target).curve(1, 10).relative == pytest.approx(STEEP, rel=0.1)


@pytest.mark.parametrize("relative", [[1, 2], [1] * 7 + [0.5], [2] * 8, [1] * 7 + [1e9]])
def test_implausible_saved_curve_is_not_used(target, relative):
    saved = {"curves": [{"texts": 1, "length": 256, "relative": relative}]}
    files.write_facts(files.facts_file("costs", setting(target)), saved)
    assert initial_times(target).curve(1, 10).relative == pytest.approx(np.linspace(1, 2, 8))
