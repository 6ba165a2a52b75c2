"""Token Recycling in llama-cpp-python next to its own prompt lookup and none: `make bench-llama-cpp`.

The shipped model in float32 as a GGUF file decodes the 24 shipped prompts greedily, one after the other, with a fresh
`Llama` for each method. MAT is generated tokens a pass, the one over the prompt left out. The text of a row is a digest
of all tokens: equal for equal texts. The time is that of the processor, with one thread. Prints one JSON line a method.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling.engines.llama_cpp import TokenRecycling

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.gguf_files import write_gguf  # noqa: E402

METHODS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "prompt lookup, as it comes (10 tokens)": LlamaPromptLookupDecoding,
    "prompt lookup, 2 tokens": lambda: LlamaPromptLookupDecoding(num_pred_tokens=2),
    "Token Recycling": TokenRecycling,
    "Token Recycling, whole chains": lambda: TokenRecycling(token_cost=0),
    "Token Recycling, 10 tokens at most": lambda: TokenRecycling(10),
    "Token Recycling, token_cost 0.2": lambda: TokenRecycling(token_cost=0.2),
}


def main() -> None:
    """Runs all methods on the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, help="number of prompts")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "target")
    texts = [path.read_text() for path in sorted((ROOT / "models" / "prompts").glob("*.py"))][: arguments.limit]
    prompts = tokenizer(texts)["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "target.gguf"
        model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "target", dtype="float32")
        write_gguf(model, path, tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
        for name, make in METHODS.items():
            found = measure(path, make(), prompts, arguments.max_new_tokens, arguments.threads)
            print(json.dumps({"method": name, **found}), flush=True)


def measure(path: Path, draft: Any, prompts: list[list[int]], new_tokens: int, threads: int) -> dict[str, Any]:
    """MAT, how many drafted tokens were accepted, and what a token after the prompts took."""
    llama = Llama(
        str(path),
        n_ctx=1024,
        draft_model=draft,
        logits_all=True,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    if isinstance(draft, TokenRecycling):
        draft.attach(llama)
    passes = evaluated = 0
    evaluate = llama.eval

    def counting(tokens: list[int]) -> None:
        nonlocal passes, evaluated
        passes, evaluated = passes + 1, evaluated + len(tokens)
        evaluate(tokens)

    llama.eval = counting
    steps = drafted = 0
    seconds, said = 0.0, []
    for prompt in prompts:
        generating = llama.generate(prompt, temp=0)
        first = next(generating)
        passes = evaluated = 0
        began = time.process_time()
        said.append([first, *itertools.islice(generating, new_tokens - 1)])
        seconds += time.process_time() - began
        steps, drafted = steps + passes, drafted + evaluated - passes
    generated = sum(map(len, said)) - len(prompts)
    return {
        "mat": round(generated / steps, 2),
        "drafted": drafted,
        "accepted": generated - steps,
        "processor_ms_a_token": round(1000 * seconds / generated, 2),
        "text": hashlib.sha256(repr(said).encode()).hexdigest()[:8],
    }


if __name__ == "__main__":
    main()
