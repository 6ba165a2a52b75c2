"""Mutation testing: does a test fail if a piece of the package is changed?

    python scripts/mutants.py coverage [TESTS ...]    runs tests, and records the blocks that each test runs
    python scripts/mutants.py run [--number 300]      runs mutants of a sample that have no result yet
    python scripts/mutants.py report                  prints rates by module, and the surviving mutants

cosmic-ray finds locations and creates mutants. The sample has a fixed seed: random locations, and for each of them one
of its mutations. Modules with compiled functions are excluded, as are annotations, which are never evaluated.

A mutant's tests are those that run its block of statements, up to `--seconds` in total: first tests that have killed
another mutant of the module, then tests that run little other code. The mutant is killed if a test fails that passes
without it. A mutant with a test that takes many times as long as usual hangs, and is counted separately. All times are
processor times. So a surviving mutant was run by its tests but not detected; a mutant that no test runs is reported as
such.

One process collects all tests, and forks for each mutant: the child changes the code of functions that are already
imported, and runs the tests. If a mutant changes code that runs at import, the child imports the package and collects
its tests again. The coverage copies the tracked files to build/mutants/tree, where everything runs; with TESTS it
copies only the tests, and adds to the recorded coverage. Mutants with a result are not run again.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import gc
import importlib.machinery
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KEPT = (ROOT / "build" / "mutants").resolve()
TREE = KEPT / "tree"
PARTS = (
    "token_recycling/loop",
    "token_recycling/model",
    "token_recycling/hf",
    "token_recycling/drafters/_shared",
    "token_recycling/serving",
)
TESTS = tuple(
    f"tests/{folder}"
    for folder in ("loop", "hf", "serving", "drafters", "model", "costs", "trees", "recycling", "grammar")
)
SEED = 20261125
HANGS = 5, 8
"""A test hangs after this many seconds of processor time plus this multiple of its usual time."""
PYTEST = ["--quiet", "-p", "no:cacheprovider", "-p", "no:xdist"]
OUTCOMES = ("killed", "out of time", "lives", "not run by any test")


class Mutant(NamedTuple):
    """One change of one module."""

    name: str
    module: str
    lines: tuple[int, ...]
    """Numbers of the changed lines, in the original module."""
    source: str
    """Source of the changed module."""


def modules() -> list[Path]:
    """Return the files of the package to mutate."""
    files = [path for part in PARTS for path in sorted((TREE / part).rglob("*.py")) if "training" not in path.parts]
    return [path for path in files if "@compiled" not in path.read_text()]


def annotated_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the first and last position (line, column) of all annotations and of blocks for type checkers."""
    nodes: list[ast.expr | ast.stmt] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            nodes.append(node.returns)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes.append(node)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))  # parsed nodes have both
        for node in nodes
    ]


def sample(number: int) -> Iterator[Mutant]:
    """Yield `number` mutants at random locations, always the same for the same sources."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    places: dict[tuple[str, int, int], list[Any]] = defaultdict(list)
    for path in modules():
        spans, module = annotated_spans(path.read_text()), str(path.relative_to(TREE))
        for item in _all_work_items([path], {}):
            (mutation,) = item.mutations
            line, column = mutation.start_pos
            if not any(first <= (line, column) < last for first, last in spans):
                places[module, line, column].append(mutation)
    draw = random.Random(SEED)
    order = sorted(places)
    draw.shuffle(order)
    for module, line, column in order[:number]:
        mutation = draw.choice(places[module, line, column])
        operator = mutation.operator_name.removeprefix("core/")
        name = f"{module}:{line}:{column} {operator} {mutation.occurrence}"
        operation = get_operator(mutation.operator_name)(**mutation.operator_args)
        source = mutate_code((TREE / module).read_text(), operation, mutation.occurrence)
        yield Mutant(name, module, (line,), source)


class Instrument(ast.NodeTransformer):
    """Inserts a call into each block of a function that records its execution, at 1% of the cost of line tracing."""

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
    """Imports the modules to mutate with recording calls inserted."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target) if name.startswith("token_recycling.") else None
        if spec is None or spec.origin is None or Path(spec.origin) not in modules():
            return None
        spec.loader = InstrumentingLoader(name, spec.origin)
        return spec


class InstrumentingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module with recording calls; bypasses the bytecode cache."""

    def get_code(self, name: str) -> Any:
        tree = Instrument().visit(ast.parse(self.get_data(self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)


class Recorder:
    """A pytest plug-in that records the blocks that each test runs, and its time."""

    def __init__(self, cases: int) -> None:
        self.blocks: set[tuple[str, int]] = set()
        self.tests: dict[str, dict[str, list[str]]] = {}
        self.seconds: dict[str, float] = {}
        self._cases, self._failed = cases, False
        builtins._runs = lambda file, line: self.blocks.add((file, line))  # type: ignore[attr-defined]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        functions = defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("[")[0]].append(item)
        items[:] = [item for cases in functions.values() for item in cases[:: -(-len(cases) // self._cases)]]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.blocks.clear()
        self._began, self._failed = time.process_time(), False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= not report.passed

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        if self._failed:
            return
        self.seconds[nodeid] = time.process_time() - self._began
        for file, line in list(self.blocks):
            module = str(Path(file).relative_to(TREE))
            self.tests.setdefault(module, {}).setdefault(str(line), []).append(nodeid)


def cover(tests: list[str], cases: int) -> None:
    """Run tests, at most `cases` of each parametrized one, and record the blocks that each of them runs."""
    import pytest

    path = KEPT / "blocks.json"
    copy_files(("tests/",) if tests and path.exists() else ("",))
    enter_tree()
    sys.meta_path.insert(0, InstrumentingFinder)
    recorder = Recorder(cases)
    pytest.main([*PYTEST, *(tests or TESTS)], plugins=[recorder])
    known = json.loads(path.read_text()) if tests and path.exists() else {"seconds": {}, "tests": {}}
    known["seconds"].update(recorder.seconds)
    for module, lines in recorder.tests.items():
        for line, names in lines.items():
            row = known["tests"].setdefault(module, {})
            row[line] = sorted({*row.get(line, ()), *names})
    path.write_text(json.dumps(known))


def copy_files(folders: tuple[str, ...]) -> None:
    """Copy the tracked files of some folders to `TREE`, where they run; compiled functions there are kept."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in listed.split("\n"):
        if file.startswith(folders) and not file.startswith(("docs/", "examples/")) and (ROOT / file).is_file():
            target = TREE / file
            if not target.exists() or target.read_bytes() != (ROOT / file).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, target)


def enter_tree() -> None:
    """Switch to the copied files for all imports and runs, also in processes that tests start."""
    os.chdir(TREE)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(TREE), PYTHONDONTWRITEBYTECODE="1", TOKEN_RECYCLING_CACHE=str(KEPT / "cache"))
    here = (ROOT, ROOT / "scripts")
    sys.path[:] = [str(TREE), *(entry for entry in sys.path if Path(entry or ".").resolve() not in here)]


def block_of(source: str, lines: tuple[int, ...]) -> int:
    """Return the first line of the innermost block of a function with these lines; 0 if they run at import."""
    blocks = [0]

    def visit(node: ast.AST, in_function: bool) -> None:
        in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if in_function and isinstance(statements, list) and statements:
                first, last = statements[0].lineno, statements[-1].end_lineno
                if all(first <= line <= last for line in lines):
                    blocks.append(first)
        for child in ast.iter_child_nodes(node):
            visit(child, in_function)

    visit(ast.parse(source), in_function=False)
    return max(blocks)


def tests_of(module: str, block: int, known: dict[str, Any], within: float, first: set[str]) -> list[str]:
    """Return the tests that run a block, up to `within` seconds in total: those in `first`, then those with the largest
    share of their blocks in this module.
    """
    seconds, blocks = known["seconds"], known["tests"].get(module, {})
    own: Counter[str] = Counter()
    for names in blocks.values():
        own.update(names)
    tests = blocks.get(str(block), own if block == 0 else ())
    chosen: list[str] = []
    total = 0.0
    for test in sorted(tests, key=lambda test: (test not in first, -own[test] / known["blocks"][test], test)):
        total += seconds[test]
        if total > within and chosen:
            break
        chosen.append(test)
    return chosen


def codes(code: CodeType, found: dict[tuple[str, int], CodeType] | None = None) -> dict[tuple[str, int], CodeType]:
    """Return the code of all functions in a module's code, by name and by number among functions of the same name."""
    found = {} if found is None else found
    for part in code.co_consts:
        if isinstance(part, CodeType):
            number = sum(name == part.co_qualname for name, _ in found)
            found[part.co_qualname, number] = part
            codes(part, found)
    return found


def change_functions(functions: list[FunctionType], path: Path, old: str, new: str) -> None:
    """Replace the code of a module's functions by their code in another version of its source."""
    before, after = (codes(compile(source, str(path), "exec", dont_inherit=True)) for source in (old, new))
    names = {(code.co_qualname, code.co_firstlineno): name for name, code in before.items()}
    for function in functions:
        code = function.__code__
        if code.co_filename == str(path):
            function.__code__ = after[names[code.co_qualname, code.co_firstlineno]]


class Trials:
    """A pytest plug-in that runs mutants instead of the collected tests."""

    def __init__(self, mutants: Iterator[Mutant], results: Path, limit: float, seconds: float) -> None:
        self._mutants, self._results, self._seconds = mutants, results, seconds
        self._ends = time.monotonic() + limit
        self._known = json.loads((KEPT / "blocks.json").read_text())
        self._known["blocks"] = Counter(
            test for lines in self._known["tests"].values() for names in lines.values() for test in names
        )
        self._passes: dict[str, bool] = {}
        self._kills: dict[str, set[str]] = defaultdict(set)
        """By module, the tests that failed with one of its mutants: these tests run first."""

    def pytest_runtestloop(self, session: Any) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._items = {name: self._items[name] for name in self._known["seconds"] if name in self._items}
        compile_drafting()
        gc.unfreeze()  # objects that conftest.py hides from collections are also hidden from `get_objects`
        gc.collect()
        self._functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
        gc.freeze()
        done = {row["mutant"] for row in read_results(self._results)}
        for mutant in self._mutants:
            if mutant.name not in done and time.monotonic() < self._ends:
                row = self._row(mutant)
                with self._results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["result"], mutant.name, row["by"], round(row["seconds"], 1), file=sys.__stderr__, flush=True)
        return True

    def _row(self, mutant: Mutant) -> dict[str, Any]:
        source = (TREE / mutant.module).read_text()
        block = block_of(source, mutant.lines)
        tests = tests_of(mutant.module, block, self._known, self._seconds, self._kills[mutant.module])
        tests = [test for test in tests if test in self._items]
        before, after = source.splitlines(), mutant.source.splitlines()
        pairs = zip(before, after, strict=False)
        old, new = next(((old.strip(), new.strip()) for old, new in pairs if old != new), ("", ""))
        row = {"mutant": mutant.name, "module": mutant.module, "tests": len(tests), "old": old, "new": new}
        result, failed, began = OUTCOMES[3], "", time.monotonic()
        while tests:
            result, failed = self._forked(tests, mutant, block)
            if result != "killed" or failed in ("", "error") or self._passes_alone(failed):
                break
            tests = [test for test in tests if test != failed]
        if result == "killed":
            self._kills[mutant.module].add(failed)
        return {**row, "result": result, "by": failed, "seconds": time.monotonic() - began}

    def _passes_alone(self, test: str) -> bool:
        """Return whether a test passes without a mutant, in a separate child process."""
        if test not in self._passes:
            self._passes[test] = self._forked([test])[0] == "lives"
        return self._passes[test]

    def _forked(self, tests: list[str], mutant: Mutant | None = None, block: int = 0) -> tuple[str, str]:
        """Return the outcome of tests with a mutant, and the name of the test that failed."""
        path = TREE / mutant.module if mutant else None
        source = path.read_text() if path else ""
        reading, writing = os.pipe()
        if path and mutant:
            path.write_text(mutant.source)
        child = os.fork()
        if not child:
            os.close(reading)
            code = 1
            try:
                self._run_child(tests, mutant, block, source, writing)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        os.close(writing)
        ends = time.monotonic() + 60 + 8 * sum(map(self._known["seconds"].__getitem__, tests))  # if it only waits
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
                time.sleep(0.02)
        finally:
            if path:
                path.write_text(source)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if not ended[0]:
            ended = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            failed = pipe.read()
        code = os.waitstatus_to_exitcode(ended[1])
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            return "out of time", ""
        return ("lives" if code == 0 else "killed"), failed or ("error" if code else "")

    def _run_child(self, tests: list[str], mutant: Mutant | None, block: int, source: str, failed: int) -> None:
        """Run tests in a child of the process that collected them; write the name of the first that fails, and exit."""
        os.setsid()
        seconds, (least, times) = self._known["seconds"], HANGS
        with (KEPT / "output.txt").open("w") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        if mutant and not block:
            signal.setitimer(signal.ITIMER_PROF, 30 + 2 * sum(map(seconds.__getitem__, tests)))
            self._import_again(tests, failed)
            return
        if mutant:
            change_functions(self._functions, TREE / mutant.module, source, mutant.source)
        items = [self._items[test] for test in tests]
        manager = items[0].config.pluginmanager
        manager.register(FirstFailure(failed))
        for item, following in zip(items, [*items[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_PROF, least + times * seconds[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _import_again(self, tests: list[str], failed: int) -> None:
        """Collect tests again, with the current package in the tree, and run them."""
        import pytest

        for name, module in list(sys.modules.items()):
            if str(TREE) in (getattr(module, "__file__", None) or ""):
                del sys.modules[name]
        code = pytest.main([*PYTEST, *tests], plugins=[FirstFailure(failed)])
        if code:
            os._exit(int(code))


class FirstFailure:
    """A pytest plug-in that writes the name of the first test that fails, and ends the process."""

    def __init__(self, output: int) -> None:
        self._output = output

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(report.longreprtext)
            os.write(self._output, report.nodeid.encode())
            os._exit(1)


def compile_drafting() -> None:
    """Decode with the default drafter, so that children need not load or compile its functions."""
    import torch
    from support import tiny

    import token_recycling as tr

    tr.generate(tiny.llama(), torch.tensor([[1, 2, 3] * 4]), drafter="recycling", max_new_tokens=20)


def run(mutants: Iterator[Mutant], results: Path, limit: float, seconds: float) -> None:
    """Run mutants that have no result, for at most `limit` seconds."""
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile("first failure", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("first failure")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # after the module in the tree is restored
    known = json.loads((KEPT / "blocks.json").read_text())
    enter_tree()
    files = sorted({test.partition("::")[0] for test in known["seconds"]})
    temporary = ["--basetemp", str(KEPT / f"tmp-{os.getpid()}"), "-m", "not real"]
    pytest.main([*PYTEST, *temporary, *files], plugins=[Trials(mutants, results, limit, seconds)])


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the rows of all mutants that were run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table of folders, and the surviving mutants."""
    folders = sorted({row["module"].rpartition("/")[0] for row in rows})
    lines = [f"| modules | mutants | {' | '.join(OUTCOMES)} |", "| --- " * 6 + "|"]
    for folder in [*folders, "token_recycling"]:
        own = [row["result"] for row in rows if row["module"].startswith(folder)]
        lines.append(f"| {folder} | {len(own)} | {' | '.join(str(own.count(outcome)) for outcome in OUTCOMES)} |")
    alive = [
        f"- {row['mutant']}\n      {row['old']}\n      {row['new']}" for row in rows if row["result"] in OUTCOMES[2:]
    ]
    return "\n".join([*lines, "", *alive])


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    covering = commands.add_parser("coverage")
    covering.add_argument("--cases", type=int, default=12, help="maximum cases of each parametrized test")
    covering.add_argument("tests", nargs="*")
    running = commands.add_parser("run")
    running.add_argument("--number", type=int, default=300, help="size of the sample")
    running.add_argument("--part", default="token_recycling", help="folder or module to run")
    running.add_argument("--limit", type=float, default=1e9, help="start no mutant after this many seconds")
    running.add_argument("--seconds", type=float, default=60, help="maximum total time of a mutant's tests")
    commands.add_parser("report")
    arguments = parser.parse_args()
    results = KEPT / "results.jsonl"
    if arguments.command == "coverage":
        cover(arguments.tests, arguments.cases)
    elif arguments.command == "run":
        mutants = (mutant for mutant in sample(arguments.number) if mutant.module.startswith(arguments.part))
        run(mutants, results, arguments.limit, arguments.seconds)
    else:
        print(report(read_results(results)))


if __name__ == "__main__":
    main()
