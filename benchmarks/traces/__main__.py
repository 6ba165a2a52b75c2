"""Replays recorded conversations and edits: tokens a step of this package, of Arctic's suffix decoding and of lookup.

    python -m benchmarks.traces MODEL --trace edit_eval.jsonl --trace gpt-4o-airline.json --trace demonstrations

`--trace` may be given again: InstructCoder's `edit_eval/edit_eval.jsonl`, tau-bench's
`historical_trajectories/gpt-4o-airline.json`, SWE-agent's `trajectories/demonstrations`, from where you have them; none
of them is part of this package. Without one, edits of this package's own source are replayed. What was said is forced;
the model's passes, and what is learned of its logits, are real. Cold: nothing is known before a conversation; warm: all
conversations before it. Arctic is asked with several numbers of drafted tokens a match; beside ours stands what it
would reach with as many drafted tokens. Times are reckoned by what passes over n nodes take here. JSON comes last.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from token_recycling import load, make_drafter
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.self_test import ready

from .arctic import Arctic
from .edits import edits
from .replaying import Steps, pass_costs, with_model, without_model
from .turns import Turn, recorded

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_BYTES = 2 * 10**9
Replay = Callable[[Turn], Steps]


def main(
    model: Annotated[str, typer.Argument(help="a model folder, file or name")],
    trace: Annotated[list[Path] | None, typer.Option(help="a file or folder of recorded conversations")] = None,
    conversations: Annotated[int, typer.Option(help="of each trace, the first; edits of each kind")] = 8,
    drafter: Annotated[str, typer.Option(help="the drafter that is compared")] = "recycling",
    arctic: Annotated[bool, typer.Option(help="compare with arctic-inference, which must be importable")] = True,
    dtype: Annotated[str, typer.Option(help="of the model")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
) -> None:
    """See the module."""
    torch.set_num_threads(threads)
    loaded = load(model, dtype)
    target, found = ready(loaded.model), []
    costs = pass_costs(target)
    for path in trace or [None]:
        turns = (
            edits(loaded.tokenizer, conversations) if path is None else recorded(path, loaded.tokenizer, conversations)
        )
        fits = [turn for turn in turns if len(turn.prompt) + len(turn.answer) <= (target.max_length or 2**31)]
        apart = [list(one) for _, one in itertools.groupby(fits, key=lambda turn: turn.conversation)]
        methods = _methods(target, drafter, apart, arctic)
        for warm in (False, True):
            named = {name: _replayed(make, apart, warm, name) for name, make in methods}
            found.append(_report(path.name if path else "own edits", warm, named, costs))
    print(json.dumps(found))


def _methods(
    target: Any, drafter: str, apart: Sequence[Sequence[Turn]], arctic: bool
) -> list[tuple[str, Callable[[], Replay]]]:
    """Names, and functions that make a method anew."""

    kept = PrefixCache(target, _BYTES)  # what was read for one method need not be read for the next

    def ours(predicted: bool) -> Replay:
        made = make_drafter(drafter)
        return lambda turn: with_model(target, made, turn, kept.of(turn.conversation), predicted)

    def lookup() -> Replay:
        made = make_drafter("prompt_lookup")
        return lambda turn: without_model(made, target, turn)

    def of_arctic(factor: float) -> Replay:
        made = Arctic(factor)
        return lambda turn: Steps(turn, *map(list, zip(*made.replay(turn), strict=True)))

    found: list[tuple[str, Callable[[], Replay]]] = [("ours", lambda: ours(False))]
    if any(turn.prediction for one in apart for turn in one):
        found.append(("ours, with prediction", lambda: ours(True)))
    found.append(("lookup", lookup))
    if arctic:
        found += [(f"arctic {factor:g}", lambda factor=factor: of_arctic(factor)) for factor in _FACTORS]
    return found


def _replayed(make: Callable[[], Replay], apart: Sequence[Sequence[Turn]], warm: bool, label: str) -> list[Steps]:
    replay, found = make(), []
    for number, turns in enumerate(track(apart, label, console=Console(stderr=True), transient=True)):
        if number and not warm:
            replay = make()
        found += map(replay, turns)
    return found


def _report(name: str, warm: bool, named: dict[str, list[Steps]], costs: np.ndarray) -> dict[str, Any]:
    """Prints a table of one trace; its figures."""
    turns, state = next(iter(named.values())), "warm" if warm else "cold"
    table = Table(title=f"{name}, {state}: {len(turns)} turns, {sum(len(one.turn.answer) for one in turns):,} tokens")
    for column in ("method", "kind", "tokens a step", "drafted a step", "tokens a pass's time", "Arctic at as many"):
        table.add_column(column, justify="left" if column in ("method", "kind") else "right")
    rows, by_factor = [], [steps for method, steps in named.items() if method.startswith("arctic")]
    for method, steps in named.items():
        by_kind: dict[str, list[int]] = defaultdict(list)
        for place, one in enumerate(steps):
            by_kind["all"].append(place)
            by_kind[one.turn.kind].append(place)
        for kind, places in by_kind.items():
            own = _figures([steps[place] for place in places], costs)
            swept = np.array([_figures([one[place] for place in places], costs) for one in by_factor])
            beside = None
            if len(swept) and method.startswith("ours"):
                wanted = np.log(max(own[1], 0.1))
                beside = [float(np.interp(wanted, np.log(swept[:, 1] + 1e-9), swept[:, column])) for column in (0, 2)]
            shown = "" if beside is None else f"{beside[0]:.2f} ({own[0] / beside[0]:.2f} times)"
            table.add_row(method, kind, f"{own[0]:.2f}", f"{own[1]:.1f}", f"{own[2]:.2f}", shown)
            rows.append({"method": method, "kind": kind, "figures": own, "arctic": beside})
    Console(width=130).print(table)
    return {"trace": name, "state": state, "rows": rows}


def _figures(steps: Sequence[Steps], costs: np.ndarray) -> tuple[float, float, float]:
    """Tokens a step, drafted tokens a step, and tokens in the time of a pass over one token."""
    drafted = np.array([n for one in steps for n in one.drafted])
    emitted = sum(n for one in steps for n in one.emitted)
    taken = costs[np.minimum(drafted, len(costs) - 1)].sum()
    return emitted / len(drafted), float(drafted.mean()), float(emitted / taken)


if __name__ == "__main__":
    typer.run(main)
