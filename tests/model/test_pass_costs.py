"""What a step costs: the curve by hand, its measurement where there is room and where there is little, its file."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import architectures, tiny
from transformers import LlamaForCausalLM

from token_recycling._util.files import cache_folder
from token_recycling.costs.curve import CostCurve, band, shared_by
from token_recycling.costs.online import OnlineCurve
from token_recycling.model import pass_costs as measuring
from token_recycling.model.cost_store import file_of, load, setting
from token_recycling.model.pass_costs import CPU_SIZES, PassCosts, measure
from token_recycling.model.tree_model import TreeModel

CURVE = CostCurve(256, (1, 2, 4, 8), (2.0, 3.0, 4.0, 10.0))


@pytest.fixture
def target() -> TreeModel:
    return TreeModel(tiny.llama(max_position_embeddings=100_000))


def test_between_two_sizes_costs_lie_on_the_line() -> None:
    assert CURVE.relative().tolist() == pytest.approx([1, 1.5, 1.75, 2, 2.75, 3.5, 4.25, 5])


def test_no_pass_costs_more_than_a_larger_one() -> None:
    curve = CostCurve(256, (1, 2, 3, 4, 5), (2.0, 9.0, 4.0, 3.0, 6.0))
    assert curve.relative().tolist() == pytest.approx([1, 1.5, 1.5, 1.5, 3])
    assert CostCurve(256, (1, 2, 3), (5.0, 4.0, 6.0)).relative().tolist() == pytest.approx([1, 1, 1.5])


def test_several_texts_have_as_many_nodes_each() -> None:
    """Of 2 texts a pass has 2, 4, 6, 8 rows; of 3 it has 3 or 6, and 9 were not measured."""
    times = CURVE.times()
    assert shared_by(1, times).tolist() == times.tolist()
    assert shared_by(2, times).tolist() == pytest.approx([3, 4, 7, 10])
    assert shared_by(3, times).tolist() == pytest.approx([3.5, 7])
    assert shared_by(8, times).tolist() == shared_by(100, times).tolist() == [10]


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=12), st.integers(0, 100))
def test_costs_start_at_one_and_never_fall(seconds: list[float], seed: int) -> None:
    sizes = np.cumsum([1, *np.random.default_rng(seed).integers(1, 9, len(seconds) - 1)]).tolist()
    relative = CostCurve(256, tuple(sizes), tuple(seconds)).relative()
    assert len(relative) == sizes[-1]
    assert relative[0] == 1
    assert (np.diff(relative) >= -1e-12).all()


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((), (), "ascending sizes from 1, got"),
        ((2, 4), (1.0, 1.0), "ascending sizes from 1, got"),
        ((1, 4, 2), (1.0, 1.0, 1.0), "ascending sizes from 1, got"),
        ((1, 2, 2), (1.0, 1.0, 1.0), "ascending sizes from 1, got"),
        ((1, 2), (1.0,), "a time above 0 for each of 2 sizes, got"),
        ((1, 2), (1.0, 0.0), "a time above 0 for each of 2 sizes, got"),
        ((1, 2), (1.0, math.nan), "a time above 0 for each of 2 sizes, got"),
    ],
)
def test_what_is_no_curve_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostCurve(256, sizes, seconds)


def test_bands_are_four_times_as_long_each() -> None:
    lengths = [0, 1, 256, 257, 1024, 1025, 4096, 4097, 100_000]
    assert [band(length) for length in lengths] == [256, 256, 256, 1024, 1024, 4096, 4096, 16_384, 262_144]


# Measuring


class Clock:
    """Stands in for the time: a forward pass over n nodes takes what it is told."""

    def __init__(self, target: TreeModel, monkeypatch: pytest.MonkeyPatch, taken: list[dict[int, float]]) -> None:
        self.now, self.passes, self._taken, self._forward = 0.0, [], taken, target.forward
        monkeypatch.setattr(target, "forward", self.forward)
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)

    def forward(self, inputs: dict[str, torch.Tensor], cache: object) -> torch.Tensor:
        n = inputs["input_ids"].shape[1]
        done = sum(size == n for size, _ in self.passes)
        self.passes.append((n, cache.get_seq_length()))
        self.now += self._taken[done % len(self._taken)][n]
        return self._forward(inputs, cache)


def test_the_best_of_several_passes_counts(target: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(target, monkeypatch, [{1: 1.0, 3: 4.0}, {1: 2.0, 3: 3.0}, {1: 1.5, 3: 9.0}])
    assert measure(target, 40, (1, 3), seconds=0) == CostCurve(40, (1, 3), (1.0, 3.0))
    # Two rounds even where there is no time; every pass follows the same 40 tokens.
    assert clock.passes == [(1, 40), (3, 40)] * 2


def test_passes_go_on_for_the_time_given(target: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(target, monkeypatch, [{1: 0.5, 2: 0.5}])
    measure(target, 40, (1, 2), seconds=6.9)
    assert len(clock.passes) == 2 * 7
    clock.passes.clear()
    measure(target, 40, (1, 2), seconds=1e9)
    assert len(clock.passes) == 2 * 20


def test_a_pass_too_quick_for_the_clock_takes_some_time(target: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(target, monkeypatch, [{1: 0.0}])
    assert measure(target, 8, (1,)).seconds == (1e-7,)


def test_a_curve_is_measured(target: TreeModel) -> None:
    curve = measure(target, seconds=0)
    assert (curve.length, curve.sizes) == (256, CPU_SIZES)
    assert min(curve.seconds) > 0


@pytest.mark.parametrize(
    ("context", "length", "largest"), [(512, 256, 64), (100, 36, 64), (65, 1, 64), (64, 1, 48), (9, 1, 8), (2, 1, 1)]
)
def test_where_the_context_is_short_so_is_the_text(context: int, length: int, largest: int) -> None:
    target = TreeModel(tiny.llama(max_position_embeddings=context))
    curve = measure(target, 256, seconds=0)
    assert (curve.length, curve.sizes) == (length, tuple(n for n in CPU_SIZES if n <= largest))


def named(name: str) -> architectures.Case:
    return next(case for case in architectures.SUPPORTED if str(case) == name)


@pytest.mark.parametrize("case", architectures.BORDERS, ids=str)
def test_models_with_a_border_have_costs_too(case: architectures.Case) -> None:
    """Time does not depend on whether a tree is exact there: the loop draws that line, at each step."""
    target = TreeModel(architectures.model_of(case))
    curve = measure(target, 64, (1, 2, 8), seconds=0)
    assert curve.sizes == (1, 2, 8)


@pytest.mark.parametrize("name", ["mistral window of 8", "gemma3_text window of 8"])
def test_models_with_windows_have_costs_too(name: str) -> None:
    curve = measure(TreeModel(architectures.model_of(named(name))), 64, (1, 2, 8), seconds=0)
    assert (curve.length, curve.sizes) == (64, (1, 2, 8))


def test_measuring_changes_no_output(model: LlamaForCausalLM) -> None:
    ids = tiny.prompt(0, 9)
    before = model.generate(ids, max_new_tokens=12)
    state = torch.get_rng_state()
    measure(TreeModel(model), 32, (1, 4), seconds=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.generate(ids, max_new_tokens=12), before)


# Keeping


def keep(target: TreeModel, curves: list[CostCurve]) -> Path:
    PassCosts(target).keep(curves)
    return file_of(target)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that were measured; every measurement gives the same curve."""
    lengths: list[int] = []

    def measure(target: TreeModel, length: int, *rest: object, **options: object) -> CostCurve:
        lengths.append(length)
        return CostCurve(length, (1, 2), (1.0, 1.5))

    monkeypatch.setattr(measuring, "measure", measure)
    return lengths


def test_a_band_is_measured_once_a_process(target: TreeModel, measured: list[int]) -> None:
    first = PassCosts(target).curve(10)
    assert PassCosts(target).curve(256) is first
    assert PassCosts(TreeModel(target.model)).curve(200) is first
    assert PassCosts(target).curve(257).length == 1024
    assert PassCosts(TreeModel(tiny.llama())).curve(10) is not first
    assert measured == [256, 1024, 256]


def test_a_measurement_on_the_way_is_not_saved(target: TreeModel, measured: list[int], own_cache: Path) -> None:
    PassCosts(target).curve(10)
    assert list(own_cache.iterdir()) == []


def test_saved_curves_are_used(target: TreeModel, measured: list[int], own_cache: Path) -> None:
    assert load(target) == []
    longer = CostCurve(1024, (1, 2), (1.0, 3.0))
    path = keep(target, [CURVE, longer])
    assert path.parent.parent == own_cache
    assert load(target) == [CURVE, longer]
    assert PassCosts(target).curve(100) == CURVE
    assert PassCosts(target).curve(1000) == longer
    assert measured == []
    assert PassCosts(target).curve(5000).length == 16_384
    assert measured == [16_384]


def test_saving_replaces_what_was_measured_or_saved(target: TreeModel, measured: list[int]) -> None:
    assert PassCosts(target).curve(10) != CURVE
    keep(target, [CURVE])
    assert PassCosts(target).curve(10) == CURVE
    other = CostCurve(256, (1, 2), (1.0, 3.0))
    keep(target, [other])
    assert PassCosts(target).curve(10) == other


def test_a_curve_of_a_shortened_text_is_found_again(measured: list[int]) -> None:
    """A context of 300 has room for 236 tokens and 64 nodes: that curve serves all bands."""
    target = TreeModel(tiny.llama(max_position_embeddings=300))
    short = CostCurve(236, (1, 2), (1.0, 2.0))
    keep(target, [short])
    assert PassCosts(target).curve(10) == PassCosts(target).curve(299) == short
    assert measured == []


def test_a_model_of_the_same_shape_shares_the_curve() -> None:
    keep(TreeModel(tiny.llama()), [CURVE])
    assert load(TreeModel(tiny.llama(seed=9))) == [CURVE]


@pytest.mark.parametrize(
    "other",
    [
        lambda: tiny.llama(intermediate_size=48),
        lambda: tiny.llama(num_hidden_layers=1),
        lambda: tiny.llama().to(torch.bfloat16),
        lambda: tiny.llama(attn_implementation="eager"),
    ],
    ids=["width", "layers", "type", "attention"],
)
def test_another_setting_has_curves_of_its_own(model: LlamaForCausalLM, other: object) -> None:
    keep(TreeModel(model), [CURVE])
    assert load(TreeModel(other())) == []


def test_another_number_of_threads_has_curves_of_its_own(target: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(target, [CURVE])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert load(target) == []
    assert setting(target)["threads"] == "7"


def test_the_file_says_what_it_was_measured_on(target: TreeModel) -> None:
    held = json.loads(keep(target, [CURVE]).read_text())
    assert held["setting"] == setting(target)
    assert held["setting"]["model"] == "LlamaForCausalLM"
    assert held["setting"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"curves": 3}',
        '{"curves": [3]}',
        '{"curves": [{"length": 256, "sizes": [1, 2]}]}',
        '{"curves": [{"length": 256, "sizes": [2, 1], "seconds": [1, 2]}]}',
        '{"curves": [{"length": 256, "sizes": [1], "seconds": ["much"]}]}',
    ],
)
def test_a_damaged_file_is_measured_anew_with_one_notice_and_replaced(
    target: TreeModel, measured: list[int], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = keep(target, [CURVE])
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        found = [PassCosts(target).curve(length) for length in (10, 300)]
    assert CURVE not in found
    assert len(measured) == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"expected the curves of `token-recycling tune` in {path}, got something else (" in said
    assert "measuring anew" in said
    PassCosts(target).keep([CURVE])
    assert load(target) == [CURVE]
    assert PassCosts(target).curve(10) == CURVE


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TOKEN_RECYCLING_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "token_recycling"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "token_recycling"


def test_the_convex_curve_passes_below_what_seems_dear() -> None:
    measured = CostCurve(256, (1, 2, 4, 8, 16), (1.0, 1.6, 1.3, 2.2, 3.0))
    assert measured.convex() == CostCurve(256, (1, 4, 16), (1.0, 1.3, 3.0))
    flat = CostCurve(256, (1, 2, 4, 8), (1.0, 1.0, 1.0, 2.0))
    assert flat.convex().relative().tolist() == flat.relative().tolist()


@pytest.fixture
def known(target: TreeModel, monkeypatch: pytest.MonkeyPatch) -> OnlineCurve:
    """What steps of one text and one length have taught; nothing is measured again."""
    known = PassCosts(target).online(100, 1)
    for _ in range(100):
        known.took(8, 40 * float(known.seconds[0]))
    monkeypatch.setattr(measuring, "measure", None)
    return known


def test_another_length_begins_with_what_steps_of_one_length_taught(target: TreeModel, known: OnlineCurve) -> None:
    assert PassCosts(target).online(3000, 1).seconds.tolist() == known.seconds.tolist()


def test_texts_that_share_a_pass_begin_with_what_passes_over_one_taught(target: TreeModel, known: OnlineCurve) -> None:
    """However long they are: a measurement would fill a cache of so many slots, while all of them wait."""
    costs = PassCosts(target)
    assert costs.online(20_000, 3).seconds.tolist() == known.seconds[2::3].tolist()
    assert costs.online(300, 99).seconds.tolist() == known.seconds[-1:].tolist()


def test_another_number_of_texts_is_not_measured_anew(target: TreeModel, measured: list[int]) -> None:
    assert PassCosts(target).online(100, 2).seconds.tolist() == [1.5]
    assert PassCosts(target).online(20_000, 3).seconds.tolist() == [1.5]
    assert measured == [256]
