"""A server that is killed: run by test_serving_saving.py as `serving_worker.py FOLDER TIMES`.

Each time a process is forked that serves and saves as often as it can, is kept busy, and is killed at a random moment.
Afterwards the file must be readable. Forking saves the seconds that importing torch takes.
"""

import os
import random
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import tiny
import torch
import uvicorn
from serving import matrix_path, speaking_llama

from token_recycling.matrixfile import read_matrix_file
from token_recycling.serving import create_app

BODY = b'{"prompt": "import os", "max_tokens": 64, "temperature": 1.5}'


def serve(folder: Path, listener: socket.socket) -> None:
    torch.set_num_threads(1)
    settings = {"matrix": matrix_path(folder), "save_every": 0.001, "drafter": "recycling:tree=4,memory=4"}
    app = create_app(speaking_llama(), tiny.tokenizer(), **settings)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def ask(port: int) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", BODY, headers)
    urllib.request.urlopen(request, timeout=30).read()


def main(folder: Path, times: int) -> None:
    draws = random.Random(0)
    for _ in range(times):
        listener = socket.create_server(("127.0.0.1", 0))
        child = os.fork()
        if not child:
            serve(folder, listener)
            os._exit(0)
        port = listener.getsockname()[1]
        listener.close()
        ask(port)
        end = time.monotonic() + draws.uniform(0.0, 0.4)
        while time.monotonic() < end:
            ask(port)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tensors, _ = read_matrix_file(matrix_path(folder))
        print("rows", int(tensors["shares"].any(dim=1).sum()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
