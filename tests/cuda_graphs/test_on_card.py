"""Steps on a card that is played: `card_*.py`, in processes of their own, since torch cannot forget such a device."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("card_*.py"))


@pytest.mark.parametrize(
    "cases",
    [pytest.param(path, id=path.stem, marks=pytest.mark.nightly) for path in CASES],
)
def test_steps_on_a_card(cases, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", cases]
    found = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
