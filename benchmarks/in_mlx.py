"""Token Recycling with mlx-lm next to mlx-lm alone, and to its own decoding with a draft model: `make bench-mlx`.

The shipped model in float32 answers the 24 shipped prompts greedily, one after the other; the methods take turns at
every prompt. MAT is generated tokens a pass after the prompt's; the time is that of the processor, as a share of plain
decoding. The text of a row is a digest of all tokens: equal for equal texts. Prints one JSON line a method.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

from token_recycling.engines.mlx import TokenRecycling, stream_generate

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Runs all methods on the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=ROOT / "models" / "target", help="any that mlx_lm.load takes")
    parser.add_argument("--draft-model", default=ROOT / "models" / "draft", help="of mlx-lm's own decoding")
    parser.add_argument("--dtype", default="float32", help="of the weights, as it is called in mlx; none: as they are")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, help="number of prompts")
    arguments = parser.parse_args()
    models = []
    for path in (arguments.model, arguments.draft_model):
        model, tokenizer = mlx_lm.load(str(path))
        if arguments.dtype != "none":
            model.set_dtype(getattr(mx, arguments.dtype))
        models.append((model, tokenizer))
    (model, tokenizer), (draft, _) = models
    methods: dict[str, Callable[..., Iterator[Any]]] = {"none": mlx_lm.stream_generate}
    for tokens in (2, 4):
        methods[f"a draft model, {tokens} tokens"] = partial(
            mlx_lm.stream_generate, draft_model=draft, num_draft_tokens=tokens
        )
    kept = {
        "Token Recycling": TokenRecycling(),
        "Token Recycling, token_cost 0.02": TokenRecycling(token_cost=0.02),
        "Token Recycling, whole chains": TokenRecycling(token_cost=0.0),
    }
    for name, recycling in kept.items():
        recycling.attach(model, tokenizer)
        recycling.prepare(next(iter(mlx_lm.stream_generate(model, tokenizer, "a", 1))).logprobs.size)
        methods[name] = partial(stream_generate, draft_model=recycling)
    texts = [path.read_text() for path in sorted((ROOT / "models" / "prompts").glob("*.py"))][: arguments.limit]
    seconds, said = dict.fromkeys(methods, 0.0), {name: [] for name in methods}
    for text in texts:
        for name, stream in methods.items():
            began = time.process_time()
            found = list(stream(model, tokenizer, text, arguments.max_new_tokens))
            seconds[name] += time.process_time() - began
            said[name].append([(response.token, response.from_draft) for response in found])
    for name, answers in said.items():
        # The first token of each comes with the prompt.
        drawn = [sum(not drafted for _, drafted in answer) - 1 for answer in answers]
        row = {
            "method": name,
            "mat": round(sum(len(answer) - 1 for answer in answers) / sum(drawn), 2),
            "time": round(seconds[name] / seconds["none"], 2),
            "text": hashlib.sha256(repr([token for answer in answers for token, _ in answer]).encode()).hexdigest()[:8],
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
