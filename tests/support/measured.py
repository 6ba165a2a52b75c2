"""Handmade rows of measurements for tests of the report."""

import json

from token_recycling.bench.summary import summarize

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


def row(method="recycling", prompt="set/1", **changes):
    """Return one row: 10 tokens in 5 steps, 1 second of decoding and 2 of the whole call."""
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
    """Return the only comparison of rows under the same conditions."""
    (found,) = summarize(rows, baseline).comparisons
    return found


def write(folder, rows):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return folder


def whole_run(*methods):
    """Return rows of a complete run in every mode; outputs of the last method differ in mode generate."""
    drafted = {"parts": {"retrieve": 0.1, "forward": 0.8}, "lengths": {"1": 2, "2": 4}, "nodes": {"8": 6}}
    drafted |= {"tried": [[1, 0, 6], [1, 1, 6]], "accepted": [[1, 0, 4]]}
    different = {"identical": False, "divergence": {"turn": 0, "place": 1, "margin": 1e-5, "expected": 1, "got": 2}}
    rows = []
    for mode in ("generate", "replay", "batch"):
        for prompt in ("mt_bench/1", "qa/2"):
            for place, method in enumerate(methods):
                more = {} if method == "generate" else {**drafted, "total_seconds": [2.0 - place / 4]}
                more |= different if method == methods[-1] and mode == "generate" else {}
                rows.append(row(method, prompt, mode=mode, batch=2 if mode == "batch" else 1, **more))
    return rows
