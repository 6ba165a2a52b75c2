"""One of two processes of test_tensor_parallel.py, started by torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from token_recycling import accelerate

DRAFTERS = ("recycling", "fuse:recycling(tree=8)+suffix", "recycling:tree=paper")
"""The first two depend on measured times."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, distributed_config=plan).eval()
    wanted = torch.load(folder / "wanted.pt")
    if torch.distributed.get_rank():  # the clock of this process runs 50 times as fast
        own_clock = time.perf_counter
        time.perf_counter = lambda: 50 * own_clock()
    texts = {}
    for drafter in DRAFTERS:
        accelerate(model, drafter)
        texts[drafter] = [model.generate(ids, max_new_tokens=24, do_sample=False) for ids in wanted["prompts"]]
    weight = model.model.layers[0].mlp.up_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    found = {
        "texts": texts,
        "mat": model.acceleration.total.mat,
        "sharded": local.shape[0] == model.config.intermediate_size // 2,
    }
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
