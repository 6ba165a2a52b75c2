"""Token Recycling in vLLM next to vLLM's own drafters and none, on the shipped model: `make bench-vllm`.

Every method decodes the same prompts greedily, one request at a time and all at once. Each runs in a process of its
own, since vLLM holds one engine; absolute times mean little on a CPU, where this build is not tuned. MAT is tokens a
step of a request: generated / (generated - accepted drafts). Prints one JSON line a method.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
OURS = {"method": "custom_class", "model": "token_recycling.engines.vllm.TokenRecycling"}
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "NUMBA_NUM_THREADS": "1",  # with more vLLM's ngram waits for threads on a small machine, 30 times as long
}
METHODS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "no speculation": (None, {}),
    "vLLM's ngram": (NGRAM, {}),
    "Token Recycling": (OURS, {}),
    "Token Recycling, whole chains": (OURS, {"token_cost": 0}),
}


def main() -> None:
    """Runs all methods, or in a process of its own the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--tokens", type=int, default=8, help="drafted tokens at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="number of prompts")
    arguments = parser.parse_args()
    if arguments.method:
        print(json.dumps(measure(arguments.method, arguments.tokens, arguments.max_new_tokens, arguments.limit)))
        return
    sizes = ["--tokens", str(arguments.tokens), "--max-new-tokens", str(arguments.max_new_tokens)]
    sizes += ["--limit", str(arguments.limit)] if arguments.limit else []
    environment = {**os.environ, **SURROUNDINGS}
    for method in METHODS:
        command = [sys.executable, __file__, "--method", method, *sizes]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ran.returncode:
            sys.exit(ran.stderr[-2000:])
        print(ran.stdout.splitlines()[-1], flush=True)


def measure(method: str, tokens: int, max_new_tokens: int, limit: int | None) -> dict[str, Any]:
    """MAT and tokens a second, one request at a time, cold, and then all at once."""
    from vllm import LLM, SamplingParams

    speculation, options = METHODS[method]
    llm = LLM(
        model=str(ROOT / "models" / "target"),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculation and {**speculation, "num_speculative_tokens": tokens},
        additional_config={"token_recycling": options} if speculation is OURS else {},
    )
    prompts = [path.read_text() for path in sorted((ROOT / "models" / "prompts").glob("*.py"))][:limit]
    parameters = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True)
    found: dict[str, Any] = {"method": method}
    for name, batches in (("one", [[prompt] for prompt in prompts]), ("all", [prompts])):
        before, began, said = _accepted(llm), time.perf_counter(), []
        for batch in batches:
            said += [answer.outputs[0].token_ids for answer in llm.generate(batch, parameters, use_tqdm=False)]
        seconds, generated = time.perf_counter() - began, sum(map(len, said))
        found[name] = {
            "mat": round(generated / (generated - (_accepted(llm) - before)), 2),
            "tokens_per_second": round(generated / seconds, 1),
            "text": hashlib.sha256(repr(said).encode()).hexdigest()[:8],
        }
    return found


def _accepted(llm: Any) -> int:
    """Drafted tokens that vLLM has accepted so far."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    main()
