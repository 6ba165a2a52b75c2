"""The studies of the Token Recycling paper (section 5) as plans: what is varied, at which points.

A study varies one thing of one or several drafters, by default of Token Recycling as published. Trees of a given
number of nodes, depth and number of candidates are made as the paper's is: the best candidates go deepest, and every
candidate of the root is tried. Beyond that the nodes are those of highest expected acceptance
(`templates.RANK_ACCEPTANCE`), since the paper gives one template only.

The study `specdec-pp` is that of SpecDec++ (2405.19715, figure 4): a draft model that stops by each of several
thresholds, the same model at fixed lengths, and the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..._util.options import options_of, split_outside, written_options
from ...drafters._registry import drafter_class
from ...trees.templates import RANK_ACCEPTANCE, grow
from ...trees.tree import Tree
from ..row_format import BASELINE, REPLAY_BASELINE, STOPPING
from .data import Question
from .methods import Drafted, Method, Oracle, parse
from .plan import BenchmarkPlan, Entry, comparison, replays

DEFAULT = "published"
NODES, DEPTH, K = 80, 6, 8
"""Of the paper's tree."""
BREADTHS = (20, 40, 60, 80, 100, 120, 160)
DEPTHS = (3, 4, 5, 6, 7, 8, 10, 12)
KS = (2, 3, 4, 6, 8, 10, 12, 16)
RULES = ("last", "first", "unordered")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FIXED_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 14)
"""The paper's even ones, and shorter ones for draft models that agree with the target less often."""

Options = dict[str, Any]


def template(nodes: int, depth: int, k: int = K) -> Tree:
    """A tree of `nodes` drafted nodes and of that depth, with all `k` candidates of the root.

    Raises ValueError where that many nodes do not fit, or are too few.
    """
    needed = {(0,) * length for length in range(1, depth + 1)} | {(rank,) for rank in range(k)}
    # Measured for the first ranks; each further one is taken for half as good as the one before.
    further = (RANK_ACCEPTANCE[-1] / 2**place for place in range(1, k))
    acceptance = [*RANK_ACCEPTANCE, *further][:k]
    paths = needed
    for grown in range(nodes, 0, -1):
        paths = needed | set(grow(acceptance, grown, max_depth=depth).paths[1:])
        if len(paths) <= nodes:
            break
    if len(paths) != nodes:
        raise ValueError(
            f"expected a number of nodes that a tree of depth {depth} and {k} candidates can have, got {nodes}"
        )
    return Tree.from_paths(sorted(paths, key=lambda path: (len(path), path)))


def study(
    name: str, methods: Sequence[Method], questions: Sequence[Question], replay: bool, seed: int = 0
) -> BenchmarkPlan:
    """The plan of a study; raises ValueError for one that does not fit the methods or the questions."""
    if name not in STUDIES:
        raise ValueError(f"expected a study of {', '.join(STUDIES)}, got {name!r}")
    others = [method.spec for method in methods if not isinstance(method, Drafted) and method.spec != BASELINE]
    if others:
        raise ValueError(f"expected drafters to study, got {', '.join(others)}, which is none")
    drafted = [method for method in methods if isinstance(method, Drafted)] or [Drafted(DEFAULT)]
    if name == "order":
        return _order(drafted, questions, replay, seed)
    plan = comparison(name, STUDIES[name](drafted), questions, replay and name != "temperature")
    if replay and name == "temperature":
        plan.notes.append("a replayed text is what it is at every temperature: that study is of generation alone")
    return plan


def _varied(name: str, points: Callable[[], dict[str, Options]], methods: list[Drafted]) -> list[Entry]:
    """The entries of a study that varies options of a drafter."""
    found = []
    for method in methods:
        drafter = method.spec.partition(":")[0]
        for point, options in points().items():
            missing = [option for option in options if option not in options_of(drafter_class(drafter))]
            if missing:
                raise ValueError(f"expected a drafter with the option {missing[0]} for the study {name}, got {drafter}")
            found.append(Entry(Drafted(_without(method.spec, options), **options), point))
    return found


def _without(spec: str, options: Options) -> str:
    """A drafter's spec without what is varied, so that no row claims a value that it does not have."""
    name, _, written = spec.partition(":")
    kept = [part for part in split_outside(written, ",") if part and split_outside(part, "=")[0] not in options]
    return f"{name}:{','.join(kept)}" if kept else name


def _order(methods: list[Drafted], questions: Sequence[Question], replay: bool, seed: int) -> BenchmarkPlan:
    categories = list(dict.fromkeys(question.category for question in questions))
    if len(categories) < 2:
        raise ValueError(
            f"expected questions of two categories or more for the study order, got {', '.join(categories)} only"
        )
    orders = {
        "consecutive": sorted(questions, key=lambda question: categories.index(question.category)),
        "shuffled": random.Random(seed).sample(list(questions), len(questions)),
    }
    plan = BenchmarkPlan()
    for point, ordered in orders.items():
        plan.add(comparison("order", [Entry(method, point) for method in (parse(BASELINE), *methods)], ordered, False))
    for point, ordered in orders.items() if replay else ():
        plan.add(replays("order", [Entry(method, point) for method in (Drafted(REPLAY_BASELINE), *methods)], ordered))
    return plan


def _hot(methods: list[Drafted]) -> list[Entry]:
    return [Entry(method, point, cold=point == "cold") for method in methods for point in ("cold", "hot")]


def _temperature(methods: list[Drafted]) -> list[Entry]:
    return [
        Entry(method, f"{temperature:g}", temperature=temperature)
        for temperature in TEMPERATURES
        for method in (parse(BASELINE), *methods)
    ]


def _stopping(methods: list[Drafted]) -> list[Entry]:
    entries: list[Entry] = []
    for method in methods:
        drafter, _, written = method.spec.partition(":")
        if drafter != "specdec_pp":
            raise ValueError(
                f"expected --method specdec_pp:model=FOLDER for the study {STOPPING}, with a draft model that has a "
                f"trained head, got {drafter}"
            )
        options = written_options(drafter, written)
        kept = [f"{option}={options[option]}" for option in ("model", "sampled") if option in options]
        fixed = "draft_model:" + ",".join(["mode=sequence", *kept])
        entries += [Entry(Drafted(fixed, depth=length), f"length {length}") for length in FIXED_LENGTHS]
        learned = _without(method.spec, {"threshold": None})
        entries += [Entry(Drafted(learned, threshold=value), f"h = {value:g}") for value in THRESHOLDS]
        entries.append(Entry(Oracle(f"oracle:model={options['model']}", options["model"]), "oracle"))
    return entries


STUDIES: dict[str, Callable[..., Any]] = {
    "breadth": partial(
        _varied, "breadth", lambda: {str(nodes): {"tree": template(nodes, DEPTH)} for nodes in BREADTHS}
    ),
    "depth": partial(_varied, "depth", lambda: {str(depth): {"tree": template(NODES, depth)} for depth in DEPTHS}),
    "update": partial(_varied, "update", lambda: {rule: {"update": rule} for rule in RULES}),
    "order": _order,
    "hot": _hot,
    "parts": lambda methods: [Entry(method) for method in methods],
    "k": partial(_varied, "k", lambda: {str(k): {"k": k, "tree": template(NODES, DEPTH, k)} for k in KS}),
    "temperature": _temperature,
    STOPPING: _stopping,
}
"""What makes the entries of each: figure 3 (a, b, c) of the paper, table 1 (shuffle), section 3.1 (hot start), figure
4; k and temperature go on. The last one is of SpecDec++. The order of the questions alone needs a plan of its own.
"""
