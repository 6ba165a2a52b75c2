"""Candidates from hidden states: texts stay the same, and what can be learned of a model is learned."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support import tiny, ways
from support.architectures import SUPPORTED, model_of
from support.matrices import Grower, learn
from support.recurrent_architectures import RECURRENT

import token_recycling as tr
from token_recycling.costs.costs import Work
from token_recycling.drafters.recycling import states as states_module
from token_recycling.drafters.recycling import text as text_module
from token_recycling.drafters.recycling.states import Foresight, States
from token_recycling.model.tree_model import TreeModel
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.states import LearnedStates

WAYS = [ways.greedy, ways.sampled, ways.end_of_sequence, ways.padded_batch, ways.stop_strings, ways.conversation]


LEARNING = 50.0
"""Passes of tiny models are so short that a small share of them is no step of learning."""


def experienced(model, **options):
    """A drafter that has learned of enough states of a model."""
    drafter = tr.make_drafter("recycling", states=True, learning=LEARNING, **options)
    for seed in range(12):
        stats = tr.Stats()
        tr.generate(
            model, tiny.prompt(seed, 9, model.config.vocab_size), drafter=drafter, max_new_tokens=60, stats=stats
        )
        assert stats.drafter_statistics["state_pairs"] > 0
    assert stats.drafter_statistics["state_batches"] > 0
    assert drafter._learners[model].known
    assert drafter.matrix.states.out.any()
    return drafter


@pytest.mark.parametrize("tree", ["auto", 12])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_texts_are_those_of_generate(way, tree):
    model = ways.model_for(way)
    drafter = experienced(model, tree=tree)
    found = way(model, lambda *inputs, **arguments: tr.generate(model, *inputs, drafter=drafter, **arguments))
    ways.assert_as_wanted(way, found)


def test_states_that_are_foreseen_bring_tokens():
    """With nothing else to draft from: no rows, no texts."""
    model, ids = tiny.llama(context=1.0), tiny.prompt(50, 9)
    drafter = experienced(model, tree=8)
    without, drafter.matrix.rows.shares[:] = copy.deepcopy(drafter), 0
    drafter.matrix.rows.keys[:] = 0
    stats = tr.Stats()
    tr.generate(model, ids, drafter=drafter, max_new_tokens=3, stats=stats)
    assert stats.drafted > 0
    assert without.matrix.states is not drafter.matrix.states


def foreseeing(candidates):
    """What is foreseen after a token, with a probability of 0.9."""

    def foresee(parents, tokens):
        found = np.array([[candidates.get(int(token), 0)] for token in tokens])
        return found, np.where(found > 0, 0.9, 0).astype(np.float32)

    return foresee


def test_two_levels_are_foreseen_and_mixed_with_rows():
    matrix = NgramMatrix(50, k=1, orders=1)
    learn(matrix, ([5], {7: 0.3}), ([21], {8: 0.9}))
    grower = Grower(matrix, [5])
    paths = grower.paths(grower.grow(9, foresee=foreseeing({5: 20, 20: 21, 21: 22})))
    assert {(20,), (7,), (20, 21), (20, 21, 8)} <= set(paths)
    assert (20, 21, 22) not in paths, "the third level is not foreseen"


def test_nothing_is_foreseen_where_rows_are_sure():
    matrix = NgramMatrix(50, k=1, orders=1)
    learn(matrix, ([5], {7: 0.99}))
    matrix.calibration[:] = 100
    grower = Grower(matrix, [5])

    def never(parents, tokens):
        raise AssertionError("asked")

    grower.grow(3, foresee=never)
    assert grower.growing.tokens[1] == 7


def test_a_linear_world_is_learned():
    """Where the next state is a linear function of state and embedding, the map finds the token that it says."""
    model = tiny.llama()
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    numbers = torch.Generator().manual_seed(0)
    by_state, by_token = (torch.randn(hidden, hidden, generator=numbers) / hidden**0.5 for _ in range(2))
    tokens, states = torch.randint(vocabulary, (4000,), generator=numbers), torch.randn(4000, hidden, generator=numbers)
    embedded = model.get_input_embeddings()(tokens).detach()
    following = states @ by_state + embedded @ by_token + 0.5
    matrix = NgramMatrix(vocabulary, k=4)
    states_of = States(TreeModel(model), matrix)
    assert not states_of.known
    states_of.ring.add(states, tokens, following)
    states_of.see_text(range(vocabulary))
    states_of.allow(60)
    assert states_of.learn().pairs == 4000
    right = 0
    for place in range(100):
        ids, shares = states_of.foresight(states[place], 4)(np.array([-1]), tokens[place : place + 1].numpy())
        wanted = int((model.lm_head.weight @ following[place]).argmax())
        right += int(ids[0, 0]) == wanted
        assert shares[0, 0] >= shares[0, -1] > 0
    assert right >= 90


def test_threads_learn_and_draft_at_once():
    model = tiny.llama()
    drafter, prompts = experienced(model), [tiny.prompt(seed, 9) for seed in range(20, 28)]

    def text(ids):
        return tr.generate(model, ids, drafter=drafter, max_new_tokens=40, do_sample=False).tolist()

    pairs = drafter.matrix.states.pairs
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(text, prompts))
    assert found == [model.generate(ids, max_new_tokens=40, do_sample=False).tolist() for ids in prompts]
    assert drafter.matrix.states.pairs > pairs


@pytest.mark.parametrize("copied", [tr.Drafter.fork, lambda drafter: pickle.loads(pickle.dumps(drafter))])
def test_a_copy_knows_the_same_and_holds_nothing_of_the_model(copied):
    model = tiny.llama()
    drafter = experienced(model, tree=8)
    other = copied(drafter)
    assert not other._learners
    assert other.matrix.states.pairs == drafter.matrix.states.pairs
    ids = tiny.prompt(60, 9)
    found = tr.generate(model, ids, drafter=other, max_new_tokens=30, do_sample=False)
    assert found.tolist() == model.generate(ids, max_new_tokens=30, do_sample=False).tolist()
    assert other._learners[model].known


def test_a_world_that_is_not_linear_is_learned_by_the_hidden_layer():
    """The next state is a product of two signs: nothing that a linear map could say."""
    model = tiny.llama()
    hidden, numbers = model.config.hidden_size, torch.Generator().manual_seed(0)
    signs, tokens = (torch.randint(2, (6000,), generator=numbers) for _ in range(2))
    direction, answer = torch.randn(2, hidden, generator=numbers)
    embedding = model.get_input_embeddings()
    embedding.weight.data[:2] = torch.randn(hidden, generator=numbers) * torch.tensor([[1.0], [-1.0]])
    before = direction * (2 * signs[:, None] - 1.0)
    after = answer * (2 * (signs ^ tokens)[:, None] - 1.0)
    states_of = States(TreeModel(model), NgramMatrix(model.config.vocab_size, k=4))
    states_of.ring.add(before, tokens, after)
    states_of.allow(60)
    assert states_of.learn().batches > 0
    known = states_of._map
    linear = known._replace(out=torch.zeros_like(known.out))

    def error(by):
        found = states_of.next_states(before, tokens.numpy(), by)
        return float((found - after).square().mean() / after.square().mean())

    assert error(known) < 0.2 < 0.8 < error(linear)


def test_learning_takes_its_share_of_time_and_no_more(monkeypatch):
    model = tiny.llama()
    states = States(TreeModel(model), NgramMatrix(model.config.vocab_size, k=4))
    clock = iter(range(1000))
    monkeypatch.setattr(states_module.time, "perf_counter", lambda: next(clock))
    for _ in range(4):
        states.ring.add(*pairs_of(model, 256))
    assert states.learn().pairs == 0, "nothing was allowed"
    states.allow(4.5)  # the clock is read once before, once a block, once a batch, and once after
    first = states.learn()
    assert (first.pairs, first.seconds) == (256 * 2, 5)
    states.allow(1.0)
    assert states.learn().pairs == 0, "what it took too much is owed"
    states.allow(50.0)
    second = states.learn()
    assert second.pairs == 512
    assert 30 < second.batches < 50


def pairs_of(model, n, token=1):
    one = torch.ones(n, model.config.hidden_size)
    return one, torch.full((n,), token), one


def test_learning_is_bounded_in_a_text():
    """The seconds of passes that a text took, of all texts that shared them, and what learning took."""
    model, drafter = tiny.llama(), tr.make_drafter("recycling", states=True, tree=4)
    passes, learned = 0.0, 0.0
    for seed in range(6):
        stats = tr.Stats()
        tr.generate(model, tiny.prompt(seed, 9), drafter=drafter, max_new_tokens=60, stats=stats)
        passes += sum(stats.seconds.values())
        learned += stats.drafter_statistics["state_seconds"]
    assert 0 < learned < 0.02 * passes + 0.05, "beyond the share one block or batch more"


def test_learning_draws_nothing_from_torch():
    model = tiny.llama()
    states = States(TreeModel(model), NgramMatrix(model.config.vocab_size, k=4))
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    states.ring.add(*pairs_of(model, 1000))
    states.allow(60)
    assert states.learn().batches > 0
    assert torch.equal(torch.rand(3), wanted)


def test_foreseeing_rests_where_it_does_not_pay(monkeypatch):
    """What it takes is in the work of the drafter; where it takes as long as many passes, little is foreseen."""
    model, asked, now = tiny.llama(), [], [0.0]
    drafter, foresight = experienced(model), Foresight.__call__

    def slow(self, parents, tokens):
        asked.append(len(tokens))
        now[0] += taken
        return foresight(self, parents, tokens)

    monkeypatch.setattr(text_module, "_now", lambda: now[0])
    monkeypatch.setattr(Foresight, "__call__", slow)
    often, works = {}, []
    for taken in (0.0, 0.5):
        asked.clear()
        stats, copied = tr.Stats(), drafter.fork()
        copied.work = Work(rate=2.0)  # else a model so small drafts next to nothing
        tr.generate(model, tiny.prompt(60, 9), drafter=copied, max_new_tokens=300, stats=stats)
        often[taken] = len(asked) / stats.steps
        works.append(copied.work.of(4))
    assert works[1] > works[0]
    assert 0 < often[0.5] < 0.1 < often[0.0]


def test_of_pairs_the_newest_wait_and_are_kept(monkeypatch):
    monkeypatch.setattr("token_recycling.drafters._shared.ring._BYTES", 4000 * (4 * 32 + 8))
    model = tiny.llama()
    states = States(TreeModel(model), NgramMatrix(model.config.vocab_size, k=4))
    for token in range(30):
        states.ring.add(*pairs_of(model, 100, token))
    assert [int(part.tokens[0]) for part in states.ring._waiting] == list(range(10, 30))
    states.allow(60)
    assert states.learn().pairs == 2000
    for _ in range(5):
        states.ring.add(*pairs_of(model, 1000, 30))
        states.learn()
    assert len(states.ring.kept.tokens) == 4000
    assert set(states.ring.kept.tokens.tolist()) == {30}
    assert states.learn().pairs == 0


def test_what_one_learns_another_does_not_know():
    model = tiny.llama()
    drafter = experienced(model, tree=8)
    other, pairs = drafter.fork(), drafter.matrix.states.pairs
    tr.generate(model, tiny.prompt(60, 9), drafter=other, max_new_tokens=30)
    assert other.matrix.states.pairs > pairs == drafter.matrix.states.pairs


def test_a_model_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(states_module, "processes", lambda model: 2)
    with pytest.raises(ValueError, match="expected a model in one process for states=true, got one in 2"):
        tr.generate(tiny.llama(), tiny.prompt(0, 9), drafter="recycling:states=true", max_new_tokens=3)


def test_a_matrix_of_other_states_is_refused():
    model, drafter = tiny.llama(), tr.make_drafter("recycling:states=true")
    drafter.matrix = drafter.new_matrix(64)
    drafter.matrix.states = LearnedStates.empty(3, 64)
    with pytest.raises(ValueError, match="expected a matrix that learned from states of"):
        tr.generate(model, tiny.prompt(0, 9), drafter=drafter, max_new_tokens=3)


@pytest.mark.parametrize("family", ["gemma2", "granite", "qwen3_next", "gpt2"])
def test_other_families(family):
    """Some scale what they embed or their logits; some have states over the text."""
    model = model_of(next(case for case in [*SUPPORTED, *RECURRENT] if case.family == family))
    drafter = experienced(model, tree=6)
    ids = tiny.prompt(70, 9, model.config.vocab_size)
    found = tr.generate(model, ids, drafter=drafter, max_new_tokens=30, do_sample=False)
    assert found.tolist() == model.generate(ids, max_new_tokens=30, do_sample=False).tolist()
