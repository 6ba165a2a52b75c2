"""Tensor parallelism of transformers: two processes, each with half of every layer, generate the same tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import tiny

WORKER = Path(__file__).parents[1] / "support" / "tensor_parallel_worker.py"


@pytest.mark.nightly
def test_two_processes_equal_one(tmp_path):
    model = tiny.llama(seed=2)
    model.save_pretrained(tmp_path / "model")
    prompts = [tiny.prompt(seed, 4 + 3 * seed) for seed in range(4)]
    texts = [model.generate(ids, max_new_tokens=24, do_sample=False) for ids in prompts]
    torch.save({"prompts": prompts, "texts": texts}, tmp_path / "wanted.pt")
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # else support/http.py would shadow Python's own http
    command = [*launched, str(WORKER), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found["sharded"], "each process holds a part of the weights"
        assert found["mat"] > 1.3
        for ours in found["texts"].values():
            assert all(torch.equal(one, wanted) for one, wanted in zip(ours, texts, strict=True))
