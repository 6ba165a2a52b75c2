"""Calls with captured passes have the same output and learning. Without CUDA the passes run without being captured."""

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
def test_every_drafter_works_as_with_eager_passes(name, model, tmp_path, recorded):
    """With recorded and replayed passes; streams read long prompts in separate passes."""
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
        if name not in {"draft_model", "layer_skip"}:  # their trees depend on the cost of a pass
            assert found[0] == found[1]


@pytest.mark.parametrize("name", ["recycling", "eagle"])
def test_seeded_sampling_equals_generate(name, model, tmp_path, recorded):
    """Inside and outside of inference mode, with any learned state."""
    drafter, ids, stats = example(name, model, tmp_path), tiny.prompt(0, 6), tr.Stats()
    how = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 20}
    for within in (True, False, True):
        wanted = tiny.seeded(model.generate, ids, **how)[0]
        with torch.inference_mode(within):
            ours = tiny.seeded(tr.generate, model, ids, drafter=drafter, fast=True, stats=stats, **how)[0]
        assert torch.equal(ours, wanted)
    assert stats.accepted


@pytest.mark.parametrize("rows", [1, 2])
def test_nan_states_of_a_drafted_token_do_not_spread(rows, recorded):
    model, ids = tiny.llama(), torch.cat([tiny.prompt(seed, 5) for seed in range(rows)])
    arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    wanted, embeddings = model.generate(ids, **arguments), model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings[[token for token in range(len(embeddings)) if token not in wanted]] = torch.nan
    assert torch.equal(tr.generate(model, ids, drafter=Garbage(), fast=True, **arguments), wanted)


@pytest.mark.parametrize(("case", "length"), paired(["llama", "mistral window of 8"], [1, 90]))
def test_batch_smaller_than_its_bucket(case, length, recorded):
    """Three sequences in four batch slots; prompts of one token, with nothing to prefill, or longer than a window."""
    model = architectures.model_of(architectures.named(*case.split(" ", 1)))
    ids = torch.cat([tiny.prompt(seed, length, architectures.VOCABULARY) for seed in range(3)])
    arguments = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    wanted, stats = model.generate(ids, **arguments), tr.Stats()
    assert torch.equal(
        tr.generate(model, ids, drafter=Oracle(list(wanted)), fast=True, stats=stats, **arguments), wanted
    )
    assert stats.path.startswith("fast")


def test_output_across_buckets_and_bands_equals_generate():
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


def test_capacity_grows_during_a_call():
    model = tiny.llama(max_position_embeddings=2048, num_hidden_layers=1)
    passes, ids = passes_or_reason(Target(model)), tiny.prompt(0, 800)
    wanted, begin = plain(model, ids, 400), passes.begin
    passes.begin = lambda target, cache, lengths, longest: begin(target, cache, lengths, 8)
    passes.slots = passes._empty(Target(model))
    assert decoded(model, ids, "recycling:tree=8", max_new_tokens=400)[0] == wanted
    assert 1200 < passes.capacity < 2048


def test_capturing_stops_when_memory_for_slots_runs_out(model, monkeypatch, caplog):
    """One warning is logged, and the call continues with the minimum it needs."""
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
def test_decoding_reaches_the_end_of_the_context(family, drafter):
    """Models with learned positions have none beyond it, not even for padding nodes of a bucket."""
    model = architectures.model_of(architectures.named(family))
    longest = Target(model).max_length
    for left in (1, 3, 30):
        ids = tiny.prompt(left, longest - left, architectures.VOCABULARY)
        assert decoded(model, ids, drafter, max_new_tokens=left + 1)[0] == plain(model, ids, left + 1)


UNEQUAL = architectures.named("deepseek_v3")
"""Its keys and values have different sizes."""


@pytest.mark.parametrize(
    "case", [*architectures.chosen(case for case in architectures.SUPPORTED if case != UNEQUAL), UNEQUAL], ids=str
)
def test_every_family_equals_generate_or_gives_a_reason(case, recorded):
    """With recorded and replayed steps."""
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


def test_stopping_equals_generate(model):
    """With end-of-sequence tokens or a custom criterion; the returned cache has all tokens except the last."""

    class Stops(StoppingCriteria):
        """Stop at the first multiple of 7."""

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
def test_sliding_window_cache_of_generate_is_continued(more, recorded):
    """Layers of transformers have dropped more slots than ours would have."""
    model, greedy = tiny.windowed(), {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(**tiny.continued(model, more), **greedy)
    ours = tr.generate(model, **tiny.continued(model, more), drafter="recycling:tree=16", fast=True, **greedy)
    assert torch.equal(ours, wanted)


def test_streaming_with_windows_equals_generate(recorded):
    """Slots before the window are dropped before the next forward pass."""
    model, ids = tiny.windowed(), tiny.prompt(0, 60)
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 60:].tolist()
    assert decoded(model, ids, "recycling:tree=16", max_new_tokens=20)[0] == wanted


@pytest.mark.falls_back
def test_cache_created_without_a_configuration_is_continued():
    """Such a cache has no entries for layers that share the states of others."""
    model, ids = (
        architectures.model_of(architectures.named("gemma3n_text")),
        tiny.prompt(0, 9, architectures.VOCABULARY),
    )
    wanted, cache = model.generate(ids, max_new_tokens=24, **GREEDY), DynamicCache()
    tr.accelerate(model, "suffix", fast=True)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(first, past_key_values=cache, max_new_tokens=12, **GREEDY), wanted)
