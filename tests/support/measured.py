"""Rows of measurements for tests of the report: single ones made by hand, and all of a run as it could have been."""

import json
import random
from collections import Counter

from token_recycling.bench.report.summary import summarize

ENVIRONMENT = {
    "machine": "x86_64",
    "cpu": "Some Processor @ 2.0 GHz",
    "cores": 2,
    "threads": 2,
    "accelerator": None,
    "python": "3.11.9",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "token_recycling": "0.1.0",
    "model": "models/target",
    "model_fingerprint": "0123456789abcdef",
    "parameters": 8_400_000,
    "dtype": "float32",
    "date": "2026-11-21T10:00:00",
    "commit": "abc1234",
}
MEASURED = ("tokens", "first_tokens", "steps", "mat", "loop_tokens", "loop_steps", "repeated_4grams", "seconds")
MEASURED += ("prefill_seconds", "total_seconds", "processor_seconds", "parts", "drafted", "discarded", "lengths")
MEASURED += ("nodes", "tried", "accepted", "identical", "divergence")
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
METHODS = {
    "generate": ("transformers generate", 0.0, 1),
    "plain": ("plain decoding in this loop", 0.0, 1),
    "prompt_lookup_hf:n=10": ("transformers prompt lookup (10)", 0.42, 11),
    "assisted:models/draft": ("transformers assisted by models/draft", 0.6, 6),
    "recycling": ("recycling: 8 nodes", 0.62, 9),
    "recycling:tree=paper": ("recycling as published: 80 nodes", 0.66, 81),
    "suffix": ("suffix automaton", 0.5, 9),
    "merged:nodes=16": ("merged tree of 16 nodes", 0.7, 17),
}


def row(method="recycling", prompt="set/1", **changes):
    """One row: 10 tokens in 5 steps, 1 second of decoding and 2 of the whole call."""
    made = {
        "version": 1,
        "mode": "generate",
        "method": method,
        "label": f"label of {method}",
        "prompt": prompt,
        "category": prompt.partition("/")[0],
        "batch": 1,
        "prompt_tokens": 20,
        **dict.fromkeys(MEASURED),
        "tokens": 10,
        "steps": 5,
        "mat": 2.0,
        "loop_tokens": 0,
        "loop_steps": 0,
        "repeated_4grams": 0.0,
        "seconds": [1.0],
        "prefill_seconds": [1.0],
        "total_seconds": [2.0],
        "processor_seconds": [1.5],
        "failure": None,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "seed": None,
        "environment": ENVIRONMENT,
    }
    assert changes.keys() <= made.keys()
    return {**made, **changes}


def failed(method="recycling", prompt="set/1", failure="RuntimeError: out of memory", **changes):
    return row(method, prompt, failure=failure, **dict.fromkeys(MEASURED), **changes)


def summary_of(*rows, baseline=None):
    return summarize(rows, baseline)


def only(rows, baseline=None):
    """The one comparison of rows under the same conditions."""
    (found,) = summarize(rows, baseline).comparisons
    return found


def write(folder, rows):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return folder


def whole_run(prompts=3, tokens=128):
    """Rows of a run with all methods, both modes and batches; always the same ones."""
    chance, rows = random.Random(7), []

    def measure(method, names, label=None, skill=None, nodes=None, **setting):
        known = METHODS[method] if label is None else (label, skill, nodes)
        rows.extend(_simulated(chance, method, name, tokens, *known, **setting) for name in names)

    names = [f"{'mbpp' if kind == 'mbpp' else 'spec_bench'}/{kind}-{n}" for kind in CATEGORIES for n in range(prompts)]
    for mode in ("generate", "replay"):
        for method in METHODS:
            if mode == "generate" or not method.startswith(_THEIRS):
                measure(method, names, mode=mode)
    for batch in (1, 2, 4, 8):
        for method in ("generate", "recycling", "suffix"):
            label, skill, nodes = METHODS[method]
            measure(method, ["batch/mixed-0"], label, skill, max(1, nodes // batch), mode="batch", batch=batch)
    return rows


_THEIRS = ("generate", "assisted", "prompt_lookup_hf")


def _simulated(chance, method, prompt, tokens, label, skill, nodes, **setting):
    """Drafted chains of up to 7 tokens, each right about as often as `skill` says; second candidates never are."""
    lengths, right = Counter(), min(0.95, skill * chance.uniform(0.75, 1.2))
    while (said := sum(length * steps for length, steps in lengths.items())) < tokens:
        length = 1
        while length < 8 and chance.random() < right:
            length += 1
        lengths[min(length, tokens - said)] += 1
    steps, looping = lengths.total(), chance.random() < 0.4 and setting.get("mode") == "generate"
    reached = {
        depth: sum(n for length, n in lengths.items() if length >= depth) for depth in range(1, max(lengths) + 1)
    }
    parts = {"retrieve": 0.00005, "forward": 0.0035 * (1 + 0.028 * (nodes - 1)), "verify": 0.00007}
    decoding, ours = steps * sum(parts.values()), not method.startswith(_THEIRS)
    repeats = [decoding * chance.uniform(0.99, 1.03) for _ in range(3)]
    diverges = method == "suffix" and prompt.endswith("1")
    whole = [each + 0.02 for each in repeats]
    drafted = {
        "parts": {part: steps * seconds for part, seconds in parts.items()},
        "lengths": {str(length): count for length, count in sorted(lengths.items())},
        "nodes": {str(nodes): steps},
        "tried": [[depth, rank, n] for depth, n in reached.items() for rank in (0, 1) if nodes > 1],
        "accepted": [[depth - 1, 0, n] for depth, n in reached.items() if depth > 1],
    }
    return row(
        method,
        prompt,
        category=prompt.partition("/")[2].rpartition("-")[0],
        label=label,
        prompt_tokens=200,
        tokens=tokens,
        steps=steps,
        mat=tokens / steps,
        loop_tokens=tokens // 4 if looping else 0,
        loop_steps=steps // 6 if looping else 0,
        repeated_4grams=0.7 if looping else chance.uniform(0.02, 0.3),
        seconds=repeats,
        prefill_seconds=[0.02] * 3,
        total_seconds=whole,
        processor_seconds=whole,
        identical=None if method == "generate" or setting.get("mode") == "replay" else not diverges,
        divergence={"turn": 0, "place": 17, "margin": 0.00002, "expected": 5, "got": 7} if diverges else None,
        **(drafted if ours else {}),
        **setting,
    )
