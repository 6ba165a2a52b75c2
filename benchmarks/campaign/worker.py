"""One process of a campaign."""

from __future__ import annotations

import itertools
import json
import logging
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

from .case import draw, words
from .minimise import minimised
from .program import script
from .report import read, signature
from .run import FAILURES, run

_SCRIPTS = 3
"""Errors that look alike are minimised so often; mismatches, whose cause nobody knows before, ten times that."""


def work(
    job: int,
    out: Path,
    seed: int,
    first: int,
    cases: int | None,
    deadline: float,
    jobs: int,
    only: list[tuple[str, str]],
) -> None:
    """Runs every `jobs`-th case that has no row yet."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("token_recycling").propagate = False
    rows = read(out / "rows.jsonl")
    done = {row["case"] for row in rows if row["seed"] == seed}
    seen = Counter(signature(row) for row in rows if row.get("script"))
    for number in itertools.count(first + job, jobs) if cases is None else range(first + job, cases, jobs):
        if time.time() > deadline:
            return
        case = draw(seed, number)
        said = words(case)
        if number in done or not all(value in said.get(dimension, []) for dimension, value in only):
            continue
        result = run(case)
        row = {"seed": seed, "case": number, "outcome": result.outcome, "detail": result.detail[:400]}
        row |= {"seconds": result.seconds, "mat": result.mat, "words": said}
        alike = signature(row)
        if result.outcome in FAILURES and seen[alike] < (_SCRIPTS if result.outcome == "ERROR" else 10 * _SCRIPTS):
            seen[alike] += 1
            small, shown = minimised(case, result)
            path = out / "scripts" / f"{seed}-{number}.py"
            about = f"Case {number} of seed {seed}: {shown.outcome}, {shown.detail[:300]}"
            path.write_text(script(small, about), encoding="utf-8")
            row |= {"script": f"scripts/{path.name}", "small": words(small)}
            print(f"{about}\n    {path}", flush=True)
        with (out / "rows.jsonl").open("a", encoding="utf-8") as rows_file:
            rows_file.write("\n" + json.dumps(row))  # the line before may be cut off
