"""Runs the core tests with releases of Python, torch and transformers, and writes the table of docs/versions.md.

    python -m benchmarks.versions                 # all of them: `make test-versions`
    python -m benchmarks.versions --only lowest   # one, without the table: `make test-lowest`

Each environment is a folder `.venv-versions-NAME`, which is used again. It is not every combination: each release that
is named stands in one. Cost: two to four minutes for each release of transformers, and once the download of torch: 3 GB
where the index has no CPU build of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
_BEGIN, _END = "<!-- made by `make test-versions` -->\n", "<!-- end -->\n"
_TESTS = ("pytest", "pytest-xdist", "hypothesis", "scipy")
_SAY = "import sys, torch, transformers as t; print(sys.version.split()[0], torch.__version__, t.__version__)"


@dataclass(frozen=True)
class Environment:
    """Releases that are tried together; several of transformers one after the other."""

    name: str
    python: str
    torch: str
    transformers: tuple[str, ...]
    lowest: bool = False
    """Whether everything else is of the lowest release too."""

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-versions-{self.name}"


ENVIRONMENTS = (
    Environment("lowest", "3.11", "2.9.0", ("5.10.1",), lowest=True),
    Environment("middle", "3.12", "2.11.0", ("5.16.1",)),
    Environment("newest", "3.13", "2.15.0", ("5.23.0",)),
    Environment("others", "3.11", "2.13.0", ("5.13.1", "5.14.1", "5.22.2", "5.24.0")),
)


@dataclass(frozen=True)
class Row:
    """What one run of the tests gave."""

    python: str
    torch: str
    transformers: str
    result: str
    skipped: str = ""
    failed: bool = False


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [sys.executable, shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}.*/bin/python"))]
    wanted = ["-c", f"import sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"]
    return next(
        (str(one) for one in found if one and not subprocess.run([one, *wanted], capture_output=True).returncode), None
    )


def prepare(environment: Environment, python: str) -> str:
    """Makes the environment or uses it again; returns its Python."""
    own = str(environment.folder / "bin" / "python")
    if not (environment.folder / ".ready").exists():
        _call(python, "-m", "venv", "--clear", str(environment.folder))
        given = ["--constraint", str(ROOT / "constraints-lowest.txt")] if environment.lowest else []
        wanted = [f"torch=={environment.torch}", f"transformers=={environment.transformers[0]}"]
        _pip(own, *given, *wanted, *_TESTS, "--editable", f"{ROOT}[serving]")
        (environment.folder / ".ready").touch()
    return own


def run(environment: Environment, jobs: int) -> list[Row]:
    """The core tests with each release of transformers in an environment."""
    python = interpreter(environment.python) or (sys.executable if environment.lowest else None)
    if python is None:
        reason = f"not run: no Python {environment.python} on this machine"
        return [Row(environment.python, environment.torch, one, reason) for one in environment.transformers]
    own = prepare(environment, python)
    rows = []
    for release in environment.transformers:
        _pip(own, f"transformers=={release}")
        found = subprocess.run([own, "-c", _SAY], capture_output=True, text=True, check=True).stdout.split()
        print(f"{environment.name}: Python {found[0]}, torch {found[1]}, transformers {found[2]}", flush=True)
        chosen = ["-m", "core and not nightly", "-rs", f"--numprocesses={jobs}", "-W", "ignore"]
        tests = [own, "-m", "pytest", *chosen, *core_files()]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, env=one_thread)
        print(done.stdout[-6000:] if done.returncode else "\n".join(done.stdout.splitlines()[-12:]), flush=True)
        rows.append(Row(*found, *_read(done.stdout), failed=done.returncode != 0))
    return rows


def core_files() -> list[str]:
    """The files with core tests. The others import what is not in these environments."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.core" in file.read_text(encoding="utf-8")]


def _read(output: str) -> tuple[str, str]:
    """How many tests passed, and how many were skipped, from the output of pytest."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output.splitlines()[-1])
    by_kind = {kind: number for number, kind in found}
    result = ", ".join(f"{number} {kind}" for kind, number in by_kind.items() if kind != "skipped")
    return result, by_kind.get("skipped", "0")


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| Python | torch | transformers | core tests | skipped |", "|---|---|---|---|---|"]
    lines += [f"| {row.python} | {row.torch} | {row.transformers} | {row.result} | {row.skipped} |" for row in rows]
    return "\n".join(lines) + "\n"


def write(rows: list[Row]) -> None:
    """Puts the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{table(rows)}\n{_END}{after}", encoding="utf-8")


def _pip(python: str, *wanted: str) -> None:
    _call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)


def _call(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[one.name for one in ENVIRONMENTS], help="one environment, and no table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of pytest")
    given = parser.parse_args()
    chosen = [one for one in ENVIRONMENTS if given.only in (None, one.name)]
    rows = [row for environment in chosen for row in run(environment, given.jobs)]
    print(table(rows))
    if given.only is None:
        write(rows)
    sys.exit(any(row.failed for row in rows))


if __name__ == "__main__":
    main()
