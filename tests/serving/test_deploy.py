"""What the server is deployed with: linted by the tools for it, and every option that is named exists."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commandline import run

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_unit_is_one(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "token-recycling.service"
    text = (DEPLOY / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/token-recycling/bin/token-recycling", sys.executable), encoding="utf-8")
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert not [line for line in found.stderr.splitlines() if unit.name in line], found.stderr


def test_the_dockerfile_is_one():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint")
    found = subprocess.run([hadolint, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert not found.stdout, found.stdout


def test_every_option_that_is_named_exists():
    known = run("serve", "--help").stdout
    for name in ("Dockerfile", "token-recycling.service"):
        text = "\n".join(
            line for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
        )
        serve = text[text.index("token-recycling serve" if "service" in name else '"serve"') :]
        options = set(re.findall(r"--[a-z][a-z-]+", serve))
        assert options
        for option in options:
            assert option in known, f"{name}: {option}"
