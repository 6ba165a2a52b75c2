"""Effects of each option of the drafter `recycling`, computed by hand."""

import numpy as np
import torch
from support import runs, tiny

import token_recycling as tr
from token_recycling import Context
from token_recycling._util.topk import top_candidates
from token_recycling.model.target import Target
from token_recycling.recycling.ngrams import ngrams_at
from token_recycling.recycling.suffix_index import BREAK


def confident_logits(following, vocab_size=64):
    """Logits (n, vocabulary) of a model that is nearly certain of these tokens."""
    logits = torch.zeros(len(following), vocab_size)
    logits[torch.arange(len(following)), following] = 20
    return logits


def teach(drafter, target, text, logits):
    """Learn the model's choice after every token of a text (length,) except the last."""
    ngrams = ngrams_at(text[None].numpy(), np.array([len(text) - 2]), np.array([len(text) - 1]), drafter.orders)
    drafter.prepare(target).learn(ngrams, *top_candidates(logits, drafter.k))


def draft_after(text, drafter="recycling", read=True, **options):
    """Return the draft, without its root, after a text whose every token was the model's choice."""
    made, ids = tr.make_drafter(drafter, **options), torch.tensor(text)
    target = Target(tiny.llama())
    if read:
        teach(made, target, ids, confident_logits(text[1:]))
    begun = runs.begun(made, ids, target)
    return begun.draft(Context(ids, 50)).tokens[1:].tolist()


def test_tree_sets_number_and_shape_of_nodes():
    ring = {"suffix": False, "k": 1}
    text = [*range(1, 9), 1]
    assert draft_after(text, tree=3, **ring) == [2, 3, 4]
    assert draft_after(text, tree=6, **ring) == [2, 3, 4, 5, 6, 7]
    assert draft_after(text, tree="chain:2", **ring) == [2, 3]
    assert draft_after(text, tree="0 00", **ring) == [2, 3]
    assert draft_after(text, tree="1 10", **ring) == [], "a row of one candidate has none of rank 1"


def test_longer_contexts_add_candidates():
    """1 5 was followed by 10, 2 5 by 20."""
    text, how = [1, 5, 10, 30, 2, 5, 20, 31, 1, 5], {"tree": "0 1", "k": 1, "suffix": False}
    assert draft_after(text, orders=1, **how) == [20]
    assert draft_after(text, orders=2, **how) == [20, 10]
    assert draft_after(text, orders=2, memory=0, **how) == [20], "no memory, no longer contexts"
    text = [7, 1, 2, 5, 10, 8, 1, 2, 5, 30, 7, 1, 2, 5]
    assert [draft_after(text, orders=orders, **how) for orders in (3, 4)] == [[30], [30, 10]]


def test_suffix_enables_copying():
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert draft_after(text, read=False, tree=3) == [3, 4, 5]
    assert draft_after(text, read=False, tree=3, suffix=False) == []


def test_history_of_outputs_is_drafted(model):
    """Prompts are excluded; without rows and suffix there is no other source."""
    for history, wanted in ((64, True), (0, False)):
        drafter = tr.make_drafter("recycling", tree="chain:3", k=1, orders=1, suffix=False, history=history)
        target = Target(model)
        said = tr.generate(model, tiny.prompt(0, 5), drafter=drafter, max_new_tokens=24)[0].tolist()
        written = said[5:]
        assert drafter.matrix.history.tokens.tolist() == ([BREAK, *written] if wanted else [])
        drafter.matrix.shares[:] = 0
        begun = runs.begun(drafter, written[:10], target)
        found = begun.draft(Context(torch.tensor(written[:10]), 9)).tokens[1:].tolist()
        assert found == (written[10:13] if wanted else [])


def test_sequences_of_a_batch_share_rows_but_no_suffix(counting):
    drafter, texts = tr.make_drafter("recycling", tree=3), [torch.tensor([1, 2, 3, 1]), torch.tensor([1, 5, 6, 1])]
    first, second = (runs.begun(drafter, text, Target(counting)) for text in texts)
    assert first.draft(Context(texts[0], 9)).tokens.tolist() == [1, 2, 3, 1]
    assert second.draft(Context(texts[1], 9)).tokens.tolist() == [1, 5, 6, 1]
    teach(drafter, Target(counting), torch.tensor([9, 10]), confident_logits([10], 16))
    assert second.draft(Context(torch.tensor([1, 5, 6, 1, 9]), 9)).tokens.tolist()[:2] == [9, 10]
