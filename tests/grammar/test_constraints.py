"""Outputs constrained by a grammar equal those of `generate` with the same processor, in fewer steps."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from support import tiny
from support.automata import AutomatonProcessor, _Place, random_automaton
from support.cases import paired
from support.drafters import NAMES, example

import token_recycling as tr
from token_recycling.grammar import adapters, statistics
from token_recycling.grammar.allowed import top_allowed
from token_recycling.grammar.constraint import Constraint
from token_recycling.grammar.state import State
from token_recycling.grammar.statistics import GrammarStatistics
from token_recycling.trees.draft import Draft, Step
from token_recycling.trees.templates import Template

PROMPT = torch.tensor([[3, 17, 42, 5, 9, 3, 17]])
CHAIN = [{one + 1: one + 1} for one in range(40)] + [{0: 40}]
"""Forces the tokens 1 to 40, then zeros."""


def arguments(automaton, **how):
    processors = [AutomatonProcessor(automaton, 64)]
    return {"max_new_tokens": 40, "do_sample": False, "logits_processor": processors, **how}


def state_of(automaton, place=0):
    return State(_Place(automaton, place), 2)


@pytest.mark.parametrize(("seed", "sample"), paired(range(3), [False, True]))
def test_constrained_output_equals_generate(seed, sample):
    model, automaton = tiny.llama(seed), random_automaton(seed)
    texts = []
    for call in (model.generate, lambda *one, **how: tr.generate(model, *one, **how)):
        torch.manual_seed(seed)
        texts.append(call(PROMPT, **arguments(automaton, do_sample=sample)))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", NAMES)
def test_constrained_output_of_every_drafter_equals_generate(name, tmp_path):
    model, automaton, stats = tiny.llama(4), random_automaton(4), tr.Stats()
    drafter = example(name, model, tmp_path)
    plain = model.generate(PROMPT, **arguments(automaton))
    assert torch.equal(tr.generate(model, PROMPT, drafter=drafter, stats=stats, **arguments(automaton)), plain)


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_most_probable_allowed_tokens_are_learned(scale):
    """Of states that allow few tokens, most, all but one, or none of the most probable ones. Forbidden tokens have no
    probability.
    """
    logits, draws, most = scale * torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), random.Random(0), 8
    allowed = [draws.sample(range(64), number) for number in (3, 20, 40, 63)] + [logits[4].argsort()[:40].tolist()]
    states = {node: state_of([dict.fromkeys(tokens, 0)]) for node, tokens in enumerate(allowed)}
    step = Step(Draft.chain([0] * 5), logits, [0], [1], finished=False)
    for node, (ids, probabilities) in enumerate(zip(*top_allowed(step, states, most), strict=True)):
        likely = probabilities > 0
        order = sorted(allowed[node], key=lambda token: -float(logits[node, token]))
        assert likely.any()
        assert ids[likely].tolist() == order[: likely.sum()]
        assert (np.diff(probabilities) <= 0).all()


def test_statistics_are_kept_by_the_set_of_allowed_tokens_for_a_limited_number_of_sets(monkeypatch):
    """Newer choices outweigh older ones."""
    monkeypatch.setattr(statistics, "_STATES", 4)
    learned = GrammarStatistics()
    for least in range(9):
        sets = [{least, 63}, {least, 63}, {least, 50, 63}, {*range(40), 63}]
        states = [state_of([dict.fromkeys(tokens, 0)]) for tokens in sets]
        assert len({state.key for state in states}) == 3
        for tokens, state in zip(sets, states, strict=True):
            learned.learn(state, least)
            found = dict(learned.probabilities(state, []))
            assert len(tokens) > 32 or ({*found}, found[least]) == (tokens, max(found.values()))
    assert max(len(learned._choices), len(learned._weights)) <= 4
    for token in [least] * 200 + [63] * 40:
        learned.learn(states[0], token)
    found = dict(learned.probabilities(states[0], []))
    assert found[63] > found[least]
    one, *others = (state_of([dict.fromkeys({least, 62, 63}, 0)]) for least in range(5))
    for state in (one, *others[:3], one, others[3]):  # the set learned longest ago is forgotten
        learned.learn(state, 63)
    assert one.key in learned._choices


@pytest.mark.parametrize("drafter", ["recycling", "suffix", "fuse:parts=suffix+recycling"])
def test_forced_tokens_are_drafted_together(drafter):
    model, stats = tiny.llama(), tr.Stats()
    text = tr.generate(model, PROMPT, drafter=drafter, stats=stats, **arguments(CHAIN))
    assert text[0, 7:].tolist() == [*range(1, 41)]
    assert stats.mat > 6


def test_drafter_learns_with_the_grammar_states_of_a_step():
    seen = []

    class Noting(type(tr.make_drafter("prompt_lookup"))):
        def start(self, prompt, target):
            sequence = super().start(prompt, target)
            sequence.observe = seen.append
            return sequence

    tr.generate(tiny.llama(), PROMPT, drafter=Noting(), **arguments(random_automaton(0)))
    assert seen
    for step in seen:
        states = [step.grammar_states[node] for node in step.accepted]
        assert all(state.allows(np.array([token]))[0] for state, token in zip(states, step.tokens, strict=True))


def test_forbidden_nodes_are_replaced_by_forced_ones():
    automaton = [{1: 1, 2: 1}, {7: 2}, {8: 3}, {9: 0}]
    tree = Template((-1, 0, 0, 0, 1, 2), (0, 0, 1, 2, 0, 0))
    draft = Draft([5, 1, 3, 2, 6, 1], tree.parents, [1, 0.5, 0.3, 0.2, 0.5, 0.5])
    fitted = Constraint(state_of(automaton), 1).fitted(draft, max_depth=9)
    places = {tuple(fitted.tokens[list(fitted.lineages[node])].tolist()) for node in range(len(fitted))}
    assert {(5, 1, 7, 8, 9), (5, 2, 7)} <= places
    assert not any(3 in path or 6 in path for path in places)
    assert fitted.depth < 9


def test_sampled_and_needed_nodes_are_kept():
    automaton = [{1: 1}, {7: 0}]
    tree, tokens, state = Template((-1, 0, 0), (0, 0, 1)), torch.tensor([5, 1, 3]), state_of([{1: 1}, {7: 0}])
    drawn = Draft(tokens, tree.parents, sampled_from={1: torch.ones(64) / 64, 2: torch.ones(64) / 64})
    assert Constraint(state, 1).fitted(drawn, max_depth=9) is drawn
    needed = Constraint(state, 1).fitted(Draft(tokens, tree.parents, needed=frozenset({2})), max_depth=9)
    assert needed.tokens.tolist() == [5, 1, 3]
    assert needed.needed == {2}
    cut = Constraint(state_of(automaton), 1).fitted(Draft(tokens, tree.parents), max_depth=2)
    assert cut.tokens.tolist() == [5, 1]


def test_longest_token_of_a_forced_string_is_likely_until_another_is_learned():
    # AB is forced; token 0 is A, token 1 is B, token 2 is both.
    automaton = [{0: 1, 2: 2}, {1: 2}, {3: 2}]
    whole = State(type("Forced", (_Place,), {"forced": "ABDDD"})(automaton, 0), 2)
    whole._after = {0: _forced("BDDD"), 2: _forced("DDD")}
    grammar_statistics = GrammarStatistics()
    probabilities = dict(grammar_statistics.probabilities(whole, []))
    assert probabilities[2] > 0.9 > 0.1 > probabilities[0]
    for _ in range(9):
        grammar_statistics.learn(whole, 0)
    assert dict(grammar_statistics.probabilities(whole, []))[0] > 0.8


def _forced(string):
    return State(type("Forced", (_Place,), {"forced": string})([{3: 0}], 0), 2)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ('root ::= "only " [ab]', "only "),
        ('root ::= "é" | "è"', ""),
        ('root ::= "yes" | "yesterday"', "yes"),
        ('root ::= ("a" "b" "c") | "ab"', "ab"),
        ('root ::= "a" root', "a" * 256),
        ('root ::= "ab" next\nnext ::= "é" next', "ab" + "é" * 127),
    ],
)
def test_forced_string_has_a_limited_length(form, expected):
    """xgrammar's own search for the string does not terminate if the grammar has no end."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    tokenizer = tiny.tokenizer()
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[0])
    processor = LogitsProcessor(xgrammar.GrammarCompiler(known).compile_grammar(form))
    assert adapters.state_of([processor], PROMPT).forced == expected
    ours = adapters.state_of([tr.constrain(tokenizer, grammar=form)], PROMPT).forced
    assert ours[:100] == expected[:100]


def test_sequences_of_a_batch_keep_their_own_grammars(model):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    vocabulary = [chr(97 + token % 26) * (1 + token // 26) for token in range(63)] + ["</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[63]))
    forms = [compiler.compile_grammar(f'root ::= "{text}"{{9}}') for text in ("ab", "xyz")]
    asked = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(PROMPT).expand(2, -1)}
    wanted, ours = (
        decoding.generate(PROMPT.expand(2, -1), logits_processor=[LogitsProcessor(forms)], **asked)
        for decoding in (model, tr.accelerate(copy.deepcopy(model)))
    )
    assert torch.equal(wanted, ours)
    assert not torch.equal(ours[0], ours[1])


def test_constrain_does_not_keep_a_tokenizer_alive():
    tokenizer = tiny.tokenizer()
    tr.constrain(tokenizer, regex="a+")
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None
