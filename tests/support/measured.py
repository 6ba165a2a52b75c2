"""Rows of measurements for tests of the report: single ones made by hand, and all of a run as it could have been."""

import json
import random
from collections import Counter

from token_recycling.bench.report.summary import summarize
from token_recycling.trees.templates import grow, paper

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
MEASURED = ("tokens", "steps", "mat", "loop_tokens", "loop_steps", "repeated_4grams", "seconds", "prefill_seconds")
MEASURED += ("total_seconds", "processor_seconds", "parts", "drafted", "discarded", "lengths", "nodes", "tried")
MEASURED += ("accepted", "identical")
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
METHODS = {
    "generate": ("transformers generate", 0.0, 1),
    "plain": ("plain decoding in this loop", 0.0, 1),
    "prompt_lookup_hf:n=10": ("transformers prompt lookup (10)", 0.42, 11),
    "assisted:models/draft": ("transformers assisted by models/draft", 0.6, 6),
    "recycling": ("recycling: 8 nodes", 0.62, 9),
    "recycling:tree=paper,learns_prompt=false": ("recycling as published: 80 nodes", 0.66, 81),
    "suffix": ("suffix automaton", 0.5, 9),
    "merged:nodes=16": ("merged tree of 16 nodes", 0.7, 17),
}


def row(method="recycling", prompt="set/1", **changes):
    """One row: 10 tokens in 5 steps, 1 second of decoding and 2 of the whole call."""
    made = {
        "version": 1,
        "mode": "generate",
        "study": None,
        "point": None,
        "method": method,
        "label": f"label of {method}",
        "prompt": prompt,
        "category": prompt.partition("/")[0],
        "batch": 1,
        "prompt_tokens": 20,
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
        "parts": None,
        "drafted": None,
        "discarded": None,
        "lengths": None,
        "nodes": None,
        "tried": None,
        "accepted": None,
        "identical": None,
        "divergence": None,
        "failure": None,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "seed": None,
        "environment": ENVIRONMENT,
    }
    assert changes.keys() <= made.keys() | {"paths"}
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
    """Rows of a run with all methods, both modes, batches and every study; always the same ones."""
    chance = random.Random(7)
    rows = []
    for mode in ("generate", "replay"):
        methods = [name for name in METHODS if mode == "generate" or ("hf" not in name and name[:8] not in _ONLY_OURS)]
        rows += _compared(chance, methods, prompts, tokens, mode=mode)
    rows += _batches(chance, tokens)
    return rows + _studies(chance, prompts, tokens)


_ONLY_OURS = ("generate", "assisted")


def _compared(chance, methods, prompts, tokens, **setting):
    found = []
    for number, category in enumerate(CATEGORIES):
        for place in range(prompts):
            prompt = f"{'mbpp' if category == 'mbpp' else 'spec_bench'}/{100 * number + place}"
            ease = chance.uniform(0.75, 1.2) * (0.8 + 0.07 * number)
            looping = chance.random() < 0.4 and setting.get("mode") == "generate"
            first = (number * prompts + place) % len(methods)
            for method in methods[first:] + methods[:first]:
                found.append(_simulated(chance, method, prompt, category, tokens, ease, looping, **setting))
    return found


def _simulated(chance, method, prompt, category, tokens, ease, looping, options=None, label=None, **setting):
    name, skill, nodes = options or METHODS[method]
    tree = paper() if nodes > 60 else grow((0.6, 0.12, 0.06, 0.03), nodes - 1) if nodes > 1 else None
    lengths, visited, tried, accepted, paths = Counter(), 0, Counter(), Counter(), {}
    while visited < tokens:
        length = 1
        node = ()
        while tree is not None:
            children = [p for p in tree.paths[1:] if len(p) == len(node) + 1 and p[: len(node)] == node]
            for path in children:
                tried[len(path), path[-1]] += 1
                paths.setdefault(path, [0, 0])[0] += 1
            draw, hit = chance.random(), None
            for path in children:
                share = skill * ease * (0.95, 0.12, 0.06, 0.04)[min(path[-1], 3)]
                if hit is None and draw < share:
                    hit = path
                draw -= share
            if hit is None:
                break
            accepted[len(hit), hit[-1]] += 1
            paths[hit][1] += 1
            node, length = hit, length + 1
        lengths[min(length, tokens - visited)] += 1
        visited += length
    steps = lengths.total()
    forward = 0.0035 * (1 + 0.028 * (nodes - 1)) * chance.uniform(0.95, 1.05)
    parts = {"retrieve": 0.00005, "prepare": 0.00003, "forward": forward, "verify": 0.00007}
    parts |= {"update cache": 0.00003, "update matrix": 0.0001 if nodes > 1 else 0.0}
    decoding = steps * sum(parts.values())
    ours = "hf" not in method and not method.startswith(_ONLY_OURS)
    repeats = [decoding * chance.uniform(0.99, 1.03) for _ in range(3)]
    diverges = method == "suffix" and prompt.endswith("01")
    return row(
        method,
        prompt,
        category=category,
        label=label or name,
        prompt_tokens=200,
        tokens=tokens,
        steps=steps,
        mat=tokens / steps,
        loop_tokens=tokens // 4 if looping else 0,
        loop_steps=(steps // 6 if nodes > 1 else tokens // 4) if looping else 0,
        repeated_4grams=0.7 if looping else chance.uniform(0.02, 0.3),
        seconds=repeats,
        prefill_seconds=[0.02] * 3,
        total_seconds=[each + 0.02 for each in repeats],
        processor_seconds=[each + 0.02 for each in repeats],
        parts={part: steps * value for part, value in parts.items()} if ours else None,
        lengths={str(length): count for length, count in sorted(lengths.items())} if ours else None,
        nodes={str(nodes): steps} if ours else None,
        tried=[[*place, count] for place, count in tried.items()] if ours else None,
        accepted=[[*place, count] for place, count in accepted.items()] if ours else None,
        paths=[[".".join(map(str, path)), *counts] for path, counts in paths.items()] if ours else None,
        identical=None if method == "generate" or setting.get("mode") == "replay" else not diverges,
        divergence={"turn": 0, "place": 17, "margin": 0.00002, "expected": 5, "got": 7} if diverges else None,
        **setting,
    )


def _batches(chance, tokens):
    found = []
    for batch in (1, 2, 4, 8):
        for place in range(3):
            for method in ("generate", "recycling", "suffix"):
                nodes = max(1, METHODS[method][2] // batch)
                options = (METHODS[method][0], METHODS[method][1], nodes)
                made = _simulated(chance, method, f"batch/{place}", "mixed", tokens, 1, False, options, batch=batch)
                found.append({**made, "mode": "batch"})
    return found


def _studies(chance, prompts, tokens):
    found = []

    def measure(study, point, method, label, skill, nodes):
        for place in range(prompts):
            made = _simulated(
                chance,
                method,
                f"mt/{place}",
                "mt_bench",
                tokens,
                1,
                False,
                (label, skill, nodes),
                study=study,
                point=point,
            )
            found.append(made)

    measure("breadth", None, "generate", "transformers generate", 0, 1)
    for nodes in (4, 8, 16, 32, 48):
        measure("breadth", str(nodes), f"recycling:tree={nodes}", f"recycling: {nodes} nodes", 0.6, nodes + 1)
    measure("depth", None, "generate", "transformers generate", 0, 1)
    for depth in (2, 3, 4, 5, 6):
        measure("depth", str(depth), f"recycling:tree=d{depth}", f"recycling: depth {depth}", 0.1 * depth, 12 * depth)
    for rule in ("first", "last", "unordered"):
        measure("update", rule, f"recycling:update={rule}", f"recycling: {rule}", 0.6, 9)
    for order in ("consecutive", "shuffled"):
        for method in ("recycling", "suffix"):
            measure("order", order, method, METHODS[method][0], 0.6, 9)
    for start in ("hot", "cold"):
        measure("hot", start, "recycling", "recycling: 8 nodes", 0.6 if start == "hot" else 0.5, 9)
    for k in (2, 4, 8, 16):
        measure("k", str(k), f"recycling:k={k}", f"recycling: k = {k}", 0.6 - 0.4 / k, 9)
    for temperature in ("0.0", "0.2", "0.5", "0.8", "1.0"):
        for method, skill in (("generate", 0), ("recycling", 0.6), ("suffix", 0.45)):
            nodes = 9 if skill else 1
            heat = 1 - 0.4 * float(temperature)
            measure("temperature", temperature, method, METHODS[method][0], skill * heat, nodes)
    measure("parts", None, "plain", "plain decoding in this loop", 0, 1)
    measure("parts", None, "recycling", "recycling: 8 nodes", 0.6, 9)
    measure("parts", None, "recycling:tree=paper", "recycling: 80 nodes", 0.6, 81)
    return found
