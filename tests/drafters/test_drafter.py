"""Drafters: discovery, construction, the calls they receive, and that none of them can change the output."""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.drafters import Garbage
from support.runs import check_same
from support.strategies import trees

import token_recycling as tr
from token_recycling import Context, Draft, Drafter
from token_recycling._util.text_stream import StepRecorder
from token_recycling.drafters import _listing as listing
from token_recycling.drafters._registry import ENTRY_POINTS


def install_drafters(monkeypatch, *named):
    """Pretend that packages with these drafters are installed."""
    points = importlib.metadata.EntryPoints(importlib.metadata.EntryPoint(*one, ENTRY_POINTS) for one in named)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **wanted: points.select(**wanted))


def test_drafter_of_another_package_is_found_by_name(model, monkeypatch):
    install_drafters(monkeypatch, ("garbage", "support.drafters:Garbage"))
    assert tr.drafter_names()[-1] == "garbage"
    drafter = tr.make_drafter("garbage:seed=3,scale=0.5,loud=true,note=x")
    assert isinstance(drafter, Garbage)
    assert (drafter.name, drafter.seed, drafter.scale, drafter.loud, drafter.note) == ("garbage", 3, 0.5, True, "x")
    check_same(model, "garbage", tiny.prompt(0, 5), max_new_tokens=9)
    for text in ("seed=1.5", "scale=big", "loud=perhaps"):
        with pytest.raises(ValueError, match=f"option {text.partition('=')[0]} of garbage"):
            tr.make_drafter(f"garbage:{text}")


def test_drafter_may_write_to_its_prompt(model):
    class Wiping(Drafter):
        def start(self, prompt, target):
            prompt.zero_()
            return super().start(prompt, target)

        def draft(self, context):
            return Draft.chain(context.root)

    check_same(model, Wiping(), tiny.prompt(0, 5), max_new_tokens=9)


def test_own_drafters_are_found_without_querying_installed_packages(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    assert tr.make_drafter("published:tree=chain:3").name == "published"


@pytest.mark.parametrize(
    "values",
    [
        ["support.drafters:Garbge"],
        ["support.drawers:Garbage"],
        ["support.drafters"],
        ["support.drafters:Garbage", "support.tiny:llama"],
    ],
)
def test_broken_drafter_of_another_package_is_named_and_others_are_listed(monkeypatch, values):
    install_drafters(monkeypatch, *(("garbage", value) for value in values), ("other", "support.drafters:Garbage"))
    with pytest.raises(ValueError, match=f"'garbage' of {ENTRY_POINTS} .*{' and '.join(values)}"):
        tr.make_drafter("garbage")
    assert tr.drafter_names()[-2:] == ["garbage", "other"]
    _, broken, other = listing.drafters(["suffix", "garbage", "other"])
    assert broken["summary"].startswith("not available: ")
    assert other["options"][0]["name"] == "shapes"


def test_defaults_that_are_made_for_each_drafter_are_listed():
    @dataclass
    class Own(Drafter):
        size: int | str = field(default_factory=lambda: 3)
        other: int = 4

    assert [option["default"] for option in listing.drafter("own", Own)["options"]] == ["3", "4"]


@dataclass
class MadeBy(Drafter):
    """Drafts by a given function of the context."""

    make: Callable[[Context], Draft]

    def draft(self, context):
        return self.make(context)


def wrong_root(context):
    return Draft.chain((context.tokens[-1] + torch.tensor([1, 2])) % 64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tr.make_drafter("published", tree="nonsense"), ValueError, "is not a tree"),
        (lambda: tr.make_drafter("published", tree="paper", k=4), ValueError, "got rank 7"),
        (lambda: tr.make_drafter("published", tree="0 9."), ValueError, "got rank 9"),
        (lambda: tr.make_drafter("published", k=65), ValueError, "got vocabulary 64 and k 65"),
        (lambda: type("Idle", (Drafter,), {})(), NotImplementedError, r"Idle must define draft\(\)"),
        (lambda: MadeBy(wrong_root), ValueError, r"newest token, \d+, got \d+ from"),
    ],
)
def test_drafter_that_does_not_fit_is_refused(model, make, error, message):
    with pytest.raises(error, match=message):
        next(tr.stream(model, tiny.prompt(0, 3), make()))


@pytest.mark.parametrize("name", ["published", "recycling", "suffix", "prompt_lookup", "lookahead"])
def test_prompt_may_contain_ids_without_a_logit(name):
    model = tiny.llama()
    model.model.embed_tokens = torch.nn.Embedding(70, 32)
    check_same(model, name, torch.tensor([[3, 68, 5, 69, 3, 68, 69]]), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("length", [1, 4, 40])
def test_drafter_receives_prompt_contexts_and_steps(length, streamed):
    """First the prompt, then alternately a context and the resulting step. Where a streamer waits for the first token,
    the pass that reads the prompt verifies no draft.
    """
    model = tiny.llama(max_position_embeddings=64)
    calls = []

    class Listening(Drafter):
        def start(self, prompt, target):
            assert target.vocab_size == 64
            calls.append(("start", prompt.tolist()))
            return self

        def draft(self, context):
            assert context.remaining == 6 - (len(context.tokens) - length)
            calls.append(("draft", context.tokens.tolist()))
            return Draft.chain(torch.cat([context.root, context.root]))

        def observe(self, step):
            calls.append(("observe", step.tokens))

    ids = tiny.prompt(0, length)
    text = model.generate(ids, max_new_tokens=6)[0].tolist()
    streamer = StepRecorder(lambda tokens: None) if streamed else None
    tr.generate(model, ids, drafter=Listening(), max_new_tokens=6, do_sample=False, streamer=streamer)
    assert calls[0] == ("start", text[:length])
    seen = text[:length]
    if streamed and length > 1:
        assert calls.pop(1) == ("observe", text[length : length + 1])
        seen = text[: length + 1]
    for (first, drafted_from), (second, emitted) in zip(calls[1::2], calls[2::2], strict=True):
        assert (first, second) == ("draft", "observe")
        assert drafted_from == seen
        seen = seen + emitted
    assert seen == text


SMALL = tiny.llama(vocab_size=5, num_hidden_layers=1)


@settings(max_examples=20)
@given(st.lists(trees(max_nodes=20), min_size=1, max_size=4), st.integers(0, 10**6))
def test_no_drafter_can_change_seeded_sampling(shapes, seed):
    """Random tokens of a small vocabulary on random trees: often correct, mostly wrong."""
    check_same(SMALL, Garbage(shapes, seed, 5), tiny.prompt(0, 3, 5), do_sample=True, max_new_tokens=16, seed=seed)


def test_drafter_in_contributing_md_works(model, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (tmp_path / "bigram.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    drafter = importlib.import_module("bigram").Bigram(length=4)
    stats = check_same(model, drafter, tiny.prompt(0, 9), max_new_tokens=60)
    assert stats.mat > 1
    assert stats.drafter == "bigram: at most 4 tokens"


def test_name_of_our_drafters_is_listed_once(monkeypatch):
    """Even if another package registers it too."""
    before = tr.drafter_names()
    install_drafters(monkeypatch, ("suffix", "support.drafters:Garbage"))
    assert tr.drafter_names() == before
    assert tr.make_drafter("suffix").describe().startswith("suffix: ")
