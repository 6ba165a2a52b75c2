"""Heads that go on learning: what a target accepts is drafted more often, texts stay, and one key teaches no other."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import assistants, tiny, ways
from support.eagle_heads import EAGLE_1, EAGLE_3, counting_head, outputs_of, own_states, tensors_of, written
from support.runs import drafts_of, fix_costs, fix_work

import token_recycling as tr
from token_recycling.drafters._shared import last_layer
from token_recycling.drafters._shared import states as states_module
from token_recycling.drafters._shared.last_layer import LastLayer, Said
from token_recycling.drafters.eagle import Eagle
from token_recycling.drafters.mtp import Mtp
from token_recycling.model.compat import MtpCache
from token_recycling.model.loading import Loaded
from token_recycling.model.tree_model import TreeModel
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.settings import Isolation

NEW = 40
KINDS = ["eagle-1", "eagle-3", "mtp of one layer", "mtp of two"]
WAYS = [ways.greedy, ways.sampled, ways.end_of_sequence, ways.padded_batch]


@pytest.fixture
def eager(monkeypatch):
    """Passes of tiny models are so short that 2% of them is no step of learning, and these texts are few."""
    monkeypatch.setattr(last_layer, "_SHARE", 50.0)
    monkeypatch.setattr(last_layer, "_RATE", 0.02)
    monkeypatch.setattr(last_layer, "_PASSES", 50)


def drafter_for(kind, model, folder, learn=True):
    """One that knows nothing of the model."""
    if kind.startswith("mtp"):
        return Mtp(assistants.mtp(model, 1 + kind.endswith("two")), tree=6, k=3, learn=learn)
    config = EAGLE_1 if kind == "eagle-1" else EAGLE_3
    return Eagle(written(folder / kind, config, tensors_of(config, seed=1)), tree=6, k=3, learn=learn)


def decoded(model, drafter, seeds, **more):
    stats = tr.Stats()
    for seed in seeds:
        ids = tiny.prompt(seed, 9)
        tr.generate(model, ids, drafter=drafter, max_new_tokens=NEW, stats=stats, **more)
    return stats


def turned_head(kind, model, folder):
    """One that knew how the counting llama goes on, but for its tokens, which are others now."""
    width = model.config.hidden_size
    turn = torch.eye(width)[torch.randperm(width, generator=torch.Generator().manual_seed(0))]
    if kind != "eagle-1":
        layers = assistants.counting_mtp(model, 1 + kind.endswith("two"))
        layers.layers[-1].eh_proj.weight.data = torch.cat([turn, torch.zeros(width, width)], dim=1)
        return Mtp(layers, tree=4, k=1, learn=True)
    counting_head(folder, model)
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"fc.weight": torch.cat([turn, torch.zeros(width, width)], dim=1)}, folder / "model.safetensors"
    )
    return Eagle(folder, tree="chain:3", learn=True)


@pytest.mark.parametrize("kind", ["eagle-1", "mtp of one layer", "mtp of two"])
def test_more_is_accepted_of_texts_like_those_that_were_seen(kind, counting, tmp_path, eager):
    drafter, ids = turned_head(kind, counting, tmp_path), torch.tensor([[1, 2]])

    def mat(one):
        stats = tr.Stats()
        tr.generate(counting, ids, drafter=one, max_new_tokens=NEW, stats=stats)
        return stats.mat, stats.drafter_statistics

    before, _ = mat(drafter.fork())
    for _ in range(4):
        _, learned = mat(drafter)
        assert learned["head_pairs"] > NEW / 2
        assert learned["head_batches"] > 10
        assert learned["head_seconds"] > 0
    after, _ = mat(drafter.fork())
    assert after > before + 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learned_by_default(kind, deep, tmp_path):
    drafter = drafter_for(kind, deep, tmp_path, learn=False)
    assert type(drafter).learn is False
    first = drafts_of(deep, drafter, tiny.prompt(1, 9), max_new_tokens=NEW)
    assert not any(name.startswith("head_") for name in decoded(deep, drafter, range(4)).drafter_statistics)
    assert drafts_of(deep, drafter, tiny.prompt(1, 9), max_new_tokens=NEW) == first
    assert drafter.fork() is drafter


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", ["eagle-1", "mtp of one layer"])
def test_texts_are_those_of_generate(kind, way, tmp_path, eager):
    """Before it has learned and afterwards, with the draws that are left."""
    model = ways.model_for(way)
    drafter = drafter_for(kind, model, tmp_path)
    for _ in range(2):
        found = way(model, lambda *inputs, **arguments: tr.generate(model, *inputs, drafter=drafter, **arguments))
        ways.assert_as_wanted(way, found)
    assert drafter._last[model].drafts


@torch.no_grad()
def all_outputs(kind, model, drafter, text):
    """A head's outputs (n, width) for a whole text, all of it read anew, and the place of the first one's token."""
    states = model.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    if kind.startswith("mtp"):
        ids, places = torch.tensor([text[1:]]), torch.arange(1, len(text))[None]
        own, cache = states[-1][:, :-1], MtpCache(config=drafter.layers.config)
        for number in range(len(drafter.layers.layers)):
            if number:
                own, ids, places = own[:, :-1], ids[:, 1:], places[:, 1:]
            own = drafter.layers.forward_layer(number, own, places, cache, input_ids=ids)
        return own[0], len(drafter.layers.layers)
    config = EAGLE_1 if kind == "eagle-1" else EAGLE_3
    tensors = tensors_of(config, seed=1)
    read = states[-1] if config is EAGLE_1 else torch.cat([states[number] for number in (2, 3, 3)], dim=-1)
    embedded = model.get_input_embeddings()(torch.tensor(text[1:]))
    own = own_states(config, tensors, read[0, :-1])
    return outputs_of(config, tensors, embedded, own, torch.arange(len(text) - 1)), 1


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_stand_beside_what_the_target_said_behind_the_same_tokens(kind, deep, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(LastLayer, "tell", lambda layer, outputs, ids, chances: told.append((outputs, ids, chances)))
    drafter, prompt = drafter_for(kind, deep, tmp_path), tiny.prompt(2, 9)
    text = tr.generate(deep, prompt, drafter=drafter, max_new_tokens=NEW)[0].tolist()
    wanted, first = all_outputs(kind, deep, drafter, text)
    logits = deep(torch.tensor([text])).logits[0].softmax(-1)
    outputs, ids, chances = (torch.cat([torch.as_tensor(part) for part in parts]) for parts in zip(*told, strict=True))
    assert len(outputs) > NEW - 10
    begin = 8 if kind != "mtp of two" else int((wanted - outputs[0]).abs().sum(1).argmin()) + first
    torch.testing.assert_close(outputs, wanted[begin - first :][: len(outputs)], atol=1e-4, rtol=1e-3)
    likely = logits[begin : begin + len(outputs)].topk(8)
    torch.testing.assert_close(chances, likely.values, atol=1e-4, rtol=1e-3)
    assert (ids == likely.indices).float().mean() > 0.99, "but for ties"


def test_the_files_of_a_head_stay_as_they_are(deep, tmp_path, eager):
    drafter = drafter_for("eagle-3", deep, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    decoded(deep, drafter, range(3))
    assert drafter._last[deep].learned.any()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_layers_given_in_python_stay_as_they_are(deep, eager):
    layers = assistants.mtp(deep, 2)
    before = {name: weight.clone() for name, weight in layers.state_dict().items()}
    drafter = Mtp(layers, tree=6, k=3, learn=True)
    decoded(deep, drafter, range(3))
    assert drafter._last[deep].learned.any()
    assert all(torch.equal(weight, before[name]) for name, weight in layers.state_dict().items())


# What one learns, another does not know


@pytest.mark.parametrize("kind", KINDS[1:3])
def test_what_one_key_teaches_no_other_key_sees(kind, deep, tmp_path, eager, monkeypatch):
    """Each begins with what the base had learned; drafts and steps of another key are those of a server where nothing
    was planted.
    """
    fix_costs(monkeypatch, (1, 64), (1.0, 1.1))
    fix_work(monkeypatch)
    base, asked = drafter_for(kind, deep, tmp_path), tiny.prompt(1, 9)
    decoded(deep, base, range(4, 6))
    pool = DrafterPool(Loaded(deep, tiny.tokenizer()), base, isolation=Isolation.per_key)
    known = base._last[deep].learned
    unplanted = drafts_of(deep, base.fork(), asked, max_new_tokens=NEW)
    with pool.acquire("a") as drafter:
        for _ in range(3):
            planted = drafts_of(deep, drafter, asked, max_new_tokens=NEW)
        assert not torch.equal(drafter._last[deep].learned, known)
    with pool.acquire("b") as drafter:
        assert torch.equal(drafter._last[deep].learned, known)
        assert drafts_of(deep, drafter, asked, max_new_tokens=NEW) == unplanted
    assert planted != unplanted
    assert len(planted) < len(unplanted)
    assert torch.equal(base._last[deep].learned, known)


def test_a_pickled_drafter_begins_anew(deep, tmp_path, eager):
    drafter = drafter_for("eagle-1", deep, tmp_path)
    decoded(deep, drafter, range(2))
    other = pickle.loads(pickle.dumps(drafter))
    assert not other._last
    assert decoded(deep, other, range(2)).drafter_statistics["head_pairs"] > 0


def test_what_was_learned_goes_along_where_a_target_changes_its_type(deep, tmp_path, eager):
    drafter = drafter_for("eagle-1", deep, tmp_path)
    decoded(deep, drafter, range(3))
    known = drafter._last[deep].learned
    deep.to(torch.bfloat16)
    start = drafter.lessons(TreeModel(deep), 9)
    assert torch.equal(drafter._last[deep].learned, known)
    assert start.behind(torch.ones(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Time and threads


def test_it_learns_when_a_text_has_ended_and_its_tokens_are_out(deep, tmp_path, monkeypatch):
    learned = []
    learn = LastLayer.learn
    monkeypatch.setattr(LastLayer, "learn", lambda layer: (learned.append(emitted), learn(layer))[1])
    emitted = 0
    for step in tr.stream(deep, tiny.prompt(2, 9), drafter_for("eagle-1", deep, tmp_path), max_new_tokens=NEW):
        emitted += len(step.tokens)
    assert learned == [NEW]


def layer_of(output, vocabulary=20):
    return LastLayer(Said(output, lambda outputs: outputs, vocabulary), torch.device("cpu"), torch.float32)


def test_learning_takes_its_share_of_time_and_no_more(monkeypatch):
    layer, clock = layer_of(torch.nn.Linear(8, 20, bias=False)), iter(range(1000))
    monkeypatch.setattr(last_layer.time, "perf_counter", lambda: next(clock))
    told = torch.randint(20, (640, 2)).numpy()
    layer.tell(torch.randn(640, 8), told, told.astype("float32") / 20)
    assert layer.learn().pairs == 0, "nothing was allowed"
    layer.allow(4.5 / last_layer._SHARE)  # the clock is read first, before the steps and each of them, and at last
    first = layer.learn()
    assert (first.pairs, first.batches, first.seconds) == (640, 2, 5)
    layer.allow(1.0 / last_layer._SHARE)
    assert layer.learn().batches == 0, "what it took too much is owed"
    layer.allow(100 / last_layer._SHARE)
    assert layer.learn().batches == 640 * last_layer._PASSES // 64 - 2, "each row is drawn so often, and no more"


def test_what_makes_it_worse_is_not_drafted_with(monkeypatch, eager):
    """Where the head is right and what it is told is noise; and where it comes to be right again."""
    torch.manual_seed(0)
    output = torch.nn.Linear(8, 20, bias=False)
    layer = layer_of(output)
    layer.allow(1e9)
    sure = torch.ones(200, 1).numpy()
    for _ in range(3):
        outputs = torch.randn(200, 8)
        layer.tell(outputs, torch.randint(20, (200, 1)).numpy(), sure)
        layer.learn()
        layer.tell(outputs, output(outputs).argmax(-1, keepdim=True).numpy(), sure)
        layer._judge(layer.ring.take(1000))
        layer.learn()
    assert layer.learned.any()
    assert torch.equal(layer(outputs), outputs)
    turned = torch.randperm(20)
    for _ in range(12):
        outputs = torch.randn(200, 8)
        layer.tell(outputs, turned[output(outputs).argmax(-1, keepdim=True)].numpy(), sure)
        layer.learn()
    assert layer.drafts


def test_learning_is_bounded_in_a_text(deep, tmp_path):
    drafter, passes, learned = drafter_for("eagle-1", deep, tmp_path), 0.0, 0.0
    for seed in range(6):
        stats = decoded(deep, drafter, [seed])
        passes += sum(stats.seconds.values())
        learned += stats.drafter_statistics["head_seconds"]
    assert 0 < learned < 0.02 * passes + 0.05, "beyond the share one batch more"


def test_threads_learn_and_draft_at_once(deep, tmp_path, eager):
    drafter, prompts = drafter_for("mtp of two", deep, tmp_path), [tiny.prompt(seed, 9) for seed in range(6)]

    def text(ids):
        return tr.generate(deep, ids, drafter=drafter, max_new_tokens=NEW, do_sample=False).tolist()

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(text, prompts))
    assert found == [deep.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() for ids in prompts]
    assert drafter._last[deep].drafts


def test_a_part_of_a_fused_drafter_learns_too(deep, tmp_path, eager):
    drafter_for("eagle-1", deep, tmp_path)
    fused = tr.make_drafter(f"fuse:suffix+eagle(head={tmp_path / 'eagle-1'},tree=6,learn=true)", nodes=12)
    assert decoded(deep, fused, range(3)).drafter_statistics["eagle.head_pairs"] > 0


# What is refused


def test_a_model_in_several_processes_is_refused(deep, tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "processes", lambda model: 2)
    with pytest.raises(ValueError, match="expected a model in one process for learn=true, got one in 2"):
        decoded(deep, drafter_for("eagle-1", deep, tmp_path), [0])


def test_an_output_layer_that_cannot_be_cut_is_refused():
    with pytest.raises(
        ValueError, match="expected an output layer with a weight of vocabulary x hidden numbers, got I"
    ):
        layer_of(torch.nn.Identity())
