import gc
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NIGHTLY = ("browser", "cuda", "ecosystem")
"""Folders whose tests are for `make test-all` alone; elsewhere the marker `nightly` says it."""


def pytest_addoption(parser):
    parser.addoption("--device", help="where tests/cuda run: cuda if there is a card, else cpu, which only tries them")


def pytest_configure(config):
    """Load the fixtures, but not in a process that only hands tests to others: torch and transformers take seconds."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_ignore_collect(collection_path, config):
    """Folders of nightly tests are not imported where all of these are left out."""
    left_out = config.option.markexpr.endswith("and not nightly")
    return True if left_out and any(collection_path.is_relative_to(HERE / name) for name in NIGHTLY) else None


def pytest_collection_finish():
    """Garbage is collected from here on, and none is looked for among what was imported, which takes seconds."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(HERE).parts[0] in NIGHTLY:
            item.add_marker("nightly")
