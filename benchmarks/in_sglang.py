"""What earlier outputs bring in SGLang, on the shipped model: MAT with and without them, `make bench-sglang`.

SGLang's kernels need a GPU. So this is its own worker with this package's drafts, around the STAND-INS of the tests for
forward pass, greedy acceptance and scheduler: trees and tokens a step are as there, and no time is given. The prompts
are decoded greedily one at a time, cold, and then all at once, as by `in_vllm`. Prints a JSON line each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.sglang_standins import Scheduler, stand_in, worker  # noqa: E402

from token_recycling.engines.replica import EngineOptions, Replica  # noqa: E402


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16, help="of a tree, the root included")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="number of prompts")
    arguments = parser.parse_args()
    stand_in()
    folder = ROOT / "models"
    model, tokenizer = (made.from_pretrained(folder / "target") for made in (AutoModelForCausalLM, AutoTokenizer))
    files = sorted((folder / "prompts").glob("*.py"))[: arguments.limit]
    prompts = [tokenizer(file.read_text()).input_ids for file in files]
    for past in (0, EngineOptions().past):
        recycler = Replica(model.config.vocab_size, arguments.nodes - 1, EngineOptions(past=past))
        found = {
            name: measure(model.float(), batches, recycler, arguments.max_new_tokens)
            for name, batches in (("one", [[prompt] for prompt in prompts]), ("all", [prompts]))
        }
        print(json.dumps({"past": past, **found}), flush=True)


def measure(model: Any, batches: list[list[list[int]]], recycler: Replica, tokens: int) -> dict[str, Any]:
    """MAT of the requests of all batches, the prompt's pass counted, and a digest of their texts."""
    passes, said = 0, []
    for batch in batches:
        scheduler = Scheduler(model, batch, recycler.nodes + 1, overlap=False)
        made = worker(scheduler, recycler)
        passes += len(batch)
        while waiting := sum(len(request.output_ids) < tokens for request in scheduler.requests):
            scheduler.step(made)
            passes += waiting
        said += [list(request.output_ids)[:tokens] for request in scheduler.requests]
    return {
        "mat": round(sum(map(len, said)) / passes, 2),
        "text": hashlib.sha256(repr(said).encode()).hexdigest()[:8],
    }


if __name__ == "__main__":
    main()
