"""The report: a table for each question, from the rows of all scenarios that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from token_recycling.bench.report.summary import parse
from token_recycling.bench.report.table import NONE, Cell, Table, as_markdown
from token_recycling.bench.row_format import ROWS

from . import bars
from .figures import PROCESSOR, WALL, Found, Ratio, Row, ratio
from .scenarios import DEFAULT, GENERATE, LOOKUP, METHODS, PARTS, PLAIN, PUBLISHED, SCENARIOS, SIXTEEN, Scenario

_MET = "met"
_MET_OF_TYPE = f"{_MET}: {', '.join(f'{bar} in {dtype}' for dtype, bar in bars.OF_GENERATE.items())}"


def markdown(folder: Path) -> str:
    """The tables of the rows below the folder, after what they add up to; then what was not measured, and why."""
    rows = {one: parse(folder / one.name)[0] for one in SCENARIOS if _has_rows(folder / one.name)}
    found = {one: Found.of(own) for one, own in rows.items()}
    found = {one: own for one, own in found.items() if own.prompts}
    tables = [
        _against_parts(_of(found, "generate", "replay")),
        _written({one: own for one, own in _of(found, "generate").items() if one.name.startswith("written")}),
        _accepted(_of(found, "replay")),
        _first_tokens(_of(found, "first token")),
        _all_methods("Speed over plain", found, lambda own, method: f"{own.speed(method, PLAIN).value:.2f}"),
        _all_methods("Mean accepted tokens", found, lambda own, method: f"{own.mat(method):.2f}"),
    ]
    every = [row for own in rows.values() for row in own]
    pieces = ["# The default drafter", *_summary(every, tables)]
    for table in tables:
        if table.rows:
            pieces += [f"## {table.title}", as_markdown(table)]
    missing = [f"{one.name}{' (needs --data FILE)' * one.from_file}" for one in SCENARIOS if one not in found]
    notes = [f"Not measured: {', '.join(missing)}."] if missing else []
    notes += [f"{row['method']} failed on {row['prompt']}: {row['failure']}" for row in every if row["failure"]]
    return "\n\n".join([*pieces, *(f"- {note}" for note in notes)]) + "\n"


def _has_rows(folder: Path) -> bool:
    return (folder / ROWS).is_file() and (folder / ROWS).stat().st_size > 0


def _of(found: Mapping[Scenario, Found], *modes: str) -> dict[Scenario, Found]:
    return {one: own for one, own in found.items() if one.mode in modes}


def _summary(rows: Sequence[Row], tables: Sequence[Table]) -> list[str]:
    """Where the rows were measured, how quiet it was there, and how many bars are met."""
    if not rows:
        return ["No rows."]
    keys = ("cpu", "threads", "torch", "transformers", "commit")
    places = sorted({", ".join(f"{key} {row['environment'][key]}" for key in keys) for row in rows})
    timed = [row for row in rows if not row["failure"]]
    wall, processor = (sum(statistics.median(row[clock]) for row in timed) for clock in (WALL, PROCESSOR))
    judged = [
        row[place].text
        for table in tables
        for row in table.rows
        for place, column in enumerate(table.columns)
        if column.startswith(_MET) and row[place].text != NONE
    ]
    met, unsure = (sum(map(test, judged)) for test in (lambda text: text.startswith("yes"), lambda text: "," in text))
    return [
        *(f"Measured with {place}." for place in places),
        f"The clock ran for {wall / processor:.3f} of the processor's time: 1 on a quiet machine.",
        f"**{met} of {len(judged)} bars are met**; {unsure} of them could be otherwise by noise alone.",
    ]


def _against_parts(found: Mapping[Scenario, Found]) -> Table:
    rows = []
    for one, own in found.items():
        part = own.best(PARTS)
        rows.append(
            [
                *(Cell(one.name), Cell(str(own.prompts))),
                *_judged(own, PLAIN, bars.OF_PLAIN),
                Cell(part),
                *_judged(own, part, bars.OF_BEST_PART),
            ]
        )
    return Table(
        "Is the default as fast as plain decoding, and as the best of its parts?",
        [
            *("workload", "prompts", "over plain", "by the clock", f"{_MET}: {bars.OF_PLAIN}"),
            *("best part", "over it", "by the clock", f"{_MET}: {bars.OF_BEST_PART}"),
        ],
        rows,
        "Speed of whole calls, by processor time, and the middle 95% over prompts drawn anew. The best part is known "
        "only afterwards: of parts that are equally fast the luckiest is taken.",
        words=frozenset({0, 5}),
    )


def _written(found: Mapping[Scenario, Found]) -> Table:
    rows = []
    for one, own in found.items():
        # Short and long texts are shown too, but the bars are set for texts of the usual length.
        usual = one.name == f"written-{one.dtype}"
        same = [row["identical"] for row in own.rows[DEFAULT]]
        rows.append(
            [
                *(Cell(one.name), Cell(str(own.prompts))),
                *_judged(own, GENERATE, bars.OF_GENERATE[one.dtype] if usual else None),
                *_judged(own, LOOKUP, bars.OF_LOOKUP if usual else None),
                Cell(f"{own.mat(DEFAULT):.2f}"),
                Cell(f"{sum(same)} of {len(same)}"),
            ]
        )
    return Table(
        "How much faster than transformers is it on written text?",
        [
            *("workload", "prompts", "over generate", "by the clock", _MET_OF_TYPE),
            *("over its prompt lookup", "by the clock", f"{_MET}: {bars.OF_LOOKUP}", "MAT", "same text"),
        ],
        rows,
        "Same text: prompts whose text is that of generate, token by token.",
    )


def _judged(own: Found, other: str, bar: bars.Bar | None) -> list[Cell]:
    """The default's speed over another method's by both clocks, and whether that is enough."""
    speed = own.speed(DEFAULT, other)
    cells = [Cell(str(speed)), Cell(f"{own.speed(DEFAULT, other, WALL).value:.2f}")]
    return [*cells, Cell(NONE) if bar is None else bar.judged(speed)]


def _accepted(found: Mapping[Scenario, Found]) -> Table:
    rows = []
    for one, own in found.items():
        over = own.mat_over(SIXTEEN, PUBLISHED)
        mats = (Cell(f"{own.mat(method):.2f}") for method in (DEFAULT, SIXTEEN, PUBLISHED))
        rows.append([Cell(one.name), Cell(str(own.prompts)), *mats, Cell(str(over)), bars.OF_PUBLISHED.judged(over)])
    return Table(
        "Do 16 nodes accept as much as the published method's 80?",
        ["workload", "prompts", "default", "16 nodes", "published, 80", "16 over 80", f"{_MET}: {bars.OF_PUBLISHED}"],
        rows,
        "Mean accepted tokens of replayed text.",
    )


def _first_tokens(found: Mapping[Scenario, Found]) -> Table:
    rows = []
    for one, every in found.items():
        for length in dict.fromkeys(row["category"] for row in every.rows[DEFAULT]):
            own = every.only(length)
            generate = statistics.mean(own.first(GENERATE, 0))
            default, later, plain, later_plain = (
                _by_generate(own, method, place) for method in (DEFAULT, PLAIN) for place in (0, 1)
            )
            rows.append(
                [
                    *(Cell(one.name), Cell(length), Cell(str(own.prompts))),
                    Cell(f"{1000 * generate:.0f} ms"),
                    *(Cell(str(default)), Cell(f"{_by_generate(own, DEFAULT, 0, WALL).value:.2f}")),
                    bars.FIRST_TOKEN.judged(default),
                    *(Cell(str(times)) for times in (plain, later, later_plain)),
                ]
            )
    return Table(
        "When does the first token come?",
        [
            *("workload", "prompt", "rounds", "generate", "default", "by the clock", f"{_MET}: {bars.FIRST_TOKEN}"),
            *("plain", "second token: default", "second token: plain"),
        ],
        rows,
        "Times by those of generate: less is better.",
    )


def _by_generate(own: Found, method: str, place: int, clock: str = PROCESSOR) -> Ratio:
    return ratio(own.first(method, place, clock), own.first(GENERATE, place, clock))


def _all_methods(title: str, found: Mapping[Scenario, Found], figure: Callable[[Found, str], str]) -> Table:
    methods = list(dict.fromkeys((*METHODS["generate"], *METHODS["replay"])))
    rows = [
        [Cell(one.name), *(Cell(figure(own, method) if method in own.rows else NONE) for method in methods)]
        for one, own in _of(found, "generate", "replay").items()
    ]
    return Table(title, ["workload", *methods], rows)
