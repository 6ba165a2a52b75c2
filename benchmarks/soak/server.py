"""The server under test: a process of its own on a loopback address, started, killed and watched."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
_START = 120.0
"""Seconds in which it must answer."""


@dataclass
class Sample:
    """What the process held at a time."""

    at: float
    life: int
    """Which start of the server it was, counted from 0."""
    memory: float
    """Megabytes, resident."""
    descriptors: int
    threads: int


class Server:
    """`token-recycling serve`; every start is another life of it, at the same address."""

    def __init__(self, model: str, folder: Path, keys: dict[str, str], options: list[str]) -> None:
        """`folder`: of the matrix, the keys and the log."""
        self.model, self.folder, self.keys, self._options = model, folder, keys, options
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        self.url, self.life, self.samples = f"http://{HOST}:{self.port}", -1, list[Sample]()
        self.matrix, self.log = folder / "matrices" / "learned.matrix", folder / "server.log"
        self.matrix.parent.mkdir(parents=True, exist_ok=True)
        self._key_file = folder / "keys"
        self._key_file.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()), encoding="utf-8")
        self._key_file.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, jumping_clock: bool = False) -> None:
        """Starts it and waits until it answers."""
        program = "benchmarks.soak.clock" if jumping_clock else "token_recycling"
        where = ["--host", HOST, "--port", str(self.port), "--matrix", str(self.matrix)]
        named = ["--name", self.model, "--api-key-file", str(self._key_file)]
        command = [sys.executable, "-m", program, "serve", self.model, *where, *named]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        self.life += 1
        end = time.monotonic() + _START
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"expected the server to start, see {self.log}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Whether /health does."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{self.url}/health", timeout=10).status == 200
        return False

    def end(self, how: signal.Signals, seconds: float = 60.0) -> int:
        """Sends a signal; its exit status. Raises TimeoutExpired."""
        assert self._process is not None
        self._process.send_signal(how)
        return self._process.wait(seconds)

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self, until: threading.Event) -> None:
        """Takes a sample every half second."""
        began = time.monotonic()
        while not until.wait(0.5):
            if self._process is None or not self.runs:
                continue
            with contextlib.suppress(OSError, IndexError, ValueError):  # it may be killed meanwhile
                here = Path("/proc") / str(self._process.pid)
                memory = int((here / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
                found = len(os.listdir(here / "fd")), len(os.listdir(here / "task"))
                self.samples.append(Sample(time.monotonic() - began, self.life, memory, *found))
