"""A draft model reads a sequence and a tree like each path on its own, whichever nodes were accepted before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import architectures, runs, tiny

import token_recycling as tr
from token_recycling.drafters._shared.reader import Reader
from token_recycling.model.target import Target


def logits_after(model, text, *more):
    """Return the logits of an ordinary forward pass over the text and further tokens."""
    ids = torch.cat([text, torch.tensor(more, dtype=torch.long)])[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, -1]


@torch.no_grad()
def compare(model, length):
    """Three steps: a tree is read layer by layer, the path 7, 2 is kept, two more tokens are emitted."""
    text = tiny.prompt(length, length, model.get_input_embeddings().weight.shape[0])[0]
    reader = Reader(Target(model))
    reader.prefill(text)
    assert reader.cached == length - 1
    for _ in range(3):
        paths = [[5], [7], [5, 9], [5, 3], [7, 2], [5, 3, 8]]
        found = [*reader.read(text)]
        found += reader.read_layer([0, 0], [5, 7])
        found += reader.read_layer([1, 1, 2], [9, 3, 2])
        found += reader.read_layer([4], [8])
        for logits, path in zip(found, [[], *paths], strict=True):
            torch.testing.assert_close(logits, logits_after(model, text, *path), atol=1e-4, rtol=1e-4)
        reader.keep([2, 5])
        text = torch.cat([text, torch.tensor([7, 2, 11, 4])])
        assert reader.cached == len(text) - 2


CASES = [architectures.named("gpt2"), architectures.named("bloom"), architectures.named("gemma2", "window of 8")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_other_architectures_can_draft(case):
    """Learned positions, ALiBi by key, attention windows shorter than the sequence."""
    model = architectures.model_of(case)
    compare(model, 1)
    compare(model, 14)


@torch.no_grad()
def test_many_new_tokens_are_read_like_a_prompt(model):
    text, reader = tiny.prompt(0, 90)[0], Reader(Target(model))
    reader.read(text[:5])
    torch.testing.assert_close(reader.read(text)[0], logits_after(model, text), atol=1e-4, rtol=1e-4)
    assert reader.cached == 90


@torch.no_grad()
def test_tokens_beyond_the_vocabulary_are_read_as_its_last_token():
    model = tiny.llama(vocab_size=20)
    reader, text = Reader(Target(model)), torch.tensor([3, 19, 57, 4])
    torch.testing.assert_close(reader.read(text)[0], logits_after(model, text.clamp(max=19)), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_reach_is_limited_by_the_last_position_if_there_is_one():
    reader = Reader(Target(tiny.llama(max_position_embeddings=20)))
    # After 18 tokens, the last one (position 17) and two layers below it can be read, which gives a third layer.
    assert [reader.reach(torch.zeros(length)) for length in (18, 20, 21)] == [3, 1, 0]
    reader.prefill(tiny.prompt(0, 21)[0])
    assert reader.cached == 0
    model, target = (architectures.model_of(architectures.named("bloom")) for _ in range(2))
    del model.config.max_position_embeddings
    drafter, text = tr.make_drafter("draft_model", model=model, mode="sequence", depth=10), torch.tensor([1, 2, 3])
    drafting = runs.begun(drafter, text, Target(target))
    assert drafting.draft(tr.Context(text, remaining=50)).depth == 10


@torch.no_grad()
@settings(max_examples=12)
@given(st.data())
def test_any_tree_is_read_and_any_path_kept(data):
    """If no path is kept, the sequence is read again. Nodes that are not kept are discarded."""
    text, reader = tiny.prompt(1, 4)[0], Reader(Target(MODEL))
    for _ in range(3):
        torch.testing.assert_close(reader.read(text)[0], logits_after(MODEL, text), atol=1e-4, rtol=1e-4)
        paths = [[]]
        numbers = [[]]
        last = [0]
        for _ in range(data.draw(st.integers(0, 3))):
            parents = sorted(data.draw(st.lists(st.sampled_from(last), min_size=1, max_size=3)))
            tokens = [data.draw(st.integers(0, 63)) for _ in parents]
            found = reader.read_layer(parents, tokens)
            last = list(range(len(paths), len(paths) + len(parents)))
            for parent, token, number, logits in zip(parents, tokens, last, found, strict=True):
                paths.append([*paths[parent], token])
                numbers.append([*numbers[parent], number])
                torch.testing.assert_close(logits, logits_after(MODEL, text, *paths[-1]), atol=1e-4, rtol=1e-4)
        if data.draw(st.booleans()):
            kept = data.draw(st.integers(0, len(paths) - 1))
            reader.keep(numbers[kept])
            text = torch.cat([text, torch.tensor([*paths[kept], 9])])


MODEL = tiny.llama()
