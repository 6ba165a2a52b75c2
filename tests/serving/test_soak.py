"""The server as a process under load: killed with SIGKILL, with a full disk, and ended with SIGTERM.

Every answer must equal the output of `generate`, and matrix files must be complete at all times.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
import torch
from support import http
from support.commandline import reference
from support.serving import wait_for

from token_recycling._util.text_stream import decoded
from token_recycling.recycling.matrix_file import read_matrix_file

ROOT = Path(__file__).parents[2]
PROMPTS = ["def main():", "import os", "for index in range(10):", "class Reader:", "return a + b", "x = 1"]
CLIENTS, NEW = 4, 24


class ServerProcess:
    """A server process."""

    def __init__(self, model: str, matrix: Path, log: Path, full_disk: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options = ["--port", str(self.port), "--matrix", str(matrix), "--save-every", "0.2", "--concurrency", "2"]

        def write_nothing_more() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))

        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (Path(os.devnull) if full_disk else log).open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "token_recycling", "serve", model, "--name", "tiny", *options],
                env=environment,
                stdout=said,
                stderr=said,
                preexec_fn=write_nothing_more if full_disk else None,
            )
        end = time.monotonic() + 180
        while not self.answers():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)

    def get(self, path: str) -> str:
        return http.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).text

    def answers(self) -> bool:
        with suppress(httpx2.TransportError):
            return bool(self.get("/health"))
        return False

    def completed(self, prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
        answer = http.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=60)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@contextmanager
def load(server: ServerProcess, wanted: dict[str, str]):
    """Run clients until the block ends; yield the number of right answers so far. A wrong answer fails the test."""
    stopped, wrong, good = threading.Event(), [], [0]

    def client(number: int) -> None:
        place = number
        while not stopped.is_set():
            prompt = PROMPTS[place % len(PROMPTS)]
            place += 1
            try:
                said = server.completed(prompt)
            except (httpx2.HTTPError, ValueError):  # the server ended
                continue
            if said == wanted[prompt]:
                good[0] += 1
            else:
                wrong.append((prompt, said, wanted[prompt]))

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield good
        finally:
            stopped.set()
    for one in running:
        one.result()
    assert wrong == []


def wait_for_more(good: list[int], more: int = 12) -> None:
    wanted = good[0] + more
    wait_for(lambda: good[0] >= wanted, 120)


@pytest.fixture
def start(tiny_model_dir, tmp_path):
    """Start server processes; none outlives the test."""
    servers: list[ServerProcess] = []

    def start(full_disk: bool = False) -> ServerProcess:
        servers.append(ServerProcess(tiny_model_dir, tmp_path / "learned.matrix", tmp_path / "log", full_disk))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.mark.nightly
def test_outputs_and_files_survive_load_kills_and_a_full_disk(start, loaded, tmp_path):
    torch.set_num_threads(1)
    wanted = {
        prompt: decoded(loaded.tokenizer, reference(loaded, prompt, max_new_tokens=NEW, do_sample=False))
        for prompt in PROMPTS
    }
    matrix, log = tmp_path / "learned.matrix", tmp_path / "log"

    server = start()
    with load(server, wanted) as good:
        wait_for_more(good)
        wait_for(matrix.exists)
        server.end(signal.SIGKILL)
    before = read_matrix_file(matrix)[1]

    server = start(full_disk=True)
    with load(server, wanted) as good:
        failed = re.compile(r'matrix_saves_total\{outcome="failed"\} [1-9]')
        wait_for(lambda: failed.search(server.get("/metrics")), 120)
        wait_for_more(good)
        server.end(signal.SIGKILL)
    assert read_matrix_file(matrix)[1] == before

    server = start()
    with load(server, wanted) as good:
        wait_for_more(good)
        status = server.end(signal.SIGTERM)
    assert status in (0, -signal.SIGTERM), log.read_text()
    read_matrix_file(matrix)
