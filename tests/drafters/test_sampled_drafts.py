"""Sampled outputs have the target's distribution with every drafter that samples its drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support import tiny
from support.cases import thinned
from support.chi_square import fit
from transformers import LogitsProcessorList
from transformers.generation import logits_process

import token_recycling as tr
from token_recycling.drafters.fuse import Fuse
from token_recycling.drafters.specdec_pp import AcceptanceHead
from token_recycling.model.hidden import last_state, layer_states

SIZE, NEW = 3, 4
PROMPT = torch.tensor([[1, 0, 2]])


def small_model(seed):
    return tiny.llama(seed, vocab_size=SIZE, initializer_range=0.12)


def sampled_draft_model(mode):
    options = {"mode": mode, "depth": 3, "k": 2, "theta_prob": 0.1, "tau": 1, "nodes": 14, "sampled": True}
    return tr.make_drafter("draft_model", model=small_model(8), **options)


def sampled_specdec_pp():
    """Its head stops after 0 and continues after 1: sampled tokens decide the length of drafts."""
    draft, head = small_model(8), AcceptanceHead(32, 0)
    with torch.no_grad(), layer_states(draft, last_state(draft.config.num_hidden_layers)) as states:
        draft(torch.cat([PROMPT.expand(SIZE, 3), torch.arange(SIZE)[:, None]], dim=1))
        head.output.weight[0] = torch.linalg.pinv(states[0][:, -1]) @ torch.tensor([-3.0, 3.0, 0.5])
    options = {"min_length": 1, "max_length": 4, "threshold": 0.5, "sampled": True}
    return tr.make_drafter("specdec_pp", model=draft, head=head, **options)


DRAFTERS: dict[str, Callable[[], tr.Drafter]] = {
    **{mode: lambda mode=mode: sampled_draft_model(mode) for mode in ("sequence", "tree", "graph")},
    "specdec_pp": sampled_specdec_pp,
    "fuse": lambda: Fuse(["recycling:tree=6,k=3", sampled_draft_model("tree")], nodes=8),
    "lookahead": lambda: tr.make_drafter("lookahead", window=2, ngram_size=3, guesses=2, pool_from_prompt=True),
}


@pytest.mark.parametrize(
    ("name", "runs"), thinned([("tree", 150), *((name, 400) for name in DRAFTERS)], every=1 + len(DRAFTERS))
)
def test_outputs_have_the_distribution_of_generate(name, runs):
    """Every output of 4 tokens over a vocabulary of 3, with a repetition penalty unknown to the drafters."""
    model = small_model(7)
    processors = LogitsProcessorList(
        [logits_process.RepetitionPenaltyLogitsProcessor(1.3), logits_process.TemperatureLogitsWarper(0.3)]
    )
    texts = torch.cartesian_prod(*[torch.arange(SIZE)] * NEW)
    whole = torch.cat([PROMPT.expand(len(texts), 3), texts], dim=1)
    with torch.no_grad():
        logits = model(input_ids=whole).logits
    exact = torch.ones(len(texts), dtype=torch.float64)
    for place in range(NEW):
        odds = processors(whole[:, : 3 + place], logits[:, 2 + place].clone()).double().softmax(-1)
        exact *= odds.gather(1, texts[:, place, None])[:, 0]

    torch.manual_seed(11)
    drafter, stats, seen, drawn = DRAFTERS[name](), tr.Stats(), Counter[tuple[int, ...]](), 0
    for _ in range(runs):
        text = []
        for step in tr.stream(
            model, PROMPT, drafter, do_sample=True, logits_processor=processors, max_new_tokens=NEW, stats=stats
        ):
            text += step.tokens
            drawn += len(step.draft.sampled_from or ())
        seen[tuple(text)] += 1
    assert stats.mat > 1.2
    assert (drawn > runs) == drafter.traits.samples
    if name == "graph":
        assert stats.drafter_statistics["verified_copies"] > runs / 6
    if name == "specdec_pp":
        assert runs / 8 < stats.drafter_statistics["stopped_by_head"] < stats.steps
    assert fit(seen, texts, exact) > 0.001


@pytest.mark.parametrize("name", ["sequence", "tree", "graph"])
def test_every_sampled_node_has_the_distribution_of_the_draft_model(name):
    """The declared distribution is that of a plain forward over the sequence and the node's ancestors."""
    draft, text, warmer = small_model(8), PROMPT[0].tolist(), logits_process.TemperatureLogitsWarper(0.3)
    torch.manual_seed(3)
    options = {"do_sample": True, "logits_processor": [warmer], "max_new_tokens": 12}
    for step in tr.stream(small_model(7), PROMPT, DRAFTERS[name](), **options):
        for node, source in (step.draft.sampled_from or {}).items():
            *above, _ = step.draft.lineages[node]
            path = [*text, *step.draft.tokens[above[1:]].tolist()]
            with torch.no_grad():
                logits = draft(torch.tensor([path])).logits[:, -1]
            torch.testing.assert_close(source, torch.softmax(logits / 0.3, dim=-1)[0], atol=1e-4, rtol=1e-4)
        text += step.tokens


@pytest.mark.parametrize("name", ["sequence", "tree", "graph"])
def test_top_k_1_sampling_equals_greedy_decoding(name):
    """A node may have more children than the draft distribution has possible tokens."""
    model, only = small_model(7), LogitsProcessorList([logits_process.TopKLogitsWarper(1)])
    wanted = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    options = {"do_sample": True, "logits_processor": only, "max_new_tokens": 12}
    steps = list(tr.stream(model, PROMPT, DRAFTERS[name](), **options))
    assert [token for step in steps for token in step.tokens] == wanted
    assert any(step.draft.sampled_from for step in steps)
