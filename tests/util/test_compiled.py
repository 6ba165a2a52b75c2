"""Compiled functions: messages and times of compilation, and reuse of cached machine code."""

import gc
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
def messages_of_new_process(tmp_path, monkeypatch, caplog):
    """Return a function that gives the messages of a new process since the last call."""
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


def import_loops(path):
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("loops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_disabled_compilation_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT"):
        import_loops(tmp_path / "loops.py")


def test_compilation_is_reported_and_timed_once_and_cached_code_is_silent(tmp_path, messages_of_new_process):
    before, loops = compiled.compiling.seconds, import_loops(tmp_path / "loops.py")
    assert (loops.twice(3), loops.twice(3.5)) == (8, 9.0)
    assert compiled.compiling.seconds > before
    assert gc.isenabled(), "as before"
    (message,) = messages_of_new_process()
    assert "once on this machine" in message
    before, again = compiled.compiling.seconds, import_loops(tmp_path / "loops.py")
    assert again.twice(3) == 8
    assert (messages_of_new_process(), compiled.compiling.seconds) == ([], before)


def test_message_without_a_cache_names_the_remedy(tmp_path, messages_of_new_process, monkeypatch):
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    assert import_loops(tmp_path / "loops.py").twice(3) == 8
    (message,) = messages_of_new_process()
    assert "in every process" in message
    assert "NUMBA_CACHE_DIR" in message


def test_in_place_upgrade_recompiles_everything(tmp_path, messages_of_new_process, monkeypatch):
    """The old cache is not even read: here it is unreadable."""
    import_loops(tmp_path / "loops.py").twice(3)
    (index,) = (tmp_path / "kept").rglob("*.nbi")
    index.write_bytes(b"names a class that is gone")
    messages_of_new_process()
    monkeypatch.setattr(compiled, "_SOURCES", "another")
    assert import_loops(tmp_path / "loops.py").twice(3) == 8
    assert len(messages_of_new_process()) == 1


@pytest.mark.parametrize("changed", ["recycling/calibration.py", "costs.py", "_util/compiled.py"])
def test_digest_depends_on_every_compiled_source(changed, tmp_path, monkeypatch):
    copytree(PACKAGE, tmp_path / "copy", ignore=lambda *_: ["__pycache__"])
    monkeypatch.setattr(compiled, "_PACKAGE", tmp_path / "copy")
    assert compiled._digest() == compiled._SOURCES
    with open(tmp_path / "copy" / changed, "a") as file:
        file.write("# changed\n")
    assert compiled._digest() != compiled._SOURCES
