"""Compiled functions: what is said and counted when one is compiled, and when one that was kept is taken."""

import importlib.util
import logging
from pathlib import Path
from shutil import copytree

import numba
import pytest
from numba.core import caching

import token_recycling
from token_recycling._util import compiled

PACKAGE = Path(token_recycling.__file__).parent
SOURCE = """
from token_recycling._util.compiled import compiled, compiled_part

@compiled_part
def more(number):
    return number + 1

@compiled
def twice(number):
    return 2 * more(number)
"""


@pytest.fixture
def said(tmp_path, monkeypatch, caplog):
    """What a new process would say: the messages since the last call."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiled._Compiling, "keeps", True)
    caplog.set_level(logging.WARNING, logger="token_recycling")

    def messages():
        monkeypatch.setattr(compiled, "_said", False)
        found = [record.message for record in caplog.records]
        caplog.clear()
        return found

    messages()
    return messages


def imported(path):
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("loops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compiling_is_said_and_counted_once_and_what_was_kept_is_taken_in_silence(tmp_path, said):
    before, loops = compiled.compiling.seconds, imported(tmp_path / "loops.py")
    assert (loops.twice(3), loops.twice(3.5)) == (8, 9.0)
    assert compiled.compiling.seconds > before
    (message,) = said()
    assert "once on this machine" in message
    before, again = compiled.compiling.seconds, imported(tmp_path / "loops.py")
    assert again.twice(3) == 8
    assert (said(), compiled.compiling.seconds) == ([], before)


def test_where_nothing_can_be_kept_it_is_said_what_to_do(tmp_path, said, monkeypatch):
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert imported(tmp_path / "loops.py").twice(3) == 8
    (message,) = said()
    assert "in every process" in message
    assert "NUMBA_CACHE_DIR" in message


def test_after_an_upgrade_in_place_all_are_compiled_anew(tmp_path, said, monkeypatch):
    """Whatever was kept before is not even read: here it could not be."""
    imported(tmp_path / "loops.py").twice(3)
    for index in (tmp_path / "kept").rglob("*.nbi"):
        index.write_bytes(b"names a class that is gone")
    said()
    monkeypatch.setattr(compiled, "_SOURCES", "another")
    assert imported(tmp_path / "loops.py").twice(3) == 8
    assert len(said()) == 1


@pytest.mark.parametrize("changed", ["recycling/calibration.py", "costs.py", "_util/compiled.py"])
def test_every_source_of_a_loop_tells_one_version_from_another(changed, tmp_path, monkeypatch):
    copytree(PACKAGE, tmp_path / "copy", ignore=lambda *_: ["__pycache__"])
    monkeypatch.setattr(compiled, "_PACKAGE", tmp_path / "copy")
    assert compiled._digest() == compiled._SOURCES
    with open(tmp_path / "copy" / changed, "a") as file:
        file.write("# changed\n")
    assert compiled._digest() != compiled._SOURCES
