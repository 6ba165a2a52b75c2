"""Steps on a card that is played: `card_*.py`, in processes of their own, since torch cannot forget such a device."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import thinned

HERE = Path(__file__).parent
RUNS = [("card_ordinary.py", "running_batch or seeded_sampled"), ("card_ordinary.py", ""), ("card_captured.py", "")]
"""The crossings of a step in every run; nightly all of eager and captured steps."""


@pytest.mark.parametrize(("file", "names"), thinned(RUNS))
def test_steps_on_a_card(file, names, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-k", names, HERE / file]
    found = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout
