import gc
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NIGHTLY = ("browser", "cuda", "ecosystem")
"""Folders whose tests run only in `make test-all`, like tests with the marker `nightly`."""


def pytest_addoption(parser):
    parser.addoption(
        "--device", help="device of tests/cuda: cuda, or cpu to check that they run (default: as available)"
    )


def pytest_configure(config):
    """Load the fixtures, except in a process that only distributes tests: torch and transformers take seconds."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_ignore_collect(collection_path, config):
    """Skip folders of nightly tests, without importing them, if all nightly tests are excluded."""
    left_out = config.option.markexpr.endswith("and not nightly")
    return True if left_out and any(collection_path.is_relative_to(HERE / name) for name in NIGHTLY) else None


def pytest_collection_finish():
    """Enable garbage collection, which ignores imported objects: traversing them takes seconds."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(HERE).parts[0] in NIGHTLY:
            item.add_marker("nightly")
