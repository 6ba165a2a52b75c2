"""Captured passes in calls: the same text and the same learning. Without CUDA they are made alike, but not captured."""

import re

import pytest
import torch
from support import architectures, tiny
from support.cases import paired
from support.drafters import NAMES, Garbage, example
from support.oracle import Oracle
from support.runs import decoded, plain
from support.slots import assert_same_slots
from transformers import DynamicCache, StoppingCriteria

import token_recycling as tr
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.target import Target

GREEDY = {"do_sample": False}


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_drafts_and_learns_as_with_eager_passes(name, model, tmp_path, recorded):
    """From passes that are recorded and replayed, as CUDA graphs are; in streams, which read long prompts alone."""
    ours, theirs = (example(name, model, folder) for folder in (tmp_path / "a", tmp_path / "b") if not folder.mkdir())
    for length in (1, 57):
        ids, found = tiny.prompt(length, length), []
        for drafter, fast in ((ours, True), (theirs, False)):
            stats = tr.Stats()
            steps = list(tr.stream(model, ids, drafter, fast=fast, stats=stats, max_new_tokens=16))
            found.append([(step.draft.tokens.tolist(), step.accepted, step.tokens) for step in steps])
            assert stats.path.startswith("fast" if fast else "eager")
        text = model.generate(ids, max_new_tokens=16, **GREEDY)[0, length:].tolist()
        assert [token for _, _, tokens in found[0] for token in tokens] == text
        if name not in {"draft_model", "layer_skip"}:  # whose trees depend on what a pass costs
            assert found[0] == found[1]


@pytest.mark.parametrize("name", ["recycling", "eagle"])
def test_a_seed_gives_the_tokens_of_generate(name, model, tmp_path, recorded):
    """Within inference mode and outside of it, whatever was learned."""
    drafter, ids, stats = example(name, model, tmp_path), tiny.prompt(0, 6), tr.Stats()
    how = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 20}
    for within in (True, False, True):
        wanted = tiny.seeded(model.generate, ids, **how)[0]
        with torch.inference_mode(within):
            ours = tiny.seeded(tr.generate, model, ids, drafter=drafter, fast=True, stats=stats, **how)[0]
        assert torch.equal(ours, wanted)
    assert stats.accepted


@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafted_token_whose_states_are_nan_changes_no_other(rows, recorded):
    model, ids = tiny.llama(), torch.cat([tiny.prompt(seed, 5) for seed in range(rows)])
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    wanted, embeddings = model.generate(ids, **arguments), model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[[token for token in range(len(embeddings)) if token not in wanted]] = torch.nan
    assert torch.equal(tr.generate(model, ids, drafter=Garbage(), fast=True, **arguments), wanted)


@pytest.mark.parametrize(("case", "length"), paired(["llama", "mistral window of 8"], [1, 90]))
def test_a_batch_that_does_not_fill_its_bucket(case, length, recorded):
    """Three sequences in the slots of four: prompts that leave nothing to read before the first pass, or longer than
    a window.
    """
    model = architectures.model_of(architectures.named(*case.split(" ", 1)))
    ids = torch.cat([tiny.prompt(seed, length, architectures.VOCABULARY) for seed in range(3)])
    arguments = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    wanted, stats = model.generate(ids, **arguments), tr.Stats()
    assert torch.equal(
        tr.generate(model, ids, drafter=Oracle(list(wanted)), fast=True, stats=stats, **arguments), wanted
    )
    assert stats.path.startswith("fast")


def test_buckets_and_bands_are_crossed():
    model = tiny.llama(vocab_size=architectures.VOCABULARY, max_position_embeddings=2048, num_hidden_layers=1)
    shapes, passes = [], passes_or_reason(Target(model))
    made = passes._pass
    passes._pass = lambda target, shape, trees: (shapes.append(shape), made(target, shape, trees))[1]
    ids = tiny.prompt(0, 900, architectures.VOCABULARY)
    wanted = model.generate(ids, max_new_tokens=260, **GREEDY)
    text, _ = decoded(model, ids, Oracle([wanted[0]]), max_new_tokens=260)
    assert text == wanted[0, 900:].tolist()
    assert {shape.nodes for shape in shapes} >= {8, 16, 96}
    assert {shape.band for shape in shapes} >= {1024, passes.capacity}


def test_room_grows_within_a_text():
    model = tiny.llama(max_position_embeddings=2048, num_hidden_layers=1)
    passes, ids = passes_or_reason(Target(model)), tiny.prompt(0, 800)
    wanted, begin = plain(model, ids, 400), passes.begin
    passes.begin = lambda target, cache, lengths, longest: begin(target, cache, lengths, 8)
    passes.slots = passes._empty(Target(model))
    assert decoded(model, ids, "recycling:tree=8", max_new_tokens=400)[0] == wanted
    assert 1200 < passes.capacity < 2048


def test_without_memory_for_longer_slots_nothing_is_captured_any_more(model, monkeypatch, caplog):
    """Once, with a warning; the call goes on with what it needs at least."""
    passes, reserve = passes_or_reason(Target(model)), TreeCache.reserve

    def limited(self, rows, columns, *more):
        if columns > 64:
            raise torch.OutOfMemoryError("no room")
        return reserve(self, rows, columns, *more)

    monkeypatch.setattr(TreeCache, "reserve", limited)
    passes.slots = passes._empty(Target(model))
    monkeypatch.setattr("token_recycling.model.graphs.passes.ROWS", (1, 8, 16))
    for ids in (tiny.prompt(0, 6), tiny.prompt(1, 6)):
        assert decoded(model, ids, "recycling:tree=8", max_new_tokens=20)[0] == plain(model, ids)
    assert passes._graphs.stopped
    assert [record.levelname for record in caplog.records if "no longer captured" in record.message] == ["WARNING"]


@pytest.mark.parametrize(("family", "drafter"), paired(["gpt2", "llama"], ["recycling:tree=80", "plain"]))
def test_the_end_of_the_context_is_reached(family, drafter):
    """Models with learned positions have none beyond it, for nodes that fill up a bucket neither."""
    model = architectures.model_of(architectures.named(family))
    longest = Target(model).max_length
    for left in (1, 3, 30):
        ids = tiny.prompt(left, longest - left, architectures.VOCABULARY)
        assert decoded(model, ids, drafter, max_new_tokens=left + 1)[0] == plain(model, ids, left + 1)


UNEQUAL = architectures.named("deepseek_v3")
"""Its keys and values have unequal sizes."""


@pytest.mark.parametrize(
    "case", [*architectures.chosen(case for case in architectures.SUPPORTED if case != UNEQUAL), UNEQUAL], ids=str
)
def test_every_family_gives_the_text_of_generate_or_says_why_not(case, recorded):
    """From steps that are recorded and replayed, as CUDA graphs are."""
    model = architectures.model_of(case)
    steps = passes_or_reason(Target(model))
    exceptional = {"bloom", "mpt", "llama4_text", "gpt_neo", "deepseek_v32", "falcon", "jetmoe", "xglm"}
    if case.family in exceptional or any(word in case.tested for word in ("ALiBi", "longrope", "dynamic")):
        assert isinstance(steps, str)
        with pytest.raises(tr.NoFastPathError, match=re.escape(f"fast=True: {steps}")):
            tr.accelerate(model, fast=True)
        return
    assert isinstance(steps, CapturedPasses), steps
    for length in (5, 29):
        ids = tiny.prompt(length, length, architectures.VOCABULARY)
        wanted = model.generate(ids, max_new_tokens=16, **GREEDY)
        text, stats = decoded(model, ids, Oracle([wanted[0]]), max_new_tokens=16)
        assert text == wanted[0, length:].tolist()
        assert stats.mat > 1.5


def test_endings_are_those_of_generate(model):
    """End-of-sequence tokens and a criterion of one's own; afterwards the cache holds all but the last token."""

    class Stops(StoppingCriteria):
        """Ends a text at the first multiple of 7."""

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 7 == 0

    for seed in range(3):
        for ending in ({"eos_token_id": [11, 17, 23]}, {"stopping_criteria": [Stops()]}):
            how = {"max_new_tokens": 50, "pad_token_id": 0, "return_dict_in_generate": True, **GREEDY, **ending}
            wanted = model.generate(tiny.prompt(seed, 8), **how)
            ours = tr.generate(model, tiny.prompt(seed, 8), drafter="recycling:tree=12", fast=True, **how)
            assert torch.equal(ours.sequences, wanted.sequences)
            assert ours.past_key_values.get_seq_length() == wanted.sequences.shape[1] - 1
            assert_same_slots(ours.past_key_values, wanted.past_key_values, atol=1e-5)


@pytest.mark.parametrize("more", [0, 3])
def test_a_cache_with_windows_that_generate_has_read_is_continued(more, recorded):
    """Layers of transformers have dropped more of the sequence than ours would have."""
    model, greedy = tiny.windowed(), {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(**tiny.continued(model, more), **greedy)
    ours = tr.generate(model, **tiny.continued(model, more), drafter="recycling:tree=16", fast=True, **greedy)
    assert torch.equal(ours, wanted)


def test_after_a_first_token_that_waited_for_no_copies_windows_are_those_of_generate(recorded):
    """Slots before them are dropped before the next pass."""
    model, ids = tiny.windowed(), tiny.prompt(0, 60)
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 60:].tolist()
    assert decoded(model, ids, "recycling:tree=16", max_new_tokens=20)[0] == wanted


def test_a_cache_made_without_a_configuration_is_gone_on_with():
    """It has no layers for those that share the states of others."""
    model, ids = (
        architectures.model_of(architectures.named("gemma3n_text")),
        tiny.prompt(0, 9, architectures.VOCABULARY),
    )
    wanted, held = model.generate(ids, max_new_tokens=24, **GREEDY), DynamicCache()
    tr.accelerate(model, "suffix", fast=True)
    first = model.generate(ids, past_key_values=held, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(first, past_key_values=held, max_new_tokens=12, **GREEDY), wanted)
