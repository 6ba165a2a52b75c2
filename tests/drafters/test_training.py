"""Shared parts of training: continuations by the target, the loop, files, and interrupted runs."""

import itertools
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import tiny

import token_recycling as tr
from token_recycling.drafters._shared.saved import TrainedPartError, check_model, load_part, save_part
from token_recycling.training import continuations as texts
from token_recycling.training.continuations import Continuations, ContinuationsError, pieces
from token_recycling.training.declaration import Schedule, SpecDecTraining
from token_recycling.training.loop import CheckpointError, Shuffled, Task, fit

continuations = partial(texts.continuations, tr.generate)


class StoppedError(Exception):
    pass


def prompts(count):
    return [tiny.prompt(seed, 3 + seed % 3)[0] for seed in range(count)]


# continuations


def test_greedy_continuations_equal_those_of_generate(model, tmp_path):
    """Up to the end token, or the end of the context."""
    model.generation_config.eos_token_id = [5, 11]
    made = continuations(model, prompts(5), tmp_path / "texts", max_new_tokens=20, batch=3)
    model.generation_config.pad_token_id = 0
    for text, prompt, length in zip(made.texts, prompts(5), made.prompt_lengths, strict=True):
        wanted = model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20)[0]
        assert text.tolist() == wanted.tolist()
        assert length == len(prompt)
    assert any(len(text) < length + 20 for text, length in zip(made.texts, made.prompt_lengths, strict=True))
    small = tiny.llama(max_position_embeddings=12)
    assert max(map(len, continuations(small, prompts(2), tmp_path / "ended", max_new_tokens=64).texts)) == 12


def test_equal_prompts_of_several_batches_are_sampled_differently(model, tmp_path):
    made = continuations(model, prompts(1) * 6, tmp_path / "texts", max_new_tokens=20, temperature=1.0, batch=2)
    assert len({tuple(text.tolist()) for text in made.texts}) == 6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_run_is_resumed(model, tmp_path, monkeypatch, temperature):
    monkeypatch.setattr("token_recycling.training.continuations._SAVE_SECONDS", 0)
    how = {"max_new_tokens": 8, "batch": 2, "temperature": temperature, "seed": 3}
    wanted = continuations(model, prompts(6), tmp_path / "whole", **how)
    reported = []

    def interrupt(done, total):
        reported.append((done, total))
        if done == 4:
            raise StoppedError

    with pytest.raises(StoppedError):
        continuations(model, prompts(6), tmp_path / "parts", progress=interrupt, **how)
    assert reported == [(0, 6), (2, 6), (4, 6)]
    reported.clear()
    made = continuations(
        model, prompts(6), tmp_path / "parts", progress=lambda done, total: reported.append((done, total)), **how
    )
    assert reported == [(4, 6), (6, 6)]
    assert [text.tolist() for text in made.texts] == [text.tolist() for text in wanted.texts]
    assert made.prompt_lengths == wanted.prompt_lengths
    torch.manual_seed(1)  # sampled texts do not depend on it
    state = torch.get_rng_state()
    again = continuations(model, prompts(6), tmp_path / "again", **how)
    assert [text.tolist() for text in again.texts] == [text.tolist() for text in wanted.texts]
    assert torch.equal(torch.get_rng_state(), state)


def test_file_of_other_options_is_refused(model, tmp_path):
    path, other = tmp_path / "texts", tiny.llama(seed=1)
    continuations(model, prompts(2), path, max_new_tokens=4)
    for changed in ({"max_new_tokens": 5}, {"seed": 1}, {"temperature": 0.5}, {"batch": 1}):
        ((name, value),) = changed.items()
        with pytest.raises(ContinuationsError, match=rf"{name} .*{re.escape(str(value))}, got"):
            continuations(model, prompts(2), path, **{"max_new_tokens": 4, **changed})
    for target, count, message in ((other, 2, "model "), (model, 3, "prompts ")):
        with pytest.raises(ContinuationsError, match=message):
            continuations(target, prompts(count), path, max_new_tokens=4)
    path.write_bytes(b"no texts")
    with pytest.raises(ContinuationsError, match=str(path)):
        continuations(model, prompts(2), path)


def test_pieces_and_batches_depend_only_on_the_seed():
    """Pieces of a document stay together; every example occurs once an epoch, in a new order."""

    def cut(seed):
        documents = [np.full(40, number) for number in range(5)]
        return [int(piece[0]) for piece in pieces(documents, length=4, count=30, seed=seed)]

    assert sum(one != other for one, other in itertools.pairwise(cut(1))) == 4
    for size, lengths in ((15, [5, 10]), (14, [10])):  # at least half the length
        assert sorted(map(len, pieces([np.arange(size)], length=10, count=3, seed=1))) == lengths
    shuffled = Shuffled(10, batch=4, seed=1)
    seen = [place for number in range(5) for place in shuffled[number]]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    for made in (cut, lambda seed: Shuffled(10, batch=4, seed=seed)[2]):
        assert made(1) == made(1) != made(2)


# the loop


def part(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def batch_at(number):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def loss_of(layer, batch):
    return (layer(batch) - batch[:, :2]).square().mean()


def test_checkpoint_of_other_options_or_parts_is_refused(tmp_path):
    path = tmp_path / "checkpoint"
    known = Task(part(), batch_at, loss_of, {"data": (1, 2)})
    assert not fit(replace(known, part=part().eval()), Schedule(2)).training
    fit(known, Schedule(2), path)
    for task, steps, message in (
        (replace(known, options={"data": [1]}), 2, r"data .*\[1\], got \[1, 2\]"),
        (known, 3, "plan "),
        (replace(known, part=torch.nn.Linear(3, 4)), 2, "this part"),
    ):
        with pytest.raises(CheckpointError, match=message):
            fit(task, Schedule(steps), path)
    whole = path.read_bytes()
    for damaged in (b"none", b"the first half", whole[:-100], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=str(path)):
            fit(known, Schedule(2), path)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: Schedule(0), "0"),
        (lambda: SpecDecTraining(depth=-1), "-1"),
        (lambda: SpecDecTraining(rejection_weight=0.0), "0.0"),
        (lambda: Schedule(1, rate=0.0), "0.0"),
        (lambda: Shuffled(10, batch=0), "0"),
        (lambda: pieces([np.arange(3)], length=8, count=1), "4 tokens"),
        (lambda: Continuations([torch.tensor([0])], [1]).split(0.1), "1 of 1"),
    ],
)
def test_invalid_options_are_refused(make, value):
    with pytest.raises(ValueError, match=value):
        make()


def test_rate_rises_and_falls():
    rates = [Schedule(100, rate=0.5).rate_at(step) for step in range(100)]
    assert rates.index(max(rates)) == 5
    assert rates == [*sorted(rates[:5]), *sorted(rates[5:], reverse=True)]
    assert (rates[0] < 0.1, max(rates), rates[-1] < 0.001) == (True, 0.5, True)


def test_nan_loss_ends_training():
    with pytest.raises(FloatingPointError, match="lower the rate"):
        fit(Task(part(), batch_at, lambda layer, batch: loss_of(layer, batch) / 0), Schedule(2))


# files of trained parts


def test_parts_of_another_model_and_damaged_files_are_refused(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="token-recycling train some-kind"):
        load_part(tmp_path, "some_kind")
    save_part(tmp_path, "kind", {"w": torch.ones(2)}, model, {})
    _, facts = load_part(tmp_path, "kind")
    assert facts["model"]["numbers"]["lm_head.weight"] == pytest.approx(model.lm_head.weight[32, 16].item())
    check_model(tmp_path, {"model": {**facts["model"], "numbers": {}}}, model)  # trained with a quantized model
    partly_offloaded = tiny.llama()
    partly_offloaded.model.layers[0].to("meta")
    check_model(tmp_path, facts, partly_offloaded)
    for other, words in (
        (tiny.llama(vocab_size=32), "64, .*got 32"),
        (tiny.llama(hidden_size=16), "32, .*got 16"),
        (tiny.llama(seed=1), "another model"),
    ):
        with pytest.raises(TrainedPartError, match=words):
            check_model(tmp_path, facts, other)
    for name, content, words in (
        ("kind.safetensors", b"none", "kind.safetensors"),
        ("kind.json", b"[]", "version 1"),
        ("kind.json", b"{", "kind.json"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainedPartError, match=words):
            load_part(tmp_path, "kind")
