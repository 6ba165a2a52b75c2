"""The pacer: measure the parts of a step, size the drafts, and disable drafting where it does not pay.

One `Pacer` serves the sequences that share forward passes. It learns the time of drafting, verifying and learning, and
the yield of drafts. Before a draft it sets a budget (`draft.Budget`); it keeps the nodes of the drafts that pay; after
the step it counts their outcome. Drafters only propose.

- **Size.** Where a drafter asks for `auto` (`DrafterTraits`), the nodes that maximize expected tokens per time are
  kept. Expected tokens are scaled by the forecast ratio, accepted / predicted tokens of past drafts: estimates are too
  high at the start of a sequence.
- **Back-off.** Drafting is disabled where drafted steps give fewer tokens per time than plain decoding in the long run.
- **Probing.** Where drafting is disabled, probes take about 1% of the time.

The times and outcomes of drafts are stored with the drafter, for all its sequences (`Ledger`). Times are in units of
t(1). Cost per step: some 20 microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .._util.compiled import compiling
from .._util.device import synchronize
from .._util.locks import Lock
from ..costs import OnlineCurve
from ..drafters._base import Drafter, SequenceDrafter
from ..model.pass_times import agreed_time, band, fixed_curve, pass_times
from ..model.target import Target
from ..trees.draft import Budget, Draft, Step
from .stats import PARTS, Stats

if TYPE_CHECKING:
    from ..model.graphs.passes import CapturedPasses

_DECAY = 0.999
"""Exponential decay per step of the sums of a ledger and of an overhead."""
_PRIOR_STEPS, _PRIOR_RATE = 16.0, 1.25
"""Prior of the tokens per time of a call: number of steps, and tokens per step."""
_PRIOR_PREDICTED, _PRIOR_RATIO = 8.0, 0.7
"""Prior of the forecast ratio: predicted tokens, and the fraction accepted."""
_OVERHEAD, _PRIOR_COUNTS = 0.02, 4.0
"""Prior of the overhead of a step, and its weight in steps."""
_OUTLIER = 3.0
"""Largest measured overhead that is counted, as a multiple of the estimate: outliers come from other processes."""
_DECAY_OF_CALL = 0.98
"""Exponential decay per step of the sums that decide whether drafting pays in a call."""
_UNPREDICTED = 0.2
"""Predicted and accepted tokens of a step without predictions: the forecast ratio slowly returns to 1."""
_PROBING, _LONGEST_PAUSE = 0.01, 64
"""Fraction of the time spent on probes where drafting is disabled, and the most steps between two probes."""
_PROBED = 16
"""Where a pass of a draft model takes as long as a pass of the target, one in this many sequences measures it again."""


class Overhead:
    """Drafting overhead: per step and per node, by linear regression with exponential decay."""

    def __init__(self, step: float = _OVERHEAD) -> None:
        """`step`: prior of the overhead of a step, or of a pass of a draft model."""
        self.step, self.node = step, 0.0
        """Overhead per step and per drafted node."""
        self._sums = np.array([_PRIOR_COUNTS, 0.0, 0.0, step * _PRIOR_COUNTS, 0.0])
        """(5,) float64: sums of steps, nodes, squared nodes, time, and time x nodes."""

    def of(self, nodes: int) -> float:
        """Return the overhead of a step of `nodes` nodes, the root included."""
        return self.step + self.node * (nodes - 1)

    def count(self, nodes: int, time: float) -> None:
        """Learn from the time spent on drafting `nodes` nodes, the root included, and on learning from them."""
        drafted = nodes - 1
        # Negative if another thread has compiled meanwhile.
        time = max(0.0, min(time, _OUTLIER * self.of(nodes)))
        self._sums = _DECAY * self._sums + (1, drafted, drafted**2, time, drafted * time)
        steps, drafted_nodes, squares, total, products = self._sums.tolist()
        spread = squares - drafted_nodes * drafted_nodes / steps
        slope = (products - drafted_nodes * total / steps) / spread if spread > 1 else 0.0
        self.node = min(max(0.0, slope), total / max(1.0, drafted_nodes))
        self.step = (total - self.node * drafted_nodes) / steps


class Ledger:
    """Times and outcomes of a drafter's drafts, over all its sequences, within grammars or elsewhere. Thread-safe."""

    def __init__(self, assumed_nodes: int = 1) -> None:
        """`assumed_nodes`: see `DrafterTraits`."""
        self.assumed_nodes = assumed_nodes
        self.overheads: dict[int, Overhead] = {}
        """By number of sequences in the batch, which are drafted for one after another."""
        self.sums = np.array([0.0, 0.0, _PRIOR_RATIO * _PRIOR_PREDICTED, _PRIOR_PREDICTED])
        """(4,) float64: tokens, time, accepted drafted tokens, and predicted ones."""
        self._prior_steps = _PRIOR_STEPS
        """Weight of the prior, in steps."""
        self._too_slow = 0
        """Sequences that started while passes of a draft model took too long."""
        self.counting = Lock()

    @classmethod
    def of(cls, drafter: Drafter, within: bool = False) -> Ledger:
        """Return the ledger stored with a drafter. Drafts `within` grammars have a separate one that assumes a single
        node, since most nodes are forced there. A fork shares the ledgers of its original.
        """
        ledgers: tuple[Ledger, Ledger] | None = vars(drafter).get("_ledgers")
        if ledgers is None:
            ledgers = vars(drafter).setdefault("_ledgers", (cls(drafter.traits.assumed_nodes), cls()))
        return ledgers[within]

    def begin(self) -> None:
        """Start a sequence for which a model drafts. Passes that take too long are no longer made and hence no longer
        measured, so one in `_PROBED` such sequences restores the prior.
        """
        with self.counting:
            slow = [sequences for sequences, overhead in self.overheads.items() if overhead.step >= 1]
            self._too_slow += bool(slow)
            if slow and self._too_slow % _PROBED == 0:
                for sequences in slow:
                    del self.overheads[sequences]

    def count(self, step: Sequence[float]) -> None:
        """Count a step: its tokens, time, accepted drafted tokens and predicted tokens."""
        with self.counting:
            self.sums = _DECAY * self.sums + step
            self._prior_steps *= _DECAY

    def of_call(self, assumed: float) -> np.ndarray:
        """Return the sums (4,) float64 that a call starts with, in proportion to past steps; `assumed`: t(assumed
        nodes).
        """
        tokens, passes, accepted, predicted = self.sums.tolist()
        tokens, passes = tokens + self._prior_steps * _PRIOR_RATE, passes + self._prior_steps * assumed
        ratio = accepted / predicted
        return np.array([_PRIOR_STEPS * tokens / passes, _PRIOR_STEPS, _PRIOR_PREDICTED * ratio, _PRIOR_PREDICTED])


class Account(NamedTuple):
    """The budget of a draft sized by cost, and where its outcome is counted."""

    budget: Budget
    ledger: Ledger
    overhead: Overhead
    sums: np.ndarray
    """(4,) float64: the sums of the ledger in this call (`Ledger.of_call`)."""

    def back_off(self, tokens: int, passes: float, own: float, predicted: float = 1.0) -> int:
        """Count a drafted step; return the number of steps for which drafting is disabled.

        The step emitted `tokens` and took `passes`, of which `own` was drafting. Drafting is disabled where it does not
        pay in the long run, unless this step was expected to pay by its `predicted` tokens. The long run covers all
        sequences of the batch: disabling drafting for one of them saves nothing.
        """
        sums = self.sums
        _, _, accepted, promised = sums.tolist()
        paid = 1 + min(1.0, accepted / promised) * (predicted - 1) >= passes
        forecast = (tokens - 1, predicted - 1) if predicted > 1 else (_UNPREDICTED, _UNPREDICTED)
        step = tokens, passes, *forecast
        sums *= _DECAY_OF_CALL
        sums += step
        self.ledger.count(step)
        return 0 if paid or sums[0] >= sums[1] else min(int(own / _PROBING), _LONGEST_PAUSE)


@dataclass(eq=False)
class Pace:
    """Drafting state of one sequence."""

    drafter: SequenceDrafter
    nodes: int | Literal["auto"] | None
    """See `DrafterTraits.nodes`."""
    account: Account | None = field(default=None, init=False)
    """That of this step's draft; None without a draft, or for a draft that is not sized by cost."""
    paused: int = field(default=0, init=False)
    """Steps for which drafting remains disabled."""
    seconds: float = field(default=0.0, init=False)
    """Seconds spent on this step's draft."""
    drafts: int = field(default=0, init=False)
    """Drafts so far; the first one also reads the prompt and is not measured."""


class Pacer:
    """Sizes and paces the drafts of sequences that share forward passes and may join and leave."""

    def __init__(
        self,
        curve_of: Callable[[int, int], OnlineCurve],
        agreed: Callable[[float], float] = float,
        measures: bool = True,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """`curve_of(sequences, length)` returns a curve; `agreed` makes times equal in all processes of a model.
        `measures`: whether times are learned; otherwise drafts depend on tokens alone.
        """
        self._curve_of, self._agreed, self._measures = curve_of, agreed, measures
        self.keep = keep
        """Saves the learned costs to disk; called at the end of a sequence."""
        self._sequences, self._lengths = 1, band(1)
        """Number of sequences that share a pass, and the length bucket of the longest one."""
        self._curve: OnlineCurve | None = None
        """None until a draft is sized by cost."""
        self._verifying = 1.0
        """t(n) of the latest pass."""
        self._sums: WeakKeyDictionary[Ledger, np.ndarray] = WeakKeyDictionary()
        """Sums of `Ledger.of_call` for this call."""

    @classmethod
    def of(cls, target: Target, captured: CapturedPasses | None = None, fixed: bool = False) -> Pacer:
        """Return the pacer of a batch whose passes are `captured`, or eager if None; `fixed`: measure nothing."""
        if fixed:
            return cls(lambda sequences, _: fixed_curve(target, sequences), measures=False)
        times = pass_times(target) if captured is None else pass_times(target, captured.kind)
        agreed = float if target.processes < 2 else partial(agreed_time, target)
        return cls(times.curve, agreed, keep=times.keep)

    # Verification

    @property
    def curve(self) -> OnlineCurve:
        """t(n) of the sequences that currently share passes."""
        if self._curve is None:
            self._curve = self._curve_of(self._sequences, self._lengths[-1])
        return self._curve

    def share(self, lengths: Sequence[int]) -> None:
        """Set the lengths, in tokens, of the sequences that share the next passes."""
        longest = max(lengths)
        if len(lengths) == self._sequences and longest in self._lengths:
            return
        self._sequences, self._lengths = len(lengths), band(longest)
        if self._curve is not None:
            self._curve = self._curve_of(self._sequences, self._lengths[-1])

    def record_time(self, nodes: int, seconds: float) -> None:
        """Learn from a pass over `nodes` nodes of each sequence; `seconds` is 0 for a pass that also read a prompt,
        which is not measured.
        """
        if self._curve is None:  # no draft is sized by cost
            return
        if seconds and self._measures:
            self._curve.record_time(nodes, self._agreed(seconds))
        self._verifying = self.time_of(nodes)

    def time_of(self, nodes: int) -> float:
        """Return the cost of verifying `nodes` nodes of every sequence, clamped to the largest size of the curve."""
        times = self.curve.relative
        return float(times[min(nodes, len(times)) - 1])

    # Before a step

    def budget(self, pace: Pace, within: bool) -> Budget | None:
        """Return the budget of the next draft of a sequence, or None for no draft; `within`: there is a grammar."""
        pace.account = None
        if pace.nodes != "auto":
            return Budget.of_nodes(pace.nodes)
        if pace.paused:
            pace.paused -= 1
            return None
        ledger, cost = Ledger.of(pace.drafter.drafter, within), pace.drafter.pass_cost
        if cost is not None and not pace.drafts:
            ledger.begin()
        overhead, sums = ledger.overheads.get(self._sequences), self._sums.get(ledger)
        if overhead is None:
            prior = _OVERHEAD if cost is None else cost * self._sequences
            overhead = ledger.overheads[self._sequences] = Overhead(prior)
        if sums is None:
            sums = self._sums[ledger] = ledger.of_call(self.time_of(ledger.assumed_nodes))
        _, _, accepted, predicted = sums.tolist()
        ratio, times = min(1.0, accepted / predicted), self.curve.relative
        if cost is None:
            budget = Budget(times, ratio, step=overhead.step, node=overhead.node)
        else:  # the overhead is the cost of a draft model's passes
            budget = Budget(times, ratio, of_pass=overhead.step)
        pace.account, pace.drafts = Account(budget, ledger, overhead, sums), pace.drafts + 1
        return budget

    def best(self, drafts: Sequence[Draft], paces: Sequence[Pace]) -> Sequence[Draft]:
        """Return the drafts pruned to the most probable nodes, the same number in each, that maximize the expected
        tokens per time; unchanged where no draft is sized by cost. See `prune`.
        """
        budgets = [None if pace.account is None else pace.account.budget for pace in paces]
        sized = [budget for budget in budgets if budget is not None]
        if not sized:
            return drafts
        others = (len(drafts) - len(sized)) * self.curve.relative
        times = (sum(budget.times for budget in sized) + others) / len(drafts)
        return prune(drafts, times, [1.0 if budget is None else budget.ratio for budget in budgets])

    # After a step

    def count(self, pace: Pace, step: Step, seconds: float) -> None:
        """Count a step whose draft was sized by cost: the tokens it emitted, and the time of drafting and learning
        (`seconds`: learning alone).
        """
        account, pace.account = pace.account, None
        if account is None:
            return
        overhead, nodes = account.overhead, len(step.draft)
        units, size = (1, nodes) if pace.drafter.pass_cost is None else (account.budget.passes, 1)
        if self._measures and units and pace.drafts > 1:
            # The sequences of a batch are drafted for one after another.
            passes = self._agreed((pace.seconds + seconds) * self._sequences / float(self.curve.seconds[0]))
            overhead.count(size, passes / units)
        values = step.draft.values
        drafting = units * overhead.of(size)
        pace.paused = account.back_off(
            len(step.tokens),
            self._verifying + drafting,
            own=units * overhead.step,
            predicted=1.0 if values is None else float(values.sum()),
        )


def prune(drafts: Sequence[Draft], times: np.ndarray, ratios: Sequence[float]) -> list[Draft]:
    """Return each draft with its most probable nodes, the same number in each, to maximize the expected tokens per
    time.

    `times` (m,) are those of steps over 1, 2, ... nodes of every draft, drafting overhead included; `ratios` scale the
    gains of the nodes of each draft. Nodes that a drafter needs stay (`Draft.needed`). A draft without probabilities,
    or with sampled nodes that are not needed, is not pruned.
    """
    orders, gains, least = [], [], 1
    for draft, ratio in zip(drafts, ratios, strict=True):
        order = draft.ranked()
        orders.append(order)
        gains.append(np.ones(1))
        if order is None or draft.values is None:
            least = max(least, len(draft))
        else:
            gains[-1] = np.append(1.0, ratio * draft.values[order[1:]])
            least = max(least, len(draft.needed_paths) if draft.needed else 1)
    size = paying_size(gains, times, least)
    return [
        draft if order is None else draft.part(sorted(order[:size].tolist()))
        for draft, order in zip(drafts, orders, strict=True)
    ]


def paying_size(values: Sequence[np.ndarray], times: np.ndarray, least: int = 1) -> int:
    """Return the number of nodes to verify per sequence, at least `least`, that maximizes the expected tokens per time.

    `values` contains the acceptance probabilities of the nodes of each sequence, the root's 1 first, in the order in
    which nodes are taken; `times` (most,) are those of steps over 1, 2, ... nodes of every sequence. Ties resolve to
    the smallest size.
    """
    most = min(len(times), max(map(len, values), default=1))
    if most <= least:
        return least
    expected = np.zeros(most)
    for gains in values:
        gained = gains[:most].cumsum()
        expected += np.concatenate([gained, np.full(most - len(gained), gained[-1])])
    return least + int(np.argmax(expected[least - 1 :] / times[least - 1 : most]))


def now() -> float:
    """Return the time in seconds, excluding compilation."""
    return time.perf_counter() - compiling.seconds


class Clock:
    """Attributes the time since the last call to a part of the step."""

    def __init__(self, stats: Stats, device: torch.device) -> None:
        self.stats = [stats]
        """Those of all sequences that share the timed work."""
        self.reads_prompt = True
        """Whether the timed work belongs to the prompt: until the first tokens are emitted."""
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Begin a step: discard the time spent outside the loop."""
        if self.stats[0].synchronize:
            synchronize(self._device)
        self._last, self._compiled = time.perf_counter(), compiling.seconds
        self.pass_seconds = 0.0
        """Seconds of this step, excluding drafting and learning."""

    def lap(self, part: str) -> None:
        """Count the time since the last call as `part`."""
        if self.stats[0].synchronize:
            synchronize(self._device)
        now, compiled = time.perf_counter(), compiling.seconds
        of_compiling = compiled - self._compiled  # counted separately
        seconds = now - self._last - of_compiling
        self._last, self._compiled = now, compiled
        for stats in self.stats:
            stats.compile_seconds += of_compiling
            if self.reads_prompt:
                stats.prefill_seconds += seconds
            else:
                stats.seconds[part] += seconds
        if part not in (PARTS[0], PARTS[-1]):
            self.pass_seconds += seconds
