"""Measuring with tiny models: rows, resuming, failures, identity, cold and warm drafters."""

import json
import subprocess
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from support import benching
from support.benching import NEW
from support.cases import thinned

from token_recycling.bench import environment, session
from token_recycling.bench.data import RunOptions
from token_recycling.bench.measure import Item, decode_item, divergence_of
from token_recycling.bench.methods import Drafted, Outcome, parse
from token_recycling.bench.store import row

SPECS = ("generate", "prompt_lookup_hf", "plain", "recycling:tree=chain:3")


def plan(number=4, replay=True, specs=SPECS, **more):
    return benching.plan(specs, benching.questions(number), replay, **more)


def test_every_method_and_prompt_has_a_row(tmp_path):
    where = benching.setup(repeats=3)
    found = benching.run(where, plan(2), tmp_path)
    generated, replayed = benching.by_method(found), benching.by_method(found, "replay")
    assert {method: len(rows) for method, rows in generated.items()} == dict.fromkeys(SPECS, 2)
    assert set(replayed) >= {"plain", "recycling:tree=chain:3"}
    for one in found:
        assert one["failure"] is None
        assert {len(one[f"{clock}seconds"]) for clock in ("", "prefill_", "total_", "processor_")} == {3}
        assert one["mat"] == one["tokens"] / one["steps"]
        assert sum(int(length) * count for length, count in one["lengths"].items()) == one["tokens"]
        assert (one["version"], one["batch"]) == (1, 1)
        assert (one["category"], one["temperature"], one["max_new_tokens"], one["seed"]) == ("texts", 0, NEW, None)
        assert one["environment"]["model"] == "tiny"
    for rows in generated.values():
        assert all(one["tokens"] == NEW for one in rows)
    assert [one["identical"] for one in generated["generate"]] == [None, None]
    assert [one["identical"] for method in SPECS[1:] for one in generated[method]] == [True] * 6
    assert all(one["identical"] is None for rows in replayed.values() for one in rows)
    assert [one["mat"] for one in generated["generate"] + generated["plain"]] == [1.0] * 4
    assert generated["recycling:tree=chain:3"][0]["drafted"] > 0
    assert generated["generate"][0]["parts"] is generated["generate"][0]["tried"] is None


def test_sampling_options_of_the_model_are_disabled():
    where = benching.setup(max_new_tokens=16)
    item = Item(tuple(benching.questions(1)))
    decoded = lambda: decode_item(where, "generate", parse("generate"), item)[0].tokens  # noqa: E731
    wanted = decoded()
    config = where.model.generation_config
    config.update(repetition_penalty=5.0, no_repeat_ngram_size=2, do_sample=True, temperature=0.6, eos_token_id=[3])
    assert decoded() != wanted
    said = session.without_own_choices(where.model)
    assert said == ["do_sample=True", "no_repeat_ngram_size=2", "repetition_penalty=5.0", "temperature=0.6"]
    assert decoded() == wanted
    assert where.model.generation_config.eos_token_id == [3]
    assert session.without_own_choices(where.model) == []


class Stop(BaseException):
    """Stands in for KeyboardInterrupt, which pytest would handle itself."""


def stop_after(after):
    events = []

    def hook(event):
        events.append(event)
        if sum(one.phase == "measuring" and one.outcomes is None for one in events) > after:
            raise Stop

    return events, hook


@pytest.mark.parametrize(
    ("spec", "replay", "after"),
    thinned(
        [
            ("recycling:tree=chain:3", True, 17),
            ("forced:recycling:tree=chain:3", False, 4),
            ("recycling:tree=chain:3", True, 5),
        ],
        kept=lambda case: case[2] != 5,
    ),
)
def test_interrupted_run_resumes_to_the_same_rows(tmp_path, spec, replay, after):
    where, asked = benching.setup(repeats=2, max_new_tokens=12), plan(3, replay, ("generate", spec))
    wanted = benching.run(where, asked, tmp_path / "whole")
    _, hook = stop_after(after)
    with pytest.raises(Stop):
        benching.run(where, asked, tmp_path / "parts", hook)
    before = benching.rows(tmp_path / "parts")
    events, hook = stop_after(10**6)
    found = benching.run(where, asked, tmp_path / "parts", hook)
    assert found[: len(before)] == before
    assert benching.without_times(found) == benching.without_times(wanted)
    # Nothing is measured twice.
    measured = sum(one.phase == "measuring" and one.outcomes is not None for one in events)
    assert measured == asked.calls(2) - 2 * len(before)
    # Resuming must restore what a warm drafter has learned: the last prompt alone takes a different number of steps.
    alone = benching.run(where, benching.plan([spec], benching.questions(3)[-1:], False), tmp_path / "alone")[-1]
    *_, last = (row for row in wanted if row["mode"] == "generate")
    assert last["method"] == alone["method"] == spec
    assert last["steps"] != alone["steps"]


def test_truncated_row_is_measured_again_and_a_finished_run_measures_nothing(tmp_path):
    where = benching.setup()
    wanted = benching.run(where, plan(2), tmp_path)
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 20])
    again = benching.run(where, plan(2), tmp_path)
    assert benching.without_times(again) == benching.without_times(wanted)
    events, hook = stop_after(10**6)
    assert benching.run(where, plan(2), tmp_path, hook) == again
    assert events == []


def test_rows_of_another_run_are_refused_or_deleted(tmp_path):
    where, other = benching.setup(), benching.setup(max_new_tokens=6)
    benching.run(where, plan(1), tmp_path)
    path = tmp_path / "rows.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    for wrong in (rows[::-1], ["no row\n", *rows[1:]], [*rows, rows[0]]):
        path.write_text("".join(wrong))
        with pytest.raises(ValueError, match=r"row.*--fresh"):
            benching.run(where, plan(1), tmp_path)
    with pytest.raises(ValueError, match=r"max_new_tokens 8 there, 6 now.*--fresh"):
        benching.run(other, plan(1), tmp_path)
    assert {row["max_new_tokens"] for row in benching.run(other, plan(1), tmp_path, fresh=True)} == {6}
    settings = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "further": 1}))
    with pytest.raises(ValueError, match=r"further 1 there, None now"):
        benching.run(other, plan(1), tmp_path)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not JSON.*--fresh"):
        benching.run(other, plan(1), tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"rows without settings.json"):
        benching.run(other, plan(1), tmp_path)


def test_every_repeat_starts_with_drafters_that_have_not_seen_the_prompt(tmp_path):
    """Otherwise the second repeat would draft the whole output. A cold method has seen no prompt at all."""
    warm, cold = "recycling:tree=chain:3", "cold:recycling:tree=chain:3"
    asked, steps = plan(3, False, ("generate", warm, cold)), {}
    for repeats in (1, 3):
        rows = benching.run(benching.setup(repeats=repeats, max_new_tokens=12), asked, tmp_path / str(repeats))
        steps[repeats] = [row["steps"] for row in rows]
    assert steps[1] == steps[3]
    alone = benching.plan([cold], benching.questions(3)[-1:], False)
    assert steps[1][-1] == benching.run(benching.setup(max_new_tokens=12), alone, tmp_path / "alone")[-1]["steps"]
    assert steps[1][-1] != steps[1][-2]


def test_samples_depend_on_the_seed_and_the_prompts_number(tmp_path):
    events, hook = stop_after(10**6)
    twice = [replace(one, name=f"texts/{n}") for one in benching.questions(1) for n in range(2)]
    where = benching.setup(temperature=5.0, seed=3, repeats=2)
    benching.run(where, benching.plan(["generate"], twice, False), tmp_path, hook)
    first, again, other, last = (one.outcomes[0].tokens for one in events if one.phase == "measuring" and one.outcomes)
    assert first == again != other == last


def test_order_of_methods_rotates(tmp_path):
    events, hook = stop_after(10**6)
    benching.run(benching.setup(repeats=2, max_new_tokens=4), plan(3, replay=False), tmp_path, hook)
    order = [one.method.spec for one in events if one.phase == "measuring" and one.outcomes is None]
    firsts = order[:: len(SPECS)]
    assert firsts == [SPECS[place] for place in (0, 1, 1, 2, 2, 3)]
    assert Counter(order) == dict.fromkeys(SPECS, 6)


def test_failures_are_rows(tmp_path, monkeypatch):
    decode = Drafted.decode

    def failing(self, model, call):
        if self.drafter.name == "recycling" and call.arguments["input_ids"].shape[1] > 20:
            raise RuntimeError("out of\nmemory")
        return decode(self, model, call)

    monkeypatch.setattr(Drafted, "decode", failing)
    found = benching.by_method(benching.run(benching.setup(), plan(replay=False), tmp_path))
    failed = [one for one in found.pop("recycling:tree=chain:3") if one["failure"] is not None]
    assert 0 < len(failed) < 4
    assert {(one["failure"], one["tokens"], one["identical"]) for one in failed} == {
        ("RuntimeError: out of memory", None, None)
    }
    assert all(one["failure"] is None for rows in found.values() for one in rows)


def test_different_output_is_recorded_with_its_margin(tmp_path, monkeypatch):
    where = benching.setup(max_new_tokens=6)
    ids = where.ids(benching.TEXTS[0])[None]
    plain = where.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    place = next(place for place, token in enumerate(plain) if token != 65)
    text = torch.cat([ids, torch.tensor([plain[:place]], dtype=torch.long)], dim=1)
    logits = where.model(text).logits[0, -1].detach()
    benching.inject_fault(monkeypatch)
    one = benching.run(where, plan(1, False, ("generate", "plain")), tmp_path)[1]
    assert one["identical"] is False
    assert one["divergence"].pop("margin") == pytest.approx(float(logits[plain[place]] - logits[65]), abs=1e-4)
    assert one["divergence"] == {"turn": 0, "place": place, "expected": plain[place], "got": 65}


def outcome(tokens, total, lengths=None, first=0.75):
    return Outcome(
        [torch.tensor([1, 2, 3])], [tokens], lengths or [1] * len(tokens), 2, first, total - 1, total, total / 2, None
    )


def test_row_of_two_turns_and_three_repeats():
    """Turns are summed, counts are those of the median repeat, and one different repeat makes outputs not identical."""
    where = benching.setup()
    loop, answer = [7, 8, 9, 10] * 4, [4, 5, 6, 7]
    repeats = [
        [outcome(loop, 9.0, [4, 12]), outcome(answer, 9.0, [2, 2], 0.25)],
        [outcome(loop, 2.0, [8, 8]), outcome(answer, 3.0, [2, 2], 0.25)],
        [outcome(loop, 1.0, [4, 12]), outcome([4, 5], 1.0, [2, 0], 0.25)],
    ]
    wanted = [outcome(loop, 1.0), outcome(answer, 1.0)]
    divergences = [divergence_of(where.model, wanted, repeat) for repeat in repeats]
    found = row({"environment": {"cpu": "some"}}, repeats, divergences)
    assert found["total_seconds"] == [18.0, 5.0, 2.0]
    assert found["processor_seconds"] == [9.0, 2.5, 1.0]
    assert found["seconds"] == [16.0, 3.0, 0.0]
    assert found["prefill_seconds"] == [1.0, 1.0, 1.0]
    assert found["last_prefill_seconds"] == [0.25, 0.25, 0.25]
    assert (found["prompt_tokens"], found["tokens"], found["steps"], found["mat"]) == (6, 20, 4, 5.0)
    assert (found["loop_tokens"], found["loop_steps"]) == (16, 2)
    # Of 13 4-grams of the loop 9 are repeated; the answer has 1.
    assert found["repeated_4grams"] == pytest.approx(9 / 14)
    assert found["lengths"] == {"2": 2, "8": 2}
    assert found["identical"] is False
    assert found["divergence"] == {"turn": 1, "place": 2, "margin": None, "expected": 6, "got": None}
    both = replace(wanted[0], prompts=wanted[0].prompts * 2, tokens=[loop, answer])
    assert divergence_of(where.model, [both], [replace(both, tokens=[loop, []])])["turn"] == 1, "sequence of the batch"
    failed = row({}, [repeats[0], ValueError("no")], divergences[:1])
    assert (failed["failure"], failed["tokens"], failed["identical"]) == ("ValueError: no", None, None)
    unchecked = row({}, repeats, None)
    assert unchecked["identical"] is None
    json.dumps(found)


def test_forced_methods_decode_the_output_of_generate_in_any_order(tmp_path, monkeypatch):
    """A method whose own output would differ has the same tokens and is not compared."""
    benching.inject_fault(monkeypatch)
    specs = ("forced:recycling:tree=4", "plain", "generate", "forced:cold:plain")
    found = benching.by_method(benching.run(benching.setup(repeats=2), plan(2, False, specs), tmp_path))
    assert [one["identical"] for one in found["plain"]] == [False, False]
    for spec in (specs[0], specs[3]):
        assert [(one["tokens"], one["identical"], one["failure"]) for one in found[spec]] == [(NEW, None, None)] * 2
        assert [one["repeated_4grams"] for one in found[spec]] == [one["repeated_4grams"] for one in found["generate"]]
    assert found["plain"][0]["repeated_4grams"] != found["generate"][0]["repeated_4grams"]


def test_commit_of_a_checkout_tells_whether_the_package_was_changed(tmp_path, monkeypatch):
    def git(*command):
        who = ("-c", "user.name=ann", "-c", "user.email=ann@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", tmp_path, *who, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    code = tmp_path / "package" / "bench" / "environment.py"
    code.parent.mkdir(parents=True)
    code.write_text("one")
    monkeypatch.setattr(environment, "__file__", str(code))
    assert environment.commit() is None, "an installed package has none"
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    (tmp_path / "notes").write_text("beside the package")
    head = git("rev-parse", "--short=12", "HEAD")
    assert environment.commit() == head
    code.write_text("two")
    assert environment.commit() == f"{head}-dirty"


def test_every_condition_of_a_run_is_among_its_settings():
    """So that rows measured otherwise are not mixed with its own."""
    where, made, asked = benching.setup(), plan(1), benching.questions(1)
    facts = environment.environment(where.model, "tiny")
    conditions = {"max_new_tokens": 9, "chat": True, "repeats": 2, "seed": 1, "temperature": 0.5}
    assert conditions.keys() == {field.name for field in fields(where)} - {"model", "tokenizer"}
    others = [(replace(where, **{name: value}), asked, made, facts) for name, value in conditions.items()]
    others += [(where, benching.questions(2), made, facts), (where, asked, plan(2), facts)]
    without = {"model", "date", "cores", "parameters"}
    others += [(where, asked, made, {**facts, name: "another"}) for name in facts.keys() - without]
    usual = session.settings(where, asked, made, facts)
    assert [other for other in others if session.settings(*other) == usual] == []


def test_limit_does_not_count_prompts_of_the_warm_up(tiny_model_dir, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in benching.TEXTS))
    options = RunOptions((str(tmp_path / "texts.jsonl"),), 2, ("plain",), warm_up=1, max_new_tokens=2, replay=False)
    assert session.Session(tiny_model_dir, options, tmp_path / "out").items == 2
