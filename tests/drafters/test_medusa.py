"""Medusa-1: inputs and outputs of heads, trees, training and files."""

from itertools import islice

import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.runs import check_perfect, fix_costs
from support.strategies import rank_paths

import token_recycling as tr
from token_recycling.drafters._shared.saved import TrainedPartError
from token_recycling.drafters.medusa import Medusa, MedusaHeads, load_heads, save_heads
from token_recycling.model.target import Target
from token_recycling.serving.api.steps import StepReporter
from token_recycling.training.continuations import Continuations, continuations
from token_recycling.training.declaration import MedusaTraining, Schedule
from token_recycling.training.loop import fit
from token_recycling.training.medusa import NOTHING, accuracy, examples, task_of

VOCABULARY = 16


def perfect_heads(heads):
    """Heads for the counting llama: its hidden state encodes the last token, and head k adds k to it."""
    made = MedusaHeads(heads, VOCABULARY)
    for number in range(heads):
        made.output.data[number] = torch.eye(VOCABULARY).roll(number + 1, dims=0)
    return made


def counting_heads(folder, model, heads=3):
    save_heads(folder, perfect_heads(heads), model, [[0.6, 0.25], [0.5, 0.3], [0.4, 0.2]][:heads])
    return folder


def draft_after(drafter, model, text):
    """Return rank paths and tokens drafted after a text whose last token is the model's own choice."""
    _, step = islice(tr.stream(model, torch.tensor([text[:-1]]), drafter, max_new_tokens=50), 2)
    return " ".join("".join(map(str, path)) for path in rank_paths(step.draft)[1:]), step.draft.tokens.tolist()


@pytest.mark.parametrize(
    ("name", "prefix"), [("medusa_lm_head.pt", ""), ("medusa_lm_head.safetensors", "medusa_head.")]
)
def test_authors_heads_compute_the_same_as_their_program(name, prefix, tmp_path):
    """Three heads of two blocks; the configuration may state another number."""
    width, vocabulary = 32, 64
    blocks = [torch.nn.ModuleDict({"linear": torch.nn.Linear(width, width)}) for _ in range(6)]
    outputs = [torch.nn.Linear(width, vocabulary, bias=False) for _ in range(3)]
    heads = torch.nn.ModuleList(torch.nn.ModuleList([*blocks[2 * n :][:2], outputs[n]]) for n in range(3))
    tensors = {f"{prefix}{key}": tensor for key, tensor in heads.state_dict().items()}
    path = tmp_path / name
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    states = torch.randn(5, width)
    with torch.no_grad():
        found = load_heads(tmp_path).heads(states, torch.nn.Identity())
        for number, (first, second, output) in enumerate(heads):
            inner = states + torch.nn.functional.silu(first["linear"](states))
            wanted = output(inner + torch.nn.functional.silu(second["linear"](inner)))
            assert torch.allclose(found[number], wanted, atol=1e-5)
    drafter, model = Medusa(tmp_path, tree="0 00 000"), tiny.llama()
    tr.generate(model, tiny.prompt(0, 5), drafter=drafter, max_new_tokens=8)
    for change, said in (({}, "vocabulary .*48, got 64"), ({"hidden_size": 16}, "hidden size .*16, got 32")):
        with pytest.raises(TrainedPartError, match=said):
            Medusa(tmp_path).check(Target(tiny.llama(vocab_size=48, **change)))
    with pytest.raises(ValueError, match=r"tree=static:4 .*accuracy"):
        Medusa(tmp_path, tree="static:4")
    for change, said in (({"other": states}, "unknown tensor other"), ({f"{prefix}3.2.weight": states}, "missing")):
        torch.save({**tensors, **change}, path) if path.suffix == ".pt" else save_file({**tensors, **change}, path)
        with pytest.raises(TrainedPartError, match=said):
            load_heads(tmp_path)


# drafts


@pytest.mark.parametrize(
    ("tree", "seconds", "wanted", "tokens"),
    [
        ("0 1 00 000", (), "0 1 00 000", [5, 6, 7, 7, 8]),
        ("static:3", (), "0 1 00", [5, 6, 7, 7]),
        ("static:6", (), "0 1 00 01 10 000", [5, 6, 7, 7, 8, 7, 8]),
        ("static:1", (), "0", [5, 6]),
        ("static:6,k=1", (), "0 00 000", [5, 6, 7, 8]),
        ("static", (1.0, 1.01, 1.02, 1.03, 9.0), "0 1 00", [5, 6, 7, 7]),
        ("static", (1.0, 9.0), "", [5]),
    ],
)
def test_heads_draft_from_the_state_before_the_root(counting, tmp_path, monkeypatch, tree, seconds, wanted, tokens):
    """In a given tree, the best of n nodes, or the number that pays, by measured accuracy, however uncertain the heads
    are.
    """
    if seconds:
        fix_costs(monkeypatch, range(1, len(seconds) + 1), seconds)
    counting.lm_head.weight.data *= 0.01
    drafter = tr.make_drafter(f"medusa:heads={counting_heads(tmp_path, counting)},tree={tree}")
    found = draft_after(drafter, counting, [3, 4, 5])
    assert found[0] == wanted
    assert found[1] == tokens


def test_perfect_heads_are_always_accepted(counting, tmp_path):
    drafter = Medusa(counting_heads(tmp_path, counting), tree="0 00 000", k=99)
    check_perfect(counting, drafter, depth=3)
    check_perfect(counting, StepReporter(drafter, lambda *_: None), depth=3)  # as the server's playground does


# files


def test_grown_tree_depends_on_the_probabilities_of_the_step(counting, tmp_path):
    """The counting llama's candidates have slowly falling logits; sharp heads give a chain, flat heads a star."""
    for factors, wanted in (((50, 50), ("0 00", [2, 3, 4])), ((1, 0), ("0 1", [2, 3, 4]))):
        heads = perfect_heads(2)
        heads.output.data *= torch.tensor(factors)[:, None, None]
        save_heads(tmp_path, heads, counting, [[0.5], [0.5]])
        assert draft_after(Medusa(tmp_path, tree=2), counting, [1, 2]) == wanted


def test_heads_that_do_not_fit_are_refused(counting, tmp_path):
    broken = perfect_heads(2)
    broken.bias = torch.nn.Parameter(torch.zeros(1))
    for number, (heads, measured) in enumerate(((perfect_heads(2), [[0.5]]), (broken, [[0.5], [0.5]]))):
        save_heads(tmp_path / str(number), heads, counting, measured)
        with pytest.raises(TrainedPartError, match=str(tmp_path)):
            Medusa(tmp_path / str(number))
    with pytest.raises(FileNotFoundError, match="token-recycling train medusa"):
        Medusa(tmp_path / "none")
    folder = counting_heads(tmp_path, counting)
    with pytest.raises(TrainedPartError, match=r"16, .*got 64"):
        tr.generate(tiny.llama(), tiny.prompt(0, 4), drafter=Medusa(folder), max_new_tokens=2)


@pytest.mark.parametrize("own", [False, True])
def test_saved_heads_are_read_back(counting, tmp_path, own):
    heads = MedusaHeads(2, VOCABULARY, blocks=2, output=counting.lm_head.weight if own else None)
    with torch.no_grad():
        for weight in heads.parameters():
            weight += torch.randn_like(weight)
    save_heads(tmp_path, heads, counting, [[0.5], [0.25]])
    read = load_heads(tmp_path)
    hidden = torch.randn(3, VOCABULARY)
    assert torch.equal(read.heads(hidden, counting.lm_head), heads(hidden, counting.lm_head))
    assert read.accuracy == [[0.5], [0.25]]
    assert read.heads.shares_output is not own


# training


def test_examples_pair_states_with_later_tokens(model):
    """A prompt of two tokens and four output tokens: the states before each of these, and the tokens after them."""
    texts = Continuations([torch.tensor([10, 11, 12, 13, 14, 15]), torch.tensor([20, 21, 22])], [2, 1])
    hidden, wanted = examples(Target(model), texts, heads=3)
    assert wanted.tolist() == [
        [13, 14, 15, NOTHING, 22, NOTHING],
        [14, 15, NOTHING, NOTHING, NOTHING, NOTHING],
        [15, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING],
    ]
    with torch.no_grad():
        first = model.model(input_ids=texts.texts[0][None]).last_hidden_state[0, 1:5]
        second = model.model(input_ids=texts.texts[1][None]).last_hidden_state[0, 0:2]
    assert torch.allclose(hidden, torch.cat([first, second]), atol=1e-5)
    heads, task = MedusaHeads(2, 32), task_of(model, texts, MedusaTraining(heads=2))
    losses = [
        torch.nn.functional.cross_entropy(logits, labels, ignore_index=NOTHING)
        for logits, labels in zip(heads(hidden, model.lm_head), wanted[:2], strict=True)
    ]
    assert torch.allclose(task.loss_of(heads, (hidden, wanted[:2])), 0.8 * losses[0] + 0.64 * losses[1])


def counting_continuations(model, folder):
    prompts = [torch.tensor([seed % VOCABULARY, (seed + 1) % VOCABULARY]) for seed in range(24)]
    return continuations(tr.generate, model, prompts, folder / "texts", max_new_tokens=12)


@pytest.mark.parametrize("own", [False, True])
def test_heads_trained_on_a_counting_model_predict_it(counting, tmp_path, own):
    """The target is in 16 bits; its heads are trained in 32."""
    losses = []
    texts, held_out = counting_continuations(counting, tmp_path).split(0.25)
    counting.to(torch.bfloat16)
    task = task_of(counting, texts, MedusaTraining(heads=2, own_output=own, batch=4))
    heads = fit(task, Schedule(80, rate=0.03), progress=lambda step, steps, loss: losses.append(loss))
    assert losses[-1] < 0.3 * losses[0]
    assert heads.weight.dtype == torch.float32
    measured = accuracy(counting, heads, held_out, ranks=3)
    assert [ranks[0] for ranks in measured] == pytest.approx([1, 1])
    assert all(sum(ranks) <= 1 + 1e-6 for ranks in measured)
    save_heads(tmp_path, heads.bfloat16(), counting, measured)
    assert draft_after(Medusa(tmp_path, tree="0 00"), counting, [1, 2]) == ("0 00", [2, 3, 4])
