"""What happens to the server and its machine, one thing after another."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from token_recycling.recycling.matrix_file import read_matrix_file

from .server import Server

_DISK = "size=48m"


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """A small file system in memory at `folder`, if this user may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(folder)], capture_output=True
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Faults:
    """Lets them happen in turn, and says what was wrong afterwards."""

    def __init__(self, server: Server, disturbed: threading.Event, mounted: bool) -> None:
        self.server, self._disturbed, self.mounted = server, disturbed, mounted
        self.happened: list[str] = []
        self.wrong: list[str] = []
        own: list[Callable[[], None]] = [self.killed, self.terminated, self.jumping_clock]
        self._faults = own + ([self.disk_full, self.read_only] if mounted else [])

    def run(self, every: float, over: threading.Event) -> None:
        """One after another, until it is over."""
        number = 0
        while not over.wait(every):
            fault = self._faults[number % len(self._faults)]
            number += 1
            try:
                fault()
            except Exception as error:
                self.wrong.append(f"{fault.__name__}: {type(error).__name__}: {error}")
                over.set()
                return
            self.happened.append(fault.__name__)
            self.check_matrices()

    def check_matrices(self) -> None:
        """Every file that stands there must be whole."""
        for file in [self.server.matrix, *Path(f"{self.server.matrix}.keys").glob("[!.]*")]:
            try:
                read_matrix_file(file)
            except FileNotFoundError:
                continue
            except ValueError as error:
                self.wrong.append(f"after {self.happened[-1:]}: {error}")

    @contextmanager
    def _ending(self) -> Iterator[None]:
        self._disturbed.set()
        try:
            yield
        finally:
            time.sleep(1)  # until whoever was cut off has noticed
            self._disturbed.clear()

    def killed(self) -> None:
        """kill -9 and another start."""
        with self._ending():
            self.server.end(signal.SIGKILL)
            self.server.start()

    def terminated(self) -> None:
        """SIGTERM while texts are streamed: it ends within its grace, and well."""
        with self._ending():
            status = self.server.end(signal.SIGTERM)
            if status not in (0, -signal.SIGTERM):
                self.wrong.append(f"expected exit status 0 after SIGTERM, got {status}")
            self.server.start()

    def jumping_clock(self) -> None:
        """The next life has a clock that jumps by up to a day."""
        with self._ending():
            self.server.end(signal.SIGTERM)
            self.server.start(jumping_clock=True)

    def disk_full(self) -> None:
        """Nothing can be saved for ten seconds; it must answer on."""
        filler = self.server.matrix.parent / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self._answers_on(10)
        filler.unlink()

    def read_only(self) -> None:
        """The same with a file system that cannot be written."""
        folder = str(self.server.matrix.parent)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        self._answers_on(10)
        subprocess.run(["mount", "-o", f"remount,rw,{_DISK}", folder], check=True)

    def _answers_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.server.answers():
                self.wrong.append("expected /health to answer while nothing could be saved, got nothing")
            time.sleep(0.5)
