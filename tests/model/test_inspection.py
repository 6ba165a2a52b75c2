"""Hidden states: available for every family, for single sequences and batches, and only if a drafter needs them."""

from dataclasses import dataclass

import pytest
import torch
from support import architectures, tiny
from support.architectures import SUPPORTED, chosen

import token_recycling as tr
from token_recycling.drafters._base import Drafter, DrafterTraits
from token_recycling.model.hidden import NoHiddenStatesError, decoder_layers, last_state, layer_states, output_layer
from token_recycling.model.inspection import arguments_of, context_length, weights_fingerprint
from token_recycling.trees.draft import Draft, Step
from token_recycling.trees.templates import Template

TREE = Template.from_paths([(0,), (1,), (0, 0)])


@dataclass
class Reading(Drafter):
    """Draft arbitrary tokens and store the hidden states of the prompt and of each step."""

    numbers: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self):
        self.steps: list[Step] = []

    @property
    def traits(self):
        return DrafterTraits(states=(lambda layers: self.numbers) if self.numbers else None)

    def start(self, prompt, target):
        begun = Reading(numbers=self.numbers)
        self.begun = [*getattr(self, "begun", []), begun]
        return begun

    def read_prompt(self, states):
        self.of_prompt = states

    def draft(self, context):
        following = torch.arange(3) * 7 + context.root
        return Draft(torch.cat([context.root, following % 64]), TREE.parents)

    def observe(self, step):
        self.steps.append(step)


def test_no_states_are_recorded_unless_a_drafter_needs_them(model):
    drafter = Reading(numbers=())
    tr.generate(model, tiny.prompt(0, 6), drafter=drafter, max_new_tokens=5)
    (begun,) = drafter.begun
    assert begun.steps
    assert all(step.states is None for step in begun.steps)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def states_of(model, text):
    """Return all hidden states (length, states * hidden) from transformers."""
    with torch.no_grad():
        return torch.cat(model(input_ids=text[None], output_hidden_states=True).hidden_states, dim=-1)[0]


@pytest.mark.parametrize("case", chosen(SUPPORTED))
def test_layer_states_equal_output_hidden_states(case):
    """States between the layers, and the state after the final norm, which the output layer reads."""
    model, ids = architectures.model_of(case), torch.arange(14).view(2, 7)
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
        layers = len(decoder_layers(model)[1])
        with layer_states(model, last_state(layers)) as seen:
            model(input_ids=ids)
        (last,) = seen
        assert torch.equal(output_layer(model)(last).argmax(-1), output.logits.argmax(-1))
        if output.hidden_states[0].ndim > 3:
            with pytest.raises(NoHiddenStatesError, match="between the layers"), layer_states(model, [1]):
                model(input_ids=ids)
            return
        with layer_states(model, range(layers)) as seen:
            model(input_ids=ids)
        assert torch.equal(seen[0], torch.cat(output.hidden_states[:-1], dim=-1))
        with layer_states(model, [1, layers]) as fewer:
            model(input_ids=ids, **({"logits_to_keep": 1} if "logits_to_keep" in arguments_of(model) else {}))
        known = fewer[0].shape[1]
        assert known == (1 if "shared keys" in str(case) else 7)
        assert torch.equal(fewer[0][..., : fewer[0].shape[-1] // 2], output.hidden_states[1][:, -known:])


def test_drafter_receives_the_states_of_prompt_and_nodes(model):
    """Also when the prompt is read with the first step or in its own pass, and for each row of a batch, whose prompts
    may begin with the same tokens.
    """
    prompts = [tiny.prompt(0, 40), tiny.prompt(0, 40), tiny.prompt(1, 9), tiny.prompt(2, 5)]
    prompts += [torch.cat([tiny.prompt(3, 70), tiny.prompt(row, 3)], dim=1) for row in range(2)]
    ids = torch.cat([prompts[2], torch.nn.functional.pad(prompts[3], (4, 0))])
    drafter, how = Reading(), {"max_new_tokens": 6}
    list(tr.stream(model, prompts[0], drafter, **how))
    tr.generate(model, prompts[1], drafter=drafter, **how)
    tr.generate(model, ids, drafter=drafter, attention_mask=(ids != 0).long(), pad_token_id=0, **how)
    tr.generate(model, torch.cat(prompts[4:]), drafter=drafter, pad_token_id=0, **how)
    for begun, prompt in zip(drafter.begun, prompts, strict=True):
        assert torch.allclose(begun.of_prompt, states_of(model, prompt[0])[:-1], atol=1e-4)
        text = prompt[0].tolist()
        for step in begun.steps:
            assert step.states is not None
            for node, above in enumerate(step.draft.lineages):
                path = torch.tensor([*text[:-1], *step.draft.tokens[list(above)].tolist()])
                assert torch.allclose(step.states[node], states_of(model, path)[-1], atol=1e-4)
            text += step.tokens


def test_states_that_a_family_leaves_out_are_not_passed_on():
    """Some families compute only the last token of a prompt in some layers."""
    (*_, case) = [case for case in SUPPORTED if "shared keys" in str(case)]
    model, ids = architectures.model_of(case), torch.cat([tiny.prompt(row, 6) for row in range(2)])
    drafter = Reading(numbers=(1, len(decoder_layers(model)[1])))
    tr.generate(model, ids, drafter=drafter, max_new_tokens=4, pad_token_id=0)
    assert not any(hasattr(begun, "of_prompt") for begun in drafter.begun)


def test_unavailable_states_are_refused(model):
    with pytest.raises(NoHiddenStatesError, match=r"0 to 2, got \[3\]"), layer_states(model, [3]):
        pass
    model.model = torch.compile(model.model, backend="eager")
    with pytest.raises(NoHiddenStatesError, match="compiled"), layer_states(model, [1]):
        pass
    model.get_output_embeddings = lambda: None
    with pytest.raises(NoHiddenStatesError, match="output layer of LlamaForCausalLM"):
        output_layer(model)


def test_fingerprint_ignores_the_order_of_settings():
    models = [tiny.llama() for _ in range(3)]
    for model, settings in zip(models, ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2, "b": 2}), strict=True):
        model.config.settings = settings
    first, same, other = map(weights_fingerprint, models)
    assert first == same != other


def test_context_is_the_smallest_limit(model):
    positions = model.config.max_position_embeddings
    assert context_length(model) == positions
    for other in (positions - 1, positions + 1):
        model.config.max_seq_len = other
        assert context_length(model) == min(positions, other)
