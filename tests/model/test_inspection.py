"""The last hidden states: seen for every family, in steps of texts and batches, and only where a drafter needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support import architectures, tiny
from support.architectures import SUPPORTED, Case
from transformers import LlamaForCausalLM

import token_recycling as tr
from token_recycling.draft import Context, Draft, Step
from token_recycling.drafter import Drafter, DrafterTraits
from token_recycling.model.inspection import NoHiddenStatesError, hidden_states, output_layer
from token_recycling.tree import Tree

TREE = Tree.from_paths([(0,), (1,), (0, 0)])


@dataclass
class Watching(Drafter):
    """Drafts random tokens and keeps the steps."""

    wants: bool = True

    def __post_init__(self) -> None:
        self.steps: list[Step] = []
        self.contexts: list[torch.Tensor] = []

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(hidden_states=self.wants)

    def draft(self, context: Context) -> Draft:
        self.contexts.append(context.tokens.clone())
        following = torch.arange(3) * 7 + context.root
        return Draft(TREE, torch.cat([context.root, following % 64]))

    def observe(self, step: Step) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_the_output_layer_makes_the_choices_of_the_model_of_them(case: Case) -> None:
    model, ids = architectures.model_of(case), torch.arange(14).view(2, 7)
    with torch.no_grad():
        with hidden_states(model) as seen:
            logits = model(input_ids=ids).logits
        (hidden,) = seen
        assert torch.equal(output_layer(model)(hidden).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_has_those_of_its_nodes(model: LlamaForCausalLM, rows: int) -> None:
    drafter = Watching()
    ids = torch.cat([tiny.prompt(row, 6) for row in range(rows)])
    tr.generate(model, ids, drafter=drafter, attention_mask=torch.ones_like(ids), max_new_tokens=5)
    for step, context in zip(drafter.steps, drafter.contexts, strict=True) if rows == 1 else ():
        assert step.hidden is not None
        for node, lineage in enumerate(step.draft.tree.lineages):
            text = torch.cat([context[:-1], step.draft.tokens[list(lineage)]])
            with torch.no_grad():
                wanted = model.model(input_ids=text[None]).last_hidden_state[0, -1]
            assert torch.allclose(step.hidden[node], wanted, atol=1e-5)
    for step in drafter.steps:
        assert step.hidden is not None
        assert step.hidden.shape == (len(step.draft.tree), 32)
        with torch.no_grad():
            assert torch.allclose(model.lm_head(step.hidden), step.logits, atol=1e-5)


def test_without_the_need_nothing_is_seen(model: LlamaForCausalLM) -> None:
    drafter = Watching(wants=False)
    tr.generate(model, tiny.prompt(0, 6), drafter=drafter, max_new_tokens=5)
    assert drafter.steps
    assert all(step.hidden is None for step in drafter.steps)
    assert not model.lm_head._forward_pre_hooks


def whole(model: LlamaForCausalLM) -> None:
    model.compile(backend="eager")


def forward(model: LlamaForCausalLM) -> None:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]


@pytest.mark.parametrize("compiled", [whole, forward])
def test_a_model_compiled_as_a_whole_is_refused(
    model: LlamaForCausalLM, compiled: Callable[[LlamaForCausalLM], None]
) -> None:
    compiled(model)
    with (
        pytest.raises(NoHiddenStatesError, match="compiled as a whole; compile what is before"),
        hidden_states(model),
    ):
        pass


@pytest.mark.slow
def test_a_model_compiled_before_its_output_layer_is_not() -> None:
    torch._dynamo.reset()
    plain, within = tiny.llama(), tiny.llama()
    within.model = torch.compile(within.model, backend="eager")
    ids = tiny.prompt(0, 6)
    wanted = plain.generate(ids, max_new_tokens=6)
    assert torch.equal(tr.generate(within, ids, drafter=Watching(), max_new_tokens=6), wanted)
    torch._dynamo.reset()


def test_a_model_without_an_output_layer_of_its_own_is_refused(model: LlamaForCausalLM) -> None:
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign]
    with pytest.raises(NoHiddenStatesError, match="output layer is known"):
        output_layer(model)
