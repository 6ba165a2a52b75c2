"""Steps on a card that is played: `card_*.py`, in processes of their own, since torch cannot forget such a device."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNS = [
    pytest.param("card_ordinary.py", "running_batch or seeded", id="crossings of a step"),
    pytest.param("card_ordinary.py", "", id="eager steps", marks=pytest.mark.nightly),
    pytest.param("card_captured.py", "", id="captured steps", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("file", "names"), RUNS)
def test_steps_on_a_card(file, names, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-k", names, HERE / file]
    found = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
