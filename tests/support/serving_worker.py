"""Servers that are killed: run by test_serving_saving.py as `serving_worker.py FOLDER SERVERS SAVERS`.

Each process is forked and killed at a random moment, and the file must be readable then. The first ones serve requests
and save as often as they can; the others do nothing but save, as a server does, so that they are killed while writing.
Forking saves the seconds that importing torch takes.
"""

import contextlib
import os
import random
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn
from support import tiny
from support.serving import matrix_path, wait_for
from support.speaking import speaking_llama

from token_recycling.model.loading import Loaded
from token_recycling.recycling.matrix_file import read_matrix_file
from token_recycling.serving import create_app
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.settings import Isolation

BODY = b'{"prompt": "import os", "max_tokens": 64, "temperature": 1.5}'
SMALL, LARGE = "recycling:tree=4", "recycling:tree=4,memory=16"
"""Writing a large matrix takes longer than anything else."""
DRAWS = random.Random(0)


def serve(folder: Path, listener: socket.socket) -> None:
    torch.set_num_threads(1)
    settings = {"matrix": matrix_path(folder), "save_every": 0.001, "drafter": SMALL}
    app = create_app(speaking_llama(), tiny.tokenizer(), **settings)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def ask(port: int) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", BODY, headers)
    urllib.request.urlopen(request, timeout=30).read()


def save(drafters: DrafterPool) -> None:
    while True:
        with drafters.acquire(""):
            drafters.save()


def held(folder: Path) -> dict[str, int]:
    """The sizes of all files."""
    sizes = {}
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it may be gone again
            sizes[file.name] = file.stat().st_size
    return sizes


def forked(run: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if not child:
        run(*arguments)
        os._exit(0)
    return child


def killed(child: int, folder: Path, what: str, before: dict[str, int]) -> None:
    """Kills a process as soon as something is being written, or a few milliseconds later."""
    end = time.monotonic() + 5
    while held(folder) == before and time.monotonic() < end:
        time.sleep(0.0002)
    time.sleep(DRAWS.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    tensors, _ = read_matrix_file(matrix_path(folder))
    print(what, int(tensors["shares"].any(axis=1).sum()), flush=True)


def main(folder: Path, servers: int, savers: int) -> None:
    for _ in range(servers):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            child = forked(serve, folder, listener)
            port = listener.getsockname()[1]
        ask(port)
        wait_for(matrix_path(folder).exists, 30)
        before = held(folder)
        ask(port)
        killed(child, folder, "server", before)
    matrix_path(folder).unlink()
    drafters = DrafterPool(Loaded(speaking_llama(), tiny.tokenizer()), LARGE, Isolation.shared, matrix_path(folder))
    with drafters.acquire(""):
        drafters.save()
    for _ in range(savers):
        before = held(folder)
        killed(forked(save, drafters), folder, "saver", before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
