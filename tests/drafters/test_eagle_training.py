"""Training of EAGLE heads: the inputs of each pass, vocabularies, and that training helps."""

import pytest
import torch
from support import tiny
from support.eagle_heads import EAGLE_1, EAGLE_3, counting_head, outputs_of, own_states, tensors_of, written

import token_recycling as tr
from token_recycling.drafters.eagle import Eagle
from token_recycling.drafters.eagle.formats import load_head, save_head
from token_recycling.training.continuations import Continuations, continuations
from token_recycling.training.declaration import EagleTraining, Schedule
from token_recycling.training.eagle import Examples, acceptance, examples, new_head, task_of, training_loss, unrolled
from token_recycling.training.loop import fit


def counting_continuations(model, folder):
    prompts = [torch.tensor([seed % 16, (seed + 1) % 16]) for seed in range(24)]
    return continuations(tr.generate, model, prompts, folder / "texts", max_new_tokens=12)


@pytest.mark.parametrize("config", [EAGLE_1, EAGLE_3], ids=["EAGLE-1", "EAGLE-3"])
def test_training_passes_equal_drafting_steps(config, deep, tmp_path):
    """In pass j a position reads the target's states up to itself and the head's own j states after that, like a chain
    of drafted tokens below that prefix.
    """
    tensors, text = tensors_of(config, seed=1), tiny.prompt(2, 9)[0]
    head = load_head(written(tmp_path, config, dict(tensors))).head
    with torch.no_grad():
        states = deep.model(input_ids=text[None], output_hidden_states=True).hidden_states
        read = states[-1] if config is EAGLE_1 else torch.cat([states[number] for number in (2, 3, 3)], dim=-1)
        batch = Examples(text[None], torch.tensor([9]), read, deep(input_ids=text[None]).logits)
        passes = [outputs[0] for outputs in unrolled(deep, head, batch, 3)]
        embedded = deep.get_input_embeddings()(text)
        for place in range(6):
            own = own_states(config, tensors, read[0, : place + 1])
            for number in range(3):
                rows = embedded[1 : place + 2 + number]
                found = outputs_of(config, tensors, rows, own, torch.arange(len(rows)))[-1:]
                torch.testing.assert_close(
                    passes[number][place], found[0], rtol=1e-5, atol=1e-6 * found.abs().max().item()
                )
                own = torch.cat([own, found])


def test_draft_vocabulary_has_the_most_frequent_tokens(deep):
    texts = Continuations([torch.tensor([9, 9, 9, 4, 4, 7]), torch.tensor([7, 4, 9, 50])], [1, 1])
    head = new_head(deep, texts, EagleTraining(version=3, vocabulary=3, intermediate=20))
    assert head.ids is not None
    assert head.ids.tolist() == [4, 7, 9]
    assert head.state_dict()["midlayer.mlp.up_proj.weight"].shape == (20, 32)
    assert torch.equal(head.state_dict()["lm_head.weight"], deep.lm_head.weight[[4, 7, 9]])
    assert new_head(deep, texts, EagleTraining(version=3)).ids is None, "the whole vocabulary if it is no larger"


def test_texts_outside_the_draft_vocabulary_have_no_loss(deep):
    """The head has one token, which the target never chooses in these texts."""
    chosen = deep(input_ids=torch.tensor([[1, 2]])).logits.argmax(-1)
    other = next(token for token in range(64) if token not in chosen)
    how = EagleTraining(version=3, vocabulary=1)
    head = new_head(deep, Continuations([torch.tensor([other])], [1]), how)
    loss = training_loss(deep, head, examples(deep, head, Continuations([torch.tensor([1, 2])], [1])), how)
    assert loss.item() == 0
    assert not loss.requires_grad


def test_acceptance_is_measured_on_outputs_only(counting, tmp_path):
    """The prompt does not count as the model does."""
    head = load_head(counting_head(tmp_path, counting)).head
    assert acceptance(counting, head, Continuations([torch.tensor([3, 9, 1, 2, 3, 4])], [3]), depths=1, ranks=1) == [
        [1]
    ]


@pytest.mark.parametrize("version", [1, 3])
def test_head_trained_on_a_counting_model_predicts_it(version, tmp_path):
    losses, model = [], tiny.counting_llama(num_hidden_layers=4)  # so that there are states between layers
    texts, held_out = counting_continuations(model, tmp_path).split(0.25)
    how = EagleTraining(version=version, unrolled=2, batch=4, vocabulary=12)
    progress, state = lambda step, steps, loss: losses.append(loss), torch.get_rng_state()
    task = task_of(model, texts, how)
    assert torch.equal(torch.get_rng_state(), state), "no random numbers of the caller are used"
    one, other = (task_of(model, texts.select([0]), how).batch_at(number).states for number in (0, 1))
    assert torch.equal(one, other) == (version == 3), "in version 1 every batch has its own noise"
    head = fit(task, Schedule(60, rate=0.02), progress=progress)
    assert losses[-1] < 0.8 * losses[0]
    measured = acceptance(model, head, held_out, depths=3, ranks=4)
    assert len(measured) == 3
    assert measured[0][0] > (0.9 if version == 1 else 0.6), "version 3 has 12 of 16 tokens"
    assert all(sum(ranks) <= 1 + 1e-6 for ranks in measured)
    save_head(tmp_path / "head", head, model, acceptance=measured)
    stats = tr.Stats()
    drafter = Eagle(tmp_path / "head", tree="chain:2")
    tr.generate(model, torch.tensor([[1, 2]]), drafter=drafter, max_new_tokens=30, stats=stats)
    assert stats.mat > 1.5
