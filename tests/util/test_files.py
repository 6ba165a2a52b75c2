"""Atomic replacement of files: permissions, links, and leftovers of killed writers."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from token_recycling._util.files import cache_folder, replacing, replacing_folder


def write(path, text="new"):
    with replacing(path) as temporary:
        Path(temporary).write_text(text)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("kept", [0o600, 0o664, 0o444])
def test_replaced_file_keeps_its_permissions(tmp_path, umask, kept):
    path = tmp_path / "file"
    path.touch()
    path.chmod(kept)
    write(path)
    assert (path.read_text(), mode(path)) == ("new", kept)


def test_new_file_has_default_permissions_and_the_umask_is_not_changed(tmp_path, umask, monkeypatch):
    """A changed umask would apply to files of other threads."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
        write(tmp_path / "file")
    assert mode(tmp_path / "file") == 0o640


def test_full_disk_is_reported_with_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised, replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    assert not os.listdir(tmp_path)


def test_target_of_a_link_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    link.symlink_to(Path("elsewhere") / "file")
    for text in ("made", "replaced"):
        write(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "link"]
    assert os.listdir(target.parent) == ["file"]


def test_folder_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """Its files are flushed before the folder replaces the old one."""
    flushed, flush = [], os.fsync

    def flush_before(number):
        assert not (tmp_path / "folder" / name).exists()
        flushed.append(os.fstat(number).st_ino)
        flush(number)

    monkeypatch.setattr(os, "fsync", flush_before)
    for name in ("old", "new"):
        with replacing_folder(tmp_path / "folder") as temporary:
            (temporary / name).write_text(name)
        assert flushed[-1] == (tmp_path / "folder" / name).stat().st_ino
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["new"]


def test_cache_is_in_the_first_folder_that_is_named(monkeypatch):
    """An empty variable names none."""
    wanted = {("a", "b"): Path("a"), ("", "b"): Path("b/token_recycling"), ("", ""): Path("~/.cache/token_recycling")}
    for (own, general), folder in wanted.items():
        monkeypatch.setenv("TOKEN_RECYCLING_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", general)
        assert cache_folder() == folder.expanduser()


KILLED = """
import os, signal, sys
from pathlib import Path
from token_recycling._util.files import replacing
with replacing(sys.argv[1]) as temporary:
    Path(temporary).write_text("half")
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    """Another process that is about to replace a file, and continues when its input ends."""
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "file")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


def test_leftovers_of_a_killed_writer_are_removed_by_the_next(tmp_path, writer):
    write(tmp_path / "file")
    assert len(os.listdir(tmp_path)) == 2  # the other writer is alive
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    write(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "new"


def test_files_of_a_living_writer_are_kept(tmp_path, writer):
    write(tmp_path / "file")
    writer.communicate()
    assert writer.returncode == 0
    assert (tmp_path / "file").read_text() == "half"
    assert os.listdir(tmp_path) == ["file"]


def test_leftovers_without_a_lock_are_removed_and_links_are_not_followed(tmp_path):
    (tmp_path / ".token_recycling.abc").mkdir()
    write(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / ".token_recycling.abc").mkdir()
    (tmp_path / ".token_recycling.abc" / "writer").symlink_to(tmp_path / "other")
    write(tmp_path / "file")
    assert not (tmp_path / "other").exists()


OFTEN = """
import sys
from pathlib import Path
from token_recycling._util.files import replacing
for _ in range(50):
    with replacing(sys.argv[1]) as temporary:
        Path(temporary).write_text(sys.argv[2] * 1000)
"""


def test_concurrent_writers_do_not_interfere(tmp_path):
    """Two threads of one process and two other processes."""
    path = tmp_path / "file"
    write(path, "a" * 1000)
    others = [subprocess.Popen([sys.executable, "-c", OFTEN, str(path), text]) for text in "ab"]
    threads = [
        threading.Thread(target=lambda text=text: [write(path, text * 1000) for _ in range(50)]) for text in "cd"
    ]
    for thread in threads:
        thread.start()
    while any(other.poll() is None for other in others) or any(thread.is_alive() for thread in threads):
        assert path.read_text() in {text * 1000 for text in "abcd"}
    assert [other.returncode for other in others] == [0, 0]
    assert os.listdir(tmp_path) == ["file"]


def test_files_are_replaced_without_support_for_locks(tmp_path, monkeypatch):
    (tmp_path / ".token_recycling.abc").mkdir()

    def acquire(self):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(FileLock, "_acquire", acquire)
    write(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == [".token_recycling.abc", "file"]
