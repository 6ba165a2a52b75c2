"""Steps on a simulated card: runs `card_*.py` in separate processes, since torch cannot unregister such a device."""

import multiprocessing
import sys
from pathlib import Path

import pytest
from support.cases import thinned

HERE = Path(__file__).parent
RUNS = [
    ("card_ordinary.py", "running_batch or seeded_sampled or waits"),
    ("card_ordinary.py", ""),
    ("card_captured.py", ""),
]
"""Every run counts the copies of a step; nightly runs test all of eager and captured steps."""
START = "fork" if sys.platform == "linux" else "spawn"
"""A forked process need not import torch and transformers, which takes longer than the tests."""


@pytest.mark.parametrize(("file", "names"), thinned(RUNS))
def test_steps_on_a_card(file, names):
    # The watchdog thread of faulthandler does not exist in a forked process, which would wait for it forever.
    command = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=short", "-k", names, str(HERE / file)]
    with multiprocessing.get_context(START).Pool(1) as pool:
        assert pool.apply_async(pytest.main, (command,)).get(600) == 0
