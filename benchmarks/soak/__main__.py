"""Runs the server under strain, minutes by default, and writes a page about it: `python -m benchmarks.soak`.

Clients of every kind send requests, on this machine alone; meanwhile it is killed, its disk is full, its clock jumps.
Ends after the given time, or the given number of requests. Exit status 1 if anything went wrong.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import transformers
import typer

from .clients import Clients
from .expected import TEMPLATE, Plain
from .faults import Faults, disk
from .planted import looked_for
from .report import Found, write
from .server import Server

ROOT = Path(__file__).parent.parent.parent
KEYS = {name: f"{name}-has-a-key-of-some-length" for name in ("ann", "bob", "cid")}
_SMALL = "recycling:tree=8,memory=1,past=16384"
"""A fixed tree: what is drafted does not depend on the machine."""


def main(
    page: Annotated[Path, typer.Option(help="the page; plots go into a folder beside it")] = Path("build/soak.md"),
    model: Annotated[Path, typer.Option(help="a local model folder")] = ROOT / "models" / "draft",
    minutes: Annotated[float, typer.Option(help="ends after so many minutes")] = 5.0,
    hours: Annotated[float, typer.Option(help="and so many hours")] = 0.0,
    requests: Annotated[int, typer.Option(help="ends after so many requests")] = 10_000,
    clients: Annotated[int, typer.Option(min=1, help="clients at once")] = 8,
    every: Annotated[float, typer.Option(help="seconds between two things that happen to the server")] = 20.0,
    options: Annotated[str, typer.Option(help="more options of token-recycling serve")] = "",
) -> None:
    """See the module."""
    transformers.utils.logging.disable_progress_bar()
    command = shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        found = run(
            Path(temporary), str(model), 60 * minutes + 3600 * hours, requests, clients, every, options, command
        )
    page.parent.mkdir(parents=True, exist_ok=True)
    write(found, page)
    print(page.read_text(encoding="utf-8"))
    raise typer.Exit(int(bool(found.failures)))


def run(
    folder: Path, model: str, seconds: float, requests: int, clients: int, every: float, options: str, command: str
) -> Found:
    """What was found."""
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    common = ["--chat-template", str(template), "--name", model, "--drafter", _SMALL, *shlex.split(options)]
    strained = [*common, "--save-every", "1", "--header-timeout", "2", "--body-timeout", "3", "--grace", "5"]
    plain = Plain(model, ROOT / "models" / "prompts")
    server = Server(model, folder / "strained", KEYS, strained)
    began, disturbed, watched = time.monotonic(), threading.Event(), threading.Event()
    with disk(server.matrix.parent) as mounted:
        server.start()
        threading.Thread(target=server.watch, args=(watched,), daemon=True).start()
        sent = Clients(server, plain, disturbed, requests)
        faults = Faults(server, disturbed, mounted)
        threads = [threading.Thread(target=sent.work, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        breaking = threading.Thread(target=faults.run, args=(every, sent.over))
        breaking.start()
        while time.monotonic() - began < seconds and len(sent.exchanges) < requests and not sent.over.wait(1):
            pass
        sent.over.set()
        for thread in (*threads, breaking):
            thread.join()
        watched.set()
        if server.runs:
            server.end(signal.SIGTERM)
        faults.check_matrices()
    pair = [Server(model, folder / side, KEYS, common) for side in ("planted", "other")]
    with contextlib.ExitStack() as ending:
        for one in pair:
            one.start()
            ending.callback(one.end, signal.SIGTERM)
        seen = looked_for(*pair)
    taken = (time.monotonic() - began) / 60
    size = server.log.stat().st_size / 1e6
    return Found(command, taken, sent.exchanges, server.samples, faults, seen, size)


if __name__ == "__main__":
    typer.run(main)
