"""Training of an acceptance head: labels, mixtures and the loss by hand, and a trained head."""

import math

import pytest
import torch
from support import tiny

from token_recycling.drafters.specdec_pp import AcceptanceHead
from token_recycling.model.target import Target
from token_recycling.training.continuations import Continuations
from token_recycling.training.declaration import Schedule, SpecDecTraining
from token_recycling.training.loop import fit
from token_recycling.training.specdec_pp import judged, labelled, loss, states_and_labels, task_of


def wrong_from_eight():
    """A llama of 16 tokens that emits t + 1 after t, as the target does, but t + 3 from 8 on."""
    model = tiny.counting_llama()
    with torch.no_grad():
        for token in range(8, 16):
            model.lm_head.weight[(token + 1) % 16, token] = 2.0
            model.lm_head.weight[(token + 3) % 16, token] = 3.0
    return model


def counting(number=1, start=3):
    """Texts of 16 tokens that count; the first 4 of each are the prompt."""
    return Continuations([(torch.arange(16) + start + place) % 16 for place in range(number)], [4] * number)


def counting_pair():
    return Target(tiny.counting_llama()), Target(wrong_from_eight())


def test_greedy_labels_mark_agreement_and_are_read_in_a_mixture():
    """The text is 3, 4, 5, 6 | 7, 8, 9, ...; after 8 the draft model emits 11. A state after a token is 4 at its index,
    so the states show which tokens the head reads: those of the mixture that were drafted.
    """
    target, draft = counting_pair()
    (found,) = labelled(target, draft, counting(), SpecDecTraining(draft_temperature=0))
    assert found.start == 4
    assert found.sequence[4:].tolist() == [7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2]
    assert found.drafted.tolist() == [7, 8, 11, 12, 13, 14, 15, 0, 1, 2, 1, 2]
    assert found.labels.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    tokens, replaced = found.mixed(0.5, 7)
    assert tokens[:4].tolist() == [3, 4, 5, 6]
    assert torch.equal(tokens[4:], torch.where(replaced, found.drafted, found.sequence[4:]))
    assert 0 < replaced.sum() < 12
    states, labels = states_and_labels(draft, [found], 0.5, seed=7)
    assert states.argmax(dim=1).tolist() == found.drafted[replaced].tolist()
    assert torch.equal(labels, found.labels[replaced])


def test_labels_of_sampled_tokens_are_min_1_p_over_q():
    """Logits after a token are 4 times the weights of the output layer, halved at temperature 2."""
    target, draft = counting_pair()
    how = SpecDecTraining(draft_temperature=2, seed=5)
    for found in labelled(target, draft, counting(8), how):
        for place, (drafted, label) in enumerate(zip(found.drafted.tolist(), found.labels.tolist(), strict=True)):
            before = int(found.sequence[found.start + place - 1])
            p, q = (torch.softmax(4 * one.model.lm_head.weight[:, before] / 2, dim=0) for one in (target, draft))
            assert label == pytest.approx(min(1.0, float(p[drafted] / q[drafted])), rel=1e-4)
    again, other = (labelled(target, draft, counting(8), SpecDecTraining(draft_temperature=2, seed=s)) for s in (5, 6))
    first = labelled(target, draft, counting(8), how)
    assert all(torch.equal(one.drafted, two.drafted) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one.drafted, two.drafted) for one, two in zip(first, other, strict=True))
    one, two = labelled(target, draft, counting(8).select([0, 0]), how)
    assert not torch.equal(one.drafted, two.drafted), "equal texts are sampled differently"


def test_loss_computed_by_hand():
    """A head with probability 0.8 everywhere; labels 1, 0 and 0.5; rejections have weight three, so the optimum has a
    third of the odds.
    """
    head = AcceptanceHead(2, 0)
    with torch.no_grad():
        head.output.bias.fill_(math.log(4))
    found = loss(head, torch.randn(3, 2), torch.tensor([1.0, 0.0, 0.5]), 3.0)
    accepted, rejected = -math.log(0.8), -math.log(0.2)
    assert float(found) == pytest.approx((accepted + 3 * rejected + 0.5 * accepted + 1.5 * rejected) / 3)


def test_texts_without_replaced_tokens_have_no_loss():
    """The only token of a text that ends at its first token may be the target's own: then there is no label."""
    target, draft = counting_pair()
    text, losses = Continuations([torch.tensor([3, 4])], [1]), []
    how = SpecDecTraining(target_share=0.99, batch=1)
    known = labelled(target, draft, text, how)
    fit(task_of(draft, known, how), Schedule(3), progress=lambda step, steps, loss: losses.append(loss))
    assert 0 in losses


def test_head_learns_where_both_models_differ():
    """From 11 on the target's tokens differ. Rejections have weight one, so the head is calibrated."""
    target, draft = counting_pair()
    how = SpecDecTraining(depth=1, rejection_weight=1.0, draft_temperature=0, batch=4)
    known = labelled(target, draft, counting(16), how)
    head = fit(task_of(draft, known, how), Schedule(150, 0.02))
    found = judged(head, draft, known, how)
    assert found["kl"] < 0.3 * found["kl_of_a_constant"]
    assert found["acceptance"] == pytest.approx(0.5, abs=0.1)
    assert found["tokens"] == sum(count for count, _, _ in found["calibration"])
    assert max(count for count, _, _ in found["calibration"]) >= 20
    for count, predicted, accepted in found["calibration"]:
        assert count < 20 or predicted == pytest.approx(accepted, abs=0.15)
    state = torch.zeros(16)
    state[6] = 4
    assert head.acceptance(state) > 0.9
    state[6], state[13] = 0, 4
    assert head.acceptance(state) < 0.1
