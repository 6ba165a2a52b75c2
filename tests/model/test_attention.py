"""Tree attention over shared keys and values: the same numbers as transformers' own, and one repeated mask a pass."""

from dataclasses import replace

import pytest
import torch
from support import tiny
from support.architectures import Case, model_of, named
from torch.utils._python_dispatch import TorchDispatchMode

import token_recycling as tr
from token_recycling.model import attention
from token_recycling.model.prefill import prefill
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.draft import Draft

TREE = tr.Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
LENGTH = 12


class Repeats(TorchDispatchMode):
    """The shapes of all tensors that were made by repeating another one."""

    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten.repeat.default:
            self.shapes.append(tuple(result.shape))
        return result


def passed(target, passes=1):
    """The logits of the last of several passes over a tree, and what was repeated in all of them."""
    text = tiny.prompt(0, LENGTH + 1)[0]
    with torch.no_grad(), Repeats() as repeats:
        for _ in range(passes):
            cache = target.new_cache()
            prefill(target, [text], cache)
            inputs = target.inputs.of([Draft(TREE, torch.arange(len(TREE)))], [LENGTH], LENGTH)
            logits = target.forward(inputs, cache)
    return logits, repeats


def two_kinds_of_layers():
    case = named("gemma3_text")
    more = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return model_of(Case(case.family, case.tested, {**case.config, **more}))


@pytest.mark.parametrize(
    ("make", "masks"),
    [
        (lambda: tiny.llama(num_hidden_layers=5), 1),
        (two_kinds_of_layers, 2),
        (lambda: tiny.llama(num_key_value_heads=4), 0),
    ],
    ids=["shared heads", "two kinds of layers", "a key head for each query"],
)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_repeated_mask_is_made_once_per_forward_pass_and_kind_of_layer(make, masks, passes):
    """Two query heads share a head of keys: the mask of 6 nodes has 12 rows."""
    _, repeats = passed(TreeModel(make()), passes)
    assert repeats.shapes == [(1, 1, 2 * len(TREE), LENGTH + len(TREE))] * masks * passes


def test_nothing_is_kept_after_a_pass():
    target = TreeModel(tiny.llama())
    passed(target)
    assert attention._current.get() is None
    unfit = target.inputs.of([Draft(TREE, torch.arange(len(TREE)))], [LENGTH], LENGTH)
    with pytest.raises(RuntimeError, match="size"):
        target.forward(unfit, target.new_cache())
    assert attention._current.get() is None


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_logits_are_those_of_transformers_own_attention(heads):
    target = TreeModel(tiny.llama(context=1, num_key_value_heads=heads))
    ours, _ = passed(target)
    target.info = replace(target.info, named_attention=False)
    wanted, _ = passed(target)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
