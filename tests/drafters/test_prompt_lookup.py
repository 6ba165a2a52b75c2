"""Prompt lookup equals transformers' own; the suffix drafter on examples."""

import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import runs, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import token_recycling as tr
from token_recycling import Context
from token_recycling.model.target import Target

MODEL = tiny.counting_llama()


def draft_after(text, prompt=None, name="prompt_lookup", **options):
    """Return the draft after `text`, whose first `prompt` tokens were the prompt."""
    drafter = tr.make_drafter(name, **options)
    tokens = torch.tensor(text)
    draft = runs.begun(drafter, tokens[: prompt or len(text)], Target(MODEL)).draft(Context(tokens, 1000))
    assert draft.parents.tolist() == [*range(-1, len(draft) - 1)]
    assert draft.tokens[0] == text[-1]
    return draft.tokens[1:].tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_drafts_equal_those_of_transformers(text, prompt, num_tokens, size):
    theirs = PromptLookupCandidateGenerator(num_output_tokens=num_tokens, max_matching_ngram_size=size, max_length=1000)
    wanted = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    ours = draft_after(text, min(prompt, len(text)), num_tokens=num_tokens, max_matching_ngram_size=size)
    assert ours == wanted


@pytest.mark.parametrize(
    ("repeated", "options", "wanted"),
    [
        ([3], {}, [4, 5]),
        ([2, 3], {}, [4, 5, 6, 7]),
        ([1, 2, 3], {}, [4, 5, 6, 7, 8, 9]),
        ([1, 2, 3], {"factor": 0.5}, [4]),
        ([1, 2, 3], {"factor": 9, "num_tokens": 4}, [4, 5, 6, 7]),
        ([2, 3], {"min_match": 3}, []),
        ([2, 3], {"factor": float("inf"), "num_tokens": 3}, [4, 5, 6]),
        ([2, 3], {"factor": 5e-324}, [4]),
        ([], {}, []),
    ],
)
def test_suffix_draft_length_grows_with_the_match(repeated, options, wanted):
    """3 was followed by 4 5 6 7 8 9. The last 1, 2 or 3 tokens match, and twice that number is drafted."""
    assert draft_after([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, *repeated], 1, "suffix", **options) == wanted


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix"])
def test_sequences_are_independent(name, counting):
    drafter, target = tr.make_drafter(name), Target(counting)
    texts = [torch.tensor(text) for text in ([1, 2, 1], [1, 3, 1], [1])]
    begun = [runs.begun(drafter, text, target) for text in texts]
    drafted = [one.draft(Context(text, 9)).tokens.tolist() for one, text in zip(begun, texts, strict=True)]
    assert drafted == [[1, 2, 1], [1, 3, 1], [1]]


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix"])
def test_memory_of_a_step_does_not_depend_on_length(name, counting):
    """Token by token after a long sequence: nothing is copied or searched as a whole."""
    tokens = torch.arange(200_000) % 50_021
    begun = runs.begun(tr.make_drafter(name), tokens[:-9], Target(counting))
    begun.draft(Context(tokens[:-9], 99))
    tracemalloc.start()
    for left in range(8, 0, -1):
        assert len(begun.draft(Context(tokens[:-left], 99)).tokens) > 5
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
