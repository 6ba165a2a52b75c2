"""Random mutants: does a test fail where a piece of the package is changed?

    python scripts/mutants.py coverage [TESTS ...]    runs tests, and keeps which blocks each of them runs
    python scripts/mutants.py run [--number 300]      runs mutants of a sample that have no result yet
    python scripts/mutants.py report                  prints rates by module, and the mutants that live

cosmic-ray finds the places and makes the mutants. The sample is drawn with a fixed seed: a place each, then one of its
mutations. Left out are modules with compiled functions, and annotations, which nothing evaluates.

A mutant's tests are those that run its block of statements: one of each file, then the others, the shortest first, and
at most 60 that took a quarter of `--seconds` together. It is killed where one fails; where `--seconds` pass it hangs,
or the machine is busy, and it is counted apart. So a mutant that lives was seen by these tests and not
found, and one that no test runs is reported as such. Tests start in a fork of a process that has imported the
libraries, on a copy of the tracked files. Results are in build/mutants, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.machinery
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "mutants"
PARTS = (
    "token_recycling/loop",
    "token_recycling/model",
    "token_recycling/hf",
    "token_recycling/drafters/_shared",
    "token_recycling/serving",
)
TESTS = ("tests/loop", "tests/hf", "tests/serving", "tests/drafters", "tests/model")
SEED = 20261125
MOST_TESTS = 60
PYTEST = ["--quiet", "-p", "no:cacheprovider", "-p", "no:xdist"]


class Mutant(NamedTuple):
    """One mutation of one place."""

    module: str
    line: int
    column: int
    operator: str
    arguments: dict[str, Any]
    occurrence: int

    @property
    def name(self) -> str:
        """What tells it from all others, as long as its module stays as it is."""
        return f"{self.module}:{self.line}:{self.column} {self.operator.removeprefix('core/')} {self.occurrence}"


def modules() -> list[Path]:
    """Return the files of the package that are mutated."""
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")) if "training" not in path.parts]
    return [path for path in files if "@compiled" not in path.read_text()]


def annotated_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return first and last position (line, column) of all annotations, and of blocks for type checkers."""
    nodes: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            nodes.append(node.returns)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes.append(node)
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes]


def sample(number: int) -> list[Mutant]:
    """Return that many mutants of random places, always the same for the same sources."""
    from cosmic_ray.commands.init import _all_work_items

    places: dict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for path in modules():
        spans, module = annotated_spans(path.read_text()), str(path.relative_to(ROOT))
        for item in _all_work_items([path], {}):
            (mutation,) = item.mutations
            line, column = mutation.start_pos
            if not any(first <= (line, column) < last for first, last in spans):
                name, arguments = mutation.operator_name, mutation.operator_args
                mutant = Mutant(module, line, column, name, arguments, mutation.occurrence)
                places[module, line, column].append(mutant)
    draw = random.Random(SEED)
    order = sorted(places)
    draw.shuffle(order)
    return [draw.choice(places[place]) for place in order[:number]]


class Instrument(ast.NodeTransformer):
    """Makes each block of a function say that it runs. That costs a hundredth of tracing every line."""

    def __init__(self) -> None:
        self._in_function = False

    def visit_FunctionDef(self, node: Any) -> Any:
        outer, self._in_function = self._in_function, True
        self.generic_visit(node)
        self._in_function = outer
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._in_function and not isinstance(node, ast.ClassDef | ast.Lambda | ast.IfExp):
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if not statements:
                    continue
                first = statements[0]
                call = ast.parse(f"_runs(__file__, {first.lineno})").body[0]
                for part in ast.walk(call):
                    ast.copy_location(part, first)
                documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                statements.insert(1 if documented else 0, call)
        return node


class InstrumentingFinder(importlib.machinery.PathFinder):
    """Imports the modules that are mutated with instruments in them."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target) if name.startswith("token_recycling.") else None
        if spec is None or spec.origin is None or Path(spec.origin) not in modules():
            return None
        spec.loader = InstrumentingLoader(name, spec.origin)
        return spec


class InstrumentingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its instruments; nothing of it is cached."""

    def get_code(self, name: str) -> Any:
        tree = Instrument().visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)


class Recorder:
    """A plug-in of pytest that notes which blocks each test runs, and times it."""

    def __init__(self) -> None:
        self.blocks: set[tuple[str, int]] = set()
        self.tests: dict[str, dict[str, list[str]]] = {}
        self.seconds: dict[str, float] = {}
        builtins._runs = lambda file, line: self.blocks.add((file, line))  # type: ignore[attr-defined]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.blocks.clear()
        self._began = time.perf_counter()

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.seconds[nodeid] = time.perf_counter() - self._began
        for file, line in list(self.blocks):
            module = str(Path(file).relative_to(ROOT))
            self.tests.setdefault(module, {}).setdefault(str(line), []).append(nodeid)


def cover(tests: list[str]) -> None:
    """Run tests and write the blocks that each of them runs to build/mutants/blocks.json."""
    import pytest

    sys.meta_path.insert(0, InstrumentingFinder)
    recorder = Recorder()
    pytest.main([*PYTEST, *tests], plugins=[recorder])
    path = KEPT / "blocks.json"
    known = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "tests": {}}
    known["seconds"].update(recorder.seconds)
    for module, lines in recorder.tests.items():
        for line, names in lines.items():
            row = known["tests"].setdefault(module, {})
            row[line] = sorted({*row.get(line, ()), *names})
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known))


def block_of(mutant: Mutant) -> int:
    """Return the first line of the innermost block with a mutant; 0 where it runs at import."""
    blocks = [0]

    class Blocks(ast.NodeVisitor):
        def generic_visit(self, node: ast.AST) -> None:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions += 1
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                inside = isinstance(statements, list) and statements and self.functions
                if inside and statements[0].lineno <= mutant.line <= statements[-1].end_lineno:
                    blocks.append(statements[0].lineno)
            super().generic_visit(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions -= 1

    visitor = Blocks()
    visitor.functions = 0
    visitor.visit(ast.parse((ROOT / mutant.module).read_text()))
    return max(blocks)


def tests_of(mutant: Mutant, known: dict[str, Any], within: float) -> list[str]:
    """Return the tests that run a mutant's block, as many as took `within` seconds: the shortest of each file, then the
    shortest of all.
    """
    seconds, blocks, line = known["seconds"], known["tests"].get(mutant.module, {}), str(block_of(mutant))
    at_import = {test for tests in blocks.values() for test in tests} if line == "0" else ()
    tests = sorted(blocks.get(line, at_import), key=lambda test: seconds[test])
    files: set[str] = set()
    first = [test for test in tests if not ((file := test.partition("::")[0]) in files or files.add(file))]
    chosen: list[str] = []
    for test in [*first, *(test for test in tests if test not in first)][:MOST_TESTS]:
        if sum(map(seconds.__getitem__, chosen)) + seconds[test] > within and chosen:
            break
        chosen.append(test)
    return chosen


def run(number: int, part: str, limit: float, seconds: float) -> None:
    """Run the mutants of a sample that have no result, those in `part` alone, for at most `limit` seconds."""
    import numba  # noqa: F401 - for the forks
    import pytest
    import torch
    import transformers  # noqa: F401
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    torch.set_num_threads(1)
    known = json.loads((KEPT / "blocks.json").read_text())
    path, tree, ends = KEPT / "results.jsonl", KEPT / "tree", time.monotonic() + limit
    done = {row["mutant"] for row in results()}
    shutil.rmtree(tree, ignore_errors=True)
    for file in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if (ROOT / file).is_file() and file.split("/")[0] not in ("docs", "examples"):
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, tree / file)
    for mutant in sample(number):
        if mutant.name in done or not mutant.module.startswith(part) or time.monotonic() > ends:
            continue
        tests, source = tests_of(mutant, known, seconds / 4), (ROOT / mutant.module).read_text()
        changed = mutate_code(source, get_operator(mutant.operator)(**mutant.arguments), mutant.occurrence)
        row = {"mutant": mutant.name, "module": mutant.module, "tests": len(tests), "result": "not run by any test"}
        before, after = source.splitlines(), changed.splitlines()
        row["old"], row["new"] = next(
            ((old.strip(), new.strip()) for old, new in zip(before, after, strict=False) if old != new), ("", "")
        )
        if tests:
            (tree / mutant.module).write_text(changed)
            row["result"], row["by"] = _outcome(tests, tree, seconds, pytest)
            (tree / mutant.module).write_text(source)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row["result"], mutant.name, flush=True)


def _outcome(tests: list[str], tree: Path, seconds: float, pytest: Any) -> tuple[str, str]:
    """Return what tests say of a mutated tree: killed, out of time, or alive; and the end of their output."""
    output, child = tree / "output.txt", os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
        sys.path[:] = [
            str(tree),
            *(entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, ROOT / "scripts")),
        ]
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os._exit(int(pytest.main([*PYTEST, "--exitfirst", *tests])))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            lines = [line for line in output.read_text().splitlines() if line.startswith(("FAILED", "ERROR tests"))]
            code = os.waitstatus_to_exitcode(status)
            return ("lives" if code == 0 else "killed" if code in (1, 2, 3, 4) or code < 0 else "no test"), "".join(
                lines[:1]
            )
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "out of time", ""


def results() -> list[dict[str, Any]]:
    """Return the rows of all mutants that were run."""
    path = KEPT / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report() -> str:
    """Return the table of modules, and the mutants that live."""
    rows = results()
    folders = sorted({row["module"].rpartition("/")[0] for row in rows})
    outcomes = ("killed", "out of time", "lives", "not run by any test")
    lines = [f"| modules | mutants | {' | '.join(outcomes)} |", "| --- " * 6 + "|"]
    for folder in [*folders, "token_recycling"]:
        own = [row["result"] for row in rows if row["module"].startswith(folder)]
        lines.append(f"| {folder} | {len(own)} | {' | '.join(str(own.count(outcome)) for outcome in outcomes)} |")
    alive = [
        f"- {row['mutant']}\n      {row['old']}\n      {row['new']}" for row in rows if row["result"] in outcomes[2:]
    ]
    return "\n".join([*lines, "", *alive])


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("coverage").add_argument("tests", nargs=argparse.REMAINDER, default=TESTS)
    running = commands.add_parser("run")
    running.add_argument("--number", type=int, default=300, help="size of the sample")
    running.add_argument("--part", default="token_recycling", help="folder or module: others wait")
    running.add_argument("--limit", type=float, default=1e9, help="seconds after which no mutant is begun")
    running.add_argument("--seconds", type=float, default=300, help="limit of the tests of one mutant")
    commands.add_parser("report")
    arguments = parser.parse_args()
    if arguments.command == "coverage":
        cover(list(arguments.tests))
    elif arguments.command == "run":
        run(arguments.number, arguments.part, arguments.limit, arguments.seconds)
    else:
        print(report())


if __name__ == "__main__":
    main()
