"""No option of a drafter causes compilation during decoding after warm-up."""

import sys

import pytest
from numba.core.dispatcher import Dispatcher
from support import runs, tiny

import token_recycling as tr
from token_recycling.drafters.fuse import merge
from token_recycling.drafters.recycling import warm_up
from token_recycling.model.target import Target
from token_recycling.recycling import suffix_index


def reset_compiled_functions():
    """Discard everything compiled by the package's numba functions, and return these functions."""
    modules = [module for name, module in sys.modules.items() if name.startswith("token_recycling.")]
    ours = list({one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)})
    for one in ours:
        one._make_finalizer()()
        one._reset_overloads()
    for function in (warm_up, suffix_index.warm_up, merge.warm_up):
        function.cache_clear()
    return ours


def decode(model, drafter):
    """Decode two repetitive sequences, a one-token prompt and a batch."""
    for ids in (tiny.prompt(0, 9).repeat(1, 3), tiny.prompt(0, 1), tiny.prompt(1, 12).repeat(2, 2)):
        tr.generate(model, ids, drafter=drafter, max_new_tokens=24)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recycling", {}),
        ("recycling", {"tree": "chain:3", "suffix": False}),
        ("recycling", {"tree": "paper"}),
        ("recycling", {"tree": 8, "orders": 4, "k": 3}),
        ("recycling", {"tree": "0 1 00", "memory": 0, "history": 0}),
        ("suffix", {}),
        ("fuse:recycling+suffix", {}),
    ],
    ids=str,
)
def test_nothing_is_compiled_after_warm_up(name, options, model):
    """After a drafter has started a sequence."""
    drafter, ours = tr.make_drafter(name, **options), reset_compiled_functions()
    runs.begun(drafter, [0], Target(model))
    before = {one: list(one.signatures) for one in ours}
    assert any(before.values())
    decode(model, drafter)
    assert {one: list(one.signatures) for one in ours} == before
