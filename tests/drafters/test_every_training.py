"""Every training: an interrupted run gives the same part, models stay unchanged, the command trains a drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import tiny
from support.cases import thinned
from support.commandline import assert_refused, run, run_json
from transformers import PreTrainedModel

import token_recycling as tr
from token_recycling.model.target import Target
from token_recycling.training import eagle, medusa, specdec_pp
from token_recycling.training.continuations import Continuations
from token_recycling.training.declaration import EagleTraining, MedusaTraining, Schedule, SpecDecTraining
from token_recycling.training.loop import CheckpointError, Task, fit

MODELS = Path(__file__).parents[2] / "models"
Method = Callable[[PreTrainedModel, Continuations], Task]


def texts(number=6):
    return Continuations([tiny.prompt(seed, 12)[0] for seed in range(number)], [3] * number)


def specdec_task(model, learned_from):
    how, draft = SpecDecTraining(depth=2, batch=2, seed=1), Target(model)
    return specdec_pp.task_of(draft, specdec_pp.labelled(Target(tiny.llama()), draft, learned_from, how), how)


METHODS: dict[str, Method] = {
    "eagle 1": lambda model, known: eagle.task_of(model, known, EagleTraining(version=1, unrolled=2, batch=2)),
    "eagle 3": lambda model, known: eagle.task_of(model, known, EagleTraining(version=3, unrolled=2, batch=2)),
    "medusa": lambda model, known: medusa.task_of(model, known, MedusaTraining(heads=2, batch=2)),
    "medusa own": lambda model, known: medusa.task_of(model, known, MedusaTraining(heads=2, own_output=True)),
    "specdec_pp": specdec_task,
}


def stop_writing(state, path):
    Path(path).write_bytes(b"the first half")
    raise KeyboardInterrupt


@pytest.mark.parametrize("task_of", METHODS.values(), ids=METHODS)
def test_interrupted_training_gives_the_same_part(task_of, tmp_path, monkeypatch):
    """Even if it is interrupted while a checkpoint is written. The target stays unchanged."""
    monkeypatch.setattr("token_recycling.training.loop._SAVE_SECONDS", 0)
    model, schedule, checkpoint = tiny.llama(3, num_hidden_layers=6), Schedule(6, rate=0.01), tmp_path / "checkpoint"
    before = [weight.clone() for weight in model.parameters()]
    wanted = fit(task_of(model, texts()), schedule)

    def stop(step, steps, loss):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(task_of(model, texts()), schedule, checkpoint, stop)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", stop_writing)
        with pytest.raises(KeyboardInterrupt):
            fit(task_of(model, texts()), schedule, checkpoint)
    steps = []
    made = fit(task_of(model, texts()), schedule, checkpoint, lambda step, *_: steps.append(step))
    assert steps == [4, 5, 6]
    for name, weight in wanted.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight)
    with pytest.raises(CheckpointError, match="texts of the checkpoint"):
        fit(task_of(model, texts(5)), schedule, checkpoint)
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


COMMANDS = {
    "medusa": (["--heads", 2], "accuracy", "top 10", "medusa:heads={head},tree=6"),
    "eagle": (["--version", 1], "acceptance", "depth", "eagle:head={head},tree=6"),
    "specdec-pp": (
        ["--draft", "{model}", "--batch", 4],
        "judged",
        "a head trained on 9 texts",
        "specdec_pp:model={model},head={head}",
    ),
}


@pytest.mark.parametrize("name", thinned(COMMANDS, 2))
def test_command_trains_a_working_drafter(name, tiny_model_dir, tmp_path):
    options, measured, words, spec = COMMANDS[name]
    text, head = tmp_path / "text.py", tmp_path / "head[red]"  # not markup
    text.write_text("".join(f"def number_{number}():\n    return {number}\n" for number in range(40)))
    how = ["--texts", 12, "--prompt-tokens", 16, "--text-tokens", 8, "--steps", 4, "--held-out", 0.25]
    own = [str(one).format(model=tiny_model_dir) for one in options]
    command = ["train", name, tiny_model_dir, text, "--output", head, *how, *own]
    made = run_json(*command)
    assert (made["training"]["trained_texts"], made["training"]["held_out_texts"]) == (9, 3)
    assert 9 <= made["training"]["trained_tokens"] <= 9 * 8, "those of the outputs"
    facts = json.loads((head / f"{name.replace('-', '_')}.json").read_text())
    assert (facts[measured], facts["training"]) == (made[measured], made["training"])
    checkpoint = head / "training" / "checkpoint.pt"
    written_at = checkpoint.stat().st_mtime_ns
    shown = run(*command)
    assert shown.exit_code == 0, shown.stderr
    assert words in " ".join(shown.stdout.split())
    assert str(head) in shown.stdout
    assert checkpoint.stat().st_mtime_ns == written_at, "training is not repeated"
    drafter = spec.format(model=tiny_model_dir, head=head)
    assert run("generate", tiny_model_dir, "def f", "--drafter", drafter, "--max-new-tokens", 8).exit_code == 0
    assert_refused(run(*command, "--seed", 1), "prompts of the continuations")
    if name == "eagle":
        assert [len(ranks) for ranks in made[measured]] == [10] * 5
        assert_refused(run(*command, "--version", 2), "1 or 3", "2")
        checkpoint.unlink()
        assert_refused(run(*command, "--version", 3), "hidden states 0 to 2")
    if name == "specdec-pp":
        assert all(of["acceptance"] == pytest.approx(1, abs=1e-3) for of in made[measured].values()), "its own drafts"
        assert (head / "calibration.svg").read_text().startswith("<?xml")


def test_ctrl_c_tells_how_to_resume(tiny_model_dir, tmp_path, monkeypatch):
    """Texts are generated as the options say."""
    asked = {}

    def interrupted(*_, progress, **how):
        asked.update(how)
        raise KeyboardInterrupt

    (tmp_path / "text.py").write_text("a = 1\n" * 100)
    monkeypatch.setattr("token_recycling.training.continuations.continuations", interrupted)
    how = ("--temperature", 0.5, "--text-tokens", 7, "--seed", 3)
    stopped = run("train", "medusa", tiny_model_dir, tmp_path / "text.py", "--output", tmp_path / "heads", *how)
    assert stopped.exit_code == 130
    assert asked == {"temperature": 0.5, "max_new_tokens": 7, "seed": 3}
    assert "the same command resumes" in stopped.stderr


def test_command_reports_invalid_arguments(tiny_model_dir, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("a = 1\n")
    command, there = ["train", "medusa", tiny_model_dir], [text, "--output", tmp_path / "heads"]
    assert_refused(run(*command, tmp_path / "none", *there[1:]), str(tmp_path / "none"))
    assert_refused(run(*command, *there, "--held-out", 1), "held_out must be > 0 and < 1, got 1")
    assert_refused(run(*command, *there, "--rate", 0), "rate")
    assert_refused(run(*command, *there), "32 tokens")  # half of the prompt tokens of an output
    command, draft = ["train", "specdec-pp", tiny_model_dir], ["--draft", tiny_model_dir]
    assert_refused(run(*command, *there, *draft, "--target-share", 1), "target_share")
    assert_refused(run(*command, text, "--draft", tmp_path), "config.json")
    assert "medusa" in run("train").stdout


SHIPPED = {
    f"eagle:head={MODELS / 'eagle'},tree=16": 3,
    f"eagle:head={MODELS / 'eagle3'},tree=16": 2,
    f"medusa:heads={MODELS / 'medusa'},tree=16": 1.5,
    f"specdec_pp:model={MODELS / 'draft'},min_length=1,threshold=0.5": 1.2,
}


@pytest.mark.parametrize("spec", thinned(SHIPPED, 2))
def test_shipped_parts_save_steps(spec, shipped):
    model, tokenizer = shipped
    text, stats = (MODELS / "prompts" / "05_graph_shortest_path.py").read_text(encoding="utf-8"), tr.Stats()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :64]
    wanted = model.generate(ids, max_new_tokens=48, do_sample=False)
    ours = tr.generate(model, ids, drafter=tr.make_drafter(spec), stats=stats, max_new_tokens=48, do_sample=False)
    assert torch.equal(ours, wanted)
    assert stats.mat > SHIPPED[spec]
    assert stats.drafter_statistics.get("stopped_by_head", 4) > 3
