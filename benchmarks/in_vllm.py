"""Token Recycling in vLLM next to vLLM's own drafters and none, on SmolLM2-135M-Instruct: `make bench-vllm`.

The work: questions of Spec-Bench or any other set, the same again, and sixteen edits of one file, greedily. The load:
one request at a time (of the first eight), 8 and 32 at once, or with `--load 2/s` requests that come by chance, two a
second on average (Poisson), whether or not others are answered. Each method has an engine of its own in a process of
its own, and all take turns batch by batch, so that what else the machine does falls on all alike. Measured are tokens a
step, counted step by step as the engine gives them, and tokens a second: of processor time, one thread, the engine's
whole process; or by the clock (`--clock wall`), as on a card. Of requests that come by chance also the time that a
token takes, of half of them at most and of 99 in 100, and the time to the first one.

A part is one round of one load, with new engines. Its rows are appended to `--rows` as soon as it
is over, and parts that stand there are not run again. The report is written from all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_model import fetched  # noqa: E402
from token_recycling.bench.run import data as sets  # noqa: E402
from token_recycling.model.loading import resolved  # noqa: E402

NONE = "none"
SUFFIX, OURS = "vLLM's suffix", "Token Recycling"


def ngram(tokens: int) -> dict[str, Any]:
    """vLLM's own prompt lookup."""
    return {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_speculative_tokens": tokens}


METHODS: dict[str, dict[str, Any] | None] = {
    NONE: None,
    "vLLM's ngram, 5 tokens": ngram(5),
    "vLLM's ngram, 10 tokens": ngram(10),
    SUFFIX: {"method": "suffix", "num_speculative_tokens": 24},
    OURS: {
        "method": "custom_class",
        "model": "token_recycling.engines.vllm.TokenRecycling",
        "num_speculative_tokens": 24,
    },
}
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
LOADS = ("1", "8", "32")
ALONE = 8
"""Questions that are asked one at a time, which takes longest."""
WORKS = ("fresh", "again", "edits")
_LONGEST = 4000
"""Characters of a question at most."""
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # with more vLLM's ngram waits for threads on a small machine, 30 times as long
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ANSWER = "answer: "
"""What a line with a result begins with; engines print other lines too."""


def main() -> None:
    """Runs the parts that are missing and writes the report; or serves as the engine of one method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no part after so many")
    parser.add_argument("--model", help="SmolLM2-135M-Instruct, fetched, unless given")
    parser.add_argument("--data", action="append", help="questions, as of `token-recycling bench`; may be repeated")
    parser.add_argument("--limit", type=int, default=32, help="number of questions and edits at most")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--work", choices=WORKS, action="append", help="may be repeated; all unless given")
    parser.add_argument("--method", choices=METHODS, action="append", help="may be repeated; all unless given")
    parser.add_argument(
        "--load", type=load_of, action="append", help="requests at once, or N/s; may be repeated; 1, 8, 32 unless given"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="processor", help="what seconds are counted by")
    parser.add_argument("--rows", type=Path, default=ROOT / "build" / "vllm.jsonl", help="results so far")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "results" / "vllm.md")
    arguments = parser.parse_args()
    model = arguments.model or resolved(str(fetched()))
    if arguments.engine:
        serve(arguments.engine, model, arguments.max_new_tokens, CLOCKS[arguments.clock])
        return
    methods = {NONE, *(arguments.method or METHODS)}
    work = works(arguments.data or ["spec_bench"], arguments.limit, arguments.work or WORKS)
    began, rows = time.monotonic(), read(arguments.rows)
    done = {(row["round"], row["load"]) for row in rows}
    options = ["--model", model, "--max-new-tokens", str(arguments.max_new_tokens), "--clock", arguments.clock]
    for part in [(turn, load) for turn in range(arguments.rounds) for load in arguments.load or LOADS]:
        if part in done:
            continue
        if time.monotonic() - began > 60 * arguments.minutes:
            print("there is more to do: run it again")
            return
        made = measure(*part, work, [method for method in METHODS if method in methods], options)
        arguments.rows.parent.mkdir(parents=True, exist_ok=True)
        with arguments.rows.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
        rows += made
        print(f"round {part[0] + 1}, load {part[1]}: done", flush=True)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(report(rows, arguments.max_new_tokens, arguments.clock))
    print(arguments.report.read_text())


def load_of(text: str) -> str:
    """A load as the command line has it; raises ValueError."""
    if float(text.removesuffix("/s")) <= 0 or not (text.endswith("/s") or text.isdigit()):
        raise ValueError
    return text


def works(data: list[str], limit: int, names: Sequence[str]) -> dict[str, list[str]]:
    """What a user asks, by the name of the work."""
    questions = sets.load(data, -(-limit // 7))
    fresh = [question.turns[0] for question in questions if len(question.turns[0]) < _LONGEST][:limit]
    file = (ROOT / "models" / "train.py").read_text()[:1200]
    words = list(dict.fromkeys(re.findall(r"\b[a-z_]{5,}\b", file)))[: min(limit, 16)]
    edits = [f"```python\n{file}\n```\n\nRename {word} to {word}_new and give back the whole file." for word in words]
    return {name: {"fresh": fresh, "again": fresh, "edits": edits}[name] for name in names}


def measure(
    turn: int, load: str, asked: dict[str, list[str]], methods: list[str], options: list[str]
) -> list[dict[str, Any]]:
    """One part: a row for each method and work; `options` are those of the engines' processes."""
    command = [sys.executable, __file__, *options, "--engine"]
    environment = {**os.environ, **SURROUNDINGS}
    engines = {}
    for method in methods:
        engines[method] = subprocess.Popen(
            [*command, method], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        ask(engines[method], [("Hello.", 0.0)])  # loads, and compiles what it needs
    rows = []
    for work, questions in asked.items():
        found = {method: {"tokens": 0, "steps": 0, "seconds": 0.0, "texts": "", "waits": []} for method in methods}
        for number, some in enumerate(portions(questions, load)):
            order = methods[number % len(methods) :] + methods[: number % len(methods)]
            for method in order:
                for name, value in ask(engines[method], some).items():
                    found[method][name] += value
        for method, row in found.items():
            row["texts"] = hashlib.sha256(repr(row["texts"]).encode()).hexdigest()[:8]
            rows.append({"round": turn, "load": load, "work": work, "method": method, **row})
    for engine in engines.values():
        engine.stdin.close()
        engine.wait()
    return rows


def portions(questions: list[str], load: str) -> Iterator[list[tuple[str, float]]]:
    """Questions that are asked together, each with the second at which it comes."""
    if load.endswith("/s"):
        gaps = random.Random(0)
        yield [
            (each, come)
            for each, come in zip(
                questions, accumulate(gaps.expovariate(float(load.removesuffix("/s"))) for _ in questions), strict=True
            )
        ]
        return
    some, together = questions[:ALONE] if load == "1" else questions, int(load)
    for first in range(0, len(some), together):
        yield [(each, 0.0) for each in some[first : first + together]]


def ask(engine: subprocess.Popen[str], texts: list[tuple[str, float]]) -> dict[str, Any]:
    """What an engine counted while it answered these questions."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    print(json.dumps(texts), file=engine.stdin, flush=True)
    for line in engine.stdout:
        if line.startswith(_ANSWER):
            return json.loads(line.removeprefix(_ANSWER))
    raise RuntimeError(f"expected an answer of the engine, got its end, with {engine.wait()}; see above")


def serve(method: str, model: str, max_new_tokens: int, clock: Callable[[], float]) -> None:
    """Answers every line of questions on standard input."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=model,
        max_model_len=2048,
        dtype="float32",
        enforce_eager=True,
        speculative_config=METHODS[method],
    )
    parameters = SamplingParams(temperature=0, max_tokens=max_new_tokens, output_kind=RequestOutputKind.DELTA)
    tokenizer = llm.get_tokenizer()
    for number, line in enumerate(sys.stdin):
        asked = {f"{number}, {place}": one for place, one in enumerate(json.loads(line))}
        found = answered(llm.llm_engine, tokenizer, parameters, asked, clock)
        print(f"{_ANSWER}{json.dumps(found)}", flush=True)


def answered(
    engine: Any, tokenizer: Any, parameters: Any, asked: dict[str, tuple[str, float]], clock: Callable[[], float]
) -> dict[str, Any]:
    """What is counted while an engine answers questions, each of which comes after so many seconds: tokens, steps,
    seconds, the texts, and of every request the seconds to its first token and for every further one.
    """
    coming, said, at = dict(asked), {}, {}
    began, steps = clock(), 0
    while coming or engine.has_unfinished_requests():
        now = clock() - began
        for name, (question, comes) in list(coming.items()):
            if comes > now:
                if engine.has_unfinished_requests():
                    break
                began -= comes - now  # nothing to do until then: a processor's clock would stand still
                now = comes
            chat = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            said[name], at[name] = [], []
            engine.add_request(name, {"prompt_token_ids": ids}, parameters)
            del coming[name]
        for output in engine.step():
            if output.outputs[0].token_ids:
                said[output.request_id] += output.outputs[0].token_ids
                at[output.request_id].append(clock() - began)
                steps += 1
    waits = [
        (at[name][0] - comes, (at[name][-1] - at[name][0]) / max(1, len(said[name]) - 1))
        for name, (_, comes) in asked.items()
    ]
    tokens = sum(map(len, said.values()))
    texts = [said[name] for name in asked]
    return {"tokens": tokens, "steps": steps, "seconds": clock() - began, "texts": repr(texts), "waits": waits}


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of parts that were run before."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(rows: list[dict[str, Any]], max_new_tokens: int, clock: str) -> str:
    """The tables, from all rounds."""
    places = list(dict.fromkeys((row["work"], row["load"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def of(method: str, work: str, load: str) -> list[dict[str, Any]]:
        return [r for r in rows if (r["method"], r["work"], r["load"]) == (method, work, load)]

    def mat(method: str, work: str, load: str) -> float:
        found = of(method, work, load)
        return sum(row["tokens"] for row in found) / sum(row["steps"] for row in found)

    def speed(method: str, against: str, work: str, load: str) -> float:
        """The median over rounds."""
        pairs = zip(of(against, work, load), of(method, work, load), strict=True)
        return statistics.median(other["seconds"] / own["seconds"] for other, own in pairs)

    def waited(method: str, part: int, percent: int, work: str, load: str) -> float:
        """Of the requests of all rounds, to the first token (part 0) or for a further one (1), against none."""
        own, none = (
            np.percentile([wait[part] for row in of(name, work, load) for wait in row["waits"]], percent)
            for name in (method, NONE)
        )
        return float(own / none)

    def line(title: str, cell: Any) -> str:
        cells = [cell(*place) for place in places]
        return "| " + " | ".join([title, *(each if isinstance(each, str) else f"{each:.2f}" for each in cells)]) + " |"

    def waits(method: str) -> list[str]:
        kinds = [(part, what, percent) for part, what in enumerate(("first token", "token")) for percent in (50, 99)]
        return [
            line(f"{method}: {what}, p{percent}", lambda *place: waited(method, part, percent, *place))  # noqa: B023
            for part, what, percent in kinds
        ]

    def table(titles: Any, cell: Any) -> list[str]:
        head = [line("", lambda work, load: f"{work}, {load}"), line("---", lambda *_: "---")]
        return [*head, *(line(title, lambda *place, title=title: cell(title, *place)) for title in titles)]

    against = {
        "tokens a step": lambda work, load: mat(OURS, work, load) / mat(SUFFIX, work, load),
        "tokens a second": lambda work, load: speed(OURS, SUFFIX, work, load),
    }
    same = all(len({row["texts"] for method in methods for row in of(method, *place)}) == 1 for place in places)
    rounds = len({row["round"] for row in rows})
    return "\n".join(
        [
            "# In vLLM",
            "",
            f"Made by `make bench-vllm`, rounds: {rounds}. SmolLM2-135M-Instruct in float32, "
            f"{'on a CPU, one thread, ' if clock == 'processor' else ''}greedy, {max_new_tokens} tokens a request at "
            f"most. Loads are requests at once, or with /s those that come by chance in a second. Texts of all rows "
            f"are {'identical' if same else 'NOT identical'}.",
            "",
            "Tokens a step:",
            "",
            *table(methods, mat),
            "",
            f"Tokens a second against none, by {clock} time of the whole engine with its prompts, the median of the "
            "rounds:",
            "",
            *table(methods, lambda method, work, load: speed(method, NONE, work, load)),
            "",
            "Time that a request waits for its first token and for every further one, of half of the requests at most "
            "(p50) and of 99 in 100 (p99), against none:",
            "",
            *table([], None),
            *(row for method in methods if method != NONE for row in waits(method)),
            "",
        ]
        + [f"{OURS} against {SUFFIX}:", "", *table(against, lambda title, *place: against[title](*place)), ""]
        * ({OURS, SUFFIX} <= set(methods))
    )


if __name__ == "__main__":
    main()
