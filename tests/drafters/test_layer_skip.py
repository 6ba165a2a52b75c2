"""The target drafts for itself without some of its layers."""

import pytest
import torch
from support import architectures, runs, tiny
from support.tiny import gpt2

import token_recycling as tr
from token_recycling.drafters import layer_skip
from token_recycling.drafters.layer_skip import best_layers, decoder_layers, without_layers
from token_recycling.model.target import Target


@pytest.fixture
def deep():
    """Six layers; layers 3 and 4 have no effect."""
    model = tiny.llama(2, num_hidden_layers=6, context=0.4)
    with torch.no_grad():
        for layer in (model.model.layers[3], model.model.layers[4]):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def skipped_by_a_hook(model, number, ids):
    """Return the model's logits with the output of a layer replaced by its input."""

    def replace(module, args, kwargs, output):
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    hook = decoder_layers(model)[1][number].register_forward_hook(replace, with_kwargs=True)
    found = logits(model, ids)
    hook.remove()
    return found


CASES = [architectures.named(family) for family in ("gpt2", "bloom", "opt", "mixtral")]
CASES += [architectures.named("gemma2", "window of 8"), architectures.named("falcon", "ALiBi")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_skipped_layers_pass_their_input_on(case):
    """With the same weights; the model itself stays unchanged."""
    model, ids = architectures.model_of(case), tiny.prompt(0, 20, 96)
    before = logits(model, ids)
    view = without_layers(model, [1])
    torch.testing.assert_close(logits(view, ids), skipped_by_a_hook(model, 1, ids))
    assert not torch.allclose(logits(view, ids), before)
    assert torch.equal(logits(model, ids), before)
    ours, theirs = dict(view.named_parameters()), dict(model.named_parameters())
    assert all(ours[name] is theirs[name] for name in ours)
    assert len(ours) < len(theirs)


def test_layers_without_effect_are_found(deep):
    drafter = tr.make_drafter("layer_skip", theta_prob=0.0)
    stats = runs.check_same(deep, drafter, tiny.prompt(0, 9), max_new_tokens=28)
    layer, head = (sum(map(torch.numel, part.parameters())) for part in (deep.model.layers[0], deep.lm_head))
    cost = (4 * layer + head) / (6 * layer + head)
    assert runs.begun(drafter, tiny.prompt(0, 9)[0], Target(deep)).pass_cost == pytest.approx(cost)
    assert f"the target without layers 3 4 (expected speedup {7 / (1 + 6 * cost):.2f})" in stats.drafter
    # Chosen once: a second sequence reuses them.
    chosen = drafter._skipped
    tr.generate(deep, tiny.prompt(1, 9), drafter=drafter, max_new_tokens=4)
    assert drafter._skipped is chosen


def test_search_makes_less_than_two_passes_for_each_layer(deep, monkeypatch):
    """One shows the output type of layers, one the model's choices, and one each layer alone; then sets of 2 to 5."""
    passes, forward = [], type(deep).forward
    monkeypatch.setattr(type(deep), "forward", lambda *given, **named: passes.append(1) or forward(*given, **named))
    best_layers(deep, tiny.prompt(0, 9)[0], 6)
    assert len(passes) == 2 + 5 + 4


def dispatched_model():
    """A model with a bound `forward`, as accelerate leaves models on several devices."""
    model = tiny.llama()
    model.model.forward = model.model.forward
    return model


@pytest.mark.parametrize(
    ("make", "layers", "error", "message"),
    [
        (tiny.llama, "0 1", ValueError, "got '0 1'"),
        (tiny.llama, "1-2", ValueError, "from 1 to 1, got '1-2'"),
        (tiny.llama, [], ValueError, r"from 1 to 1, got \[\]"),
        (tiny.llama, "few", ValueError, "got 'few'"),
        (tiny.llama, "", ValueError, "got ''"),
        (lambda: of_case("gemma3n_text", "shared keys and values"), "1", tr.UnsupportedModelError, "Gemma3n"),
        (lambda: of_case("llama", "dynamic rotary scaling"), "1", tr.UnsupportedModelError, "Llama"),
        (lambda: tiny.llama(num_hidden_layers=1), "1", tr.UnsupportedModelError, "got 1"),
        (dispatched_model, "1", tr.UnsupportedModelError, "one device"),
    ],
)
def test_layers_that_cannot_be_skipped_are_refused(make, layers, error, message):
    with pytest.raises(error, match=message):
        next(tr.stream(make(), tiny.prompt(0, 4), "layer_skip", layers=layers))


def of_case(family, tested):
    return architectures.model_of(architectures.named(family, tested))


@pytest.mark.parametrize("length", [20, 32])
def test_search_stays_within_the_models_positions(length):
    """A GPT-2 of 32 positions fails on the 33rd."""
    model = gpt2(n_positions=32)
    drafter, ids = tr.make_drafter("layer_skip"), tiny.prompt(0, length, 80)
    runs.check_same(model.eval(), drafter, ids, max_new_tokens=33 - length)
    assert drafter._skipped == [1]


def test_forks_choose_layers_without_any_prompt(deep, monkeypatch):
    """A server forks its drafter for every user: the choice must not depend on another user's prompt."""
    seen, target = [], Target(deep)
    monkeypatch.setattr(layer_skip, "best_layers", lambda model, sequence, depth: seen.append(sequence) or ([3], 1.0))
    for fork in (lambda drafter: drafter, lambda drafter: drafter.fork(), lambda drafter: drafter.fork().fork()):
        for seed in (0, 1):
            runs.begun(fork(tr.make_drafter("layer_skip")), tiny.prompt(seed, 9)[0], target)
    assert [torch.equal(*seen[place : place + 2]) for place in (0, 2, 4)] == [False, True, True]
