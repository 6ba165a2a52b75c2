"""Trials of grammars: whether one compiles within limits of processor time and memory.

A schema of a kilobyte can ask for hours and for all memory there is. So one process waits with xgrammar imported and
forks for each trial; the kernel holds the child to its limits. A grammar that passes is compiled once more by the
server (`grammars`): between processes it could be passed only as JSON, which for an object with 300 optional properties
takes 45 MB and far longer than the 0.1 s in which it compiles. Children have a low priority, so that decoding does not
wait for them. Cost: some ten milliseconds a grammar; the first one waits until xgrammar is imported, some seconds.

    python -m token_recycling.serving.compiling     is that process; its standard input is the socket that asks it

It is not multiprocessing's forkserver, since that imports the user's main module again, which a script that serves at
its top level does not survive, and would read the tokenizer again in every child.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BYTES = 250_000_000
"""Memory that a trial may add to that of its process."""
_PATIENCE = 120.0
"""Seconds that a trial may take in total: on a busy machine its processor time comes slowly."""


class TooExpensiveError(ValueError):
    """A grammar that takes more processor time or memory than it may."""


class GoneError(Exception):
    """The client that asked for a grammar has disconnected."""


class Trials:
    """The process that forks for each trial; it is started with the first one, and again if it has ended."""

    def __init__(self, tokenizer: Callable[[], str], seconds: float) -> None:
        """`tokenizer` gives xgrammar's description of the tokenizer, as JSON; `seconds`: processor time of a trial."""
        self._tokenizer, self._seconds = tokenizer, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._starting = threading.Lock()

    def check(self, form: Sequence[Any], gone: Callable[[], bool] = lambda: False) -> None:
        """Compile a form, as `hf.forms.compiled` takes it, on trial; any number of threads may wait for theirs.

        Raises ValueError for a form that cannot be compiled or has no output but the empty one, TooExpensiveError,
        TimeoutError where the machine is too busy, GoneError once `gone`.
        """
        ours, theirs = Pipe()
        with ours:
            with theirs:
                self._hand_over(theirs)
            child, until = None, time.monotonic() + _PATIENCE
            try:
                ours.send_bytes(json.dumps([self._seconds, form]).encode())
                child = int(ours.recv_bytes())
                while not ours.poll(0.1):
                    if gone():
                        raise GoneError
                    if time.monotonic() > until:
                        raise TimeoutError(f"the grammar was not compiled within {_PATIENCE:g} s")
                child, said = None, ours.recv_bytes().decode()
            except (EOFError, ConnectionError):
                child = None
                raise TooExpensiveError from None
            finally:
                if child is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
        if said:
            raise ValueError(said)

    def _hand_over(self, connection: Connection) -> None:
        """Pass the process a connection, by which it learns what to compile."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                description = self._tokenizer().encode()
                control, theirs = Pipe()
                with theirs:
                    self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs.fileno())
                control.send_bytes(description)
                self._control = control
            assert self._control is not None
            reduction.send_handle(self._control, connection.fileno(), self._process.pid)

    def close(self) -> None:
        """End the process; may be called again."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def _main() -> None:
    """Fork for each connection that comes by the standard input."""
    import xgrammar

    from ..hf import forms  # noqa: F401  # imported once, for all children

    control = Connection(os.dup(0))
    known = xgrammar.TokenizerInfo.deserialize_json(control.recv_bytes().decode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            handle = reduction.recv_handle(control)
            if os.fork() == 0:
                control.close()
                try:
                    _child(Connection(handle), known)
                finally:
                    os._exit(0)
            os.close(handle)


def _child(connection: Connection, known: Any) -> None:
    """Compile one grammar, within the limits; answers with what is wrong with it, nothing if it is good."""
    import resource

    import xgrammar

    from ..hf.forms import check_output, compiled

    seconds, form = json.loads(connection.recv_bytes())
    os.nice(19)
    if sys.platform == "linux":  # elsewhere no limit counts added memory
        held = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, held + BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
    connection.send_bytes(str(os.getpid()).encode())
    try:
        grammar = compiled(xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False), *form)
        check_output(grammar, form[0])  # where no mask can be made in this time, no text can be either
        connection.send_bytes(b"")
    except MemoryError:
        return
    except Exception as error:
        connection.send_bytes(str(error).encode())


if __name__ == "__main__":
    _main()
