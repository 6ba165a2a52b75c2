"""Compiles grammars in processes of their own, each with limits of processor time and memory.

A schema of a kilobyte can ask for hours and for all memory there is. So one process waits with xgrammar imported, and
forks for each request: the child has two seconds of processor time and a gigabyte, which the kernel holds it to, and
ends with its request. What it compiled comes back as JSON. Cost: some ten milliseconds a grammar; the first one waits
for the process to start.

    python -m token_recycling.serving.compiling     is that process; its standard input is the socket that asks it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SECONDS, BYTES = 2, 1_000_000_000
"""Processor time and memory of one grammar."""
_MOST = 32_000_000
"""Bytes of a compiled grammar: it must be read here in a moment."""
_PATIENCE = 120.0
"""Seconds that one grammar may take in all: on a busy machine its processor time comes slowly."""
_LENGTH = struct.Struct("!q")


class TooDearError(ValueError):
    """A grammar that takes more than it may."""


class CompilingProcess:
    """The process that forks for each grammar; it is started with the first one, and again if it has ended."""

    def __init__(self, tokenizer: Callable[[], str]) -> None:
        """`tokenizer` gives xgrammar's description of the tokenizer, as JSON."""
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._asking: socket.socket | None = None
        self._starting = threading.Lock()

    async def compiled(self, form: Sequence[Any], gone: Callable[[], bool] = lambda: False) -> str:
        """The compiled grammar, as xgrammar writes it in JSON. `form` as `hf.forms.compiled` takes it; `gone`
        says that nobody waits any more. Raises ValueError for a form that is none, TooDearError, asyncio.CancelledError
        where nobody waits.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.to_thread(self._ask, theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        child = 0
        try:
            request = json.dumps(form).encode()
            writer.write(_LENGTH.pack(len(request)) + request)
            (child,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            reply = asyncio.create_task(_read(reader))
            for _ in range(int(_PATIENCE / 0.1)):
                if (await asyncio.wait({reply}, timeout=0.1))[0] or gone():
                    break
            if not reply.done():
                reply.cancel()
                if gone():
                    raise asyncio.CancelledError
                raise TooDearError
            told = reply.result()
            child = 0
        except (asyncio.IncompleteReadError, ConnectionError):
            raise TooDearError from None
        finally:
            if child:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            writer.close()
        if not told:
            raise TooDearError
        if told[:1] == b"-":
            raise ValueError(told[1:].decode())
        return told[1:].decode()

    def _ask(self, connection: socket.socket) -> None:
        """Pass a connection to the process, by which it is told what to compile."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                asking, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs.fileno())
                description = self._tokenizer().encode()
                asking.sendall(_LENGTH.pack(len(description)) + description)
                self._asking = asking
            assert self._asking is not None
            socket.send_fds(self._asking, [b"."], [connection.fileno()])

    def close(self) -> None:
        """End the process; may be called again."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


async def _read(reader: asyncio.StreamReader) -> bytes:
    parts, total = [], 0
    while part := await reader.read(1 << 20):
        parts.append(part)
        total += len(part)
        if total > _MOST:
            raise TooDearError
    return b"".join(parts)


def _main() -> None:
    """Fork for each connection that comes by the standard input."""
    import xgrammar

    from ..hf.forms import compiled

    asked = socket.socket(fileno=os.dup(0))
    known = xgrammar.TokenizerInfo.deserialize_json(_received(asked).decode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (received := socket.recv_fds(asked, 1, 1))[0]:
        (connection,) = received[1]
        if os.fork() == 0:
            asked.close()
            try:
                _child(socket.socket(fileno=connection), known, compiled)
            finally:
                os._exit(0)
        os.close(connection)


def _received(connection: socket.socket) -> bytes:
    """The next message, and no byte more: a connection may come with the one behind it."""
    (length,) = _LENGTH.unpack(connection.recv(_LENGTH.size, socket.MSG_WAITALL))
    parts = []
    while length:
        parts.append(connection.recv(min(length, 1 << 20), socket.MSG_WAITALL))
        length -= len(parts[-1])
    return b"".join(parts)


def _child(connection: socket.socket, known: Any, compiled: Callable[..., Any]) -> None:
    """Compile one grammar, within the limits."""
    import resource

    import xgrammar

    if sys.platform == "linux":  # elsewhere no limit counts what is added alone
        held = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, held + BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    connection.sendall(_LENGTH.pack(os.getpid()))
    try:
        form = json.loads(_received(connection))
        grammar = compiled(xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False), *form)
        # Where no mask can be made in this time, no text can be either.
        xgrammar.GrammarMatcher(grammar).fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, known.vocab_size))
        connection.sendall(b"+" + grammar.serialize_json().encode())
    except MemoryError:
        os._exit(1)
    except Exception as error:
        connection.sendall(b"-" + str(error).encode())


if __name__ == "__main__":
    _main()
