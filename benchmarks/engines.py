"""Token Recycling in a serving engine, compared with the engine's own drafters and with no drafts.

    python -m benchmarks.engines vllm | llama-cpp | mlx | sglang      in the environment of that engine (see Makefile)

The engine greedily answers new questions, the same questions again, then edits of one file. Each method runs in its own
engine process. Methods alternate from batch to batch, so that other load on the machine affects all alike.

For each method, work and number of concurrent requests the report has: tokens per step of a request, the prompt's step
included; the speedup over no drafts, by processor time of one thread (`--clock wall` on a GPU); and the number of
outputs that differ from those without drafts. The time is that of decoding; in vLLM it includes prompts, which share
its forward passes. Rows of a round are appended to `--rows` when the round ends, and finished rounds are not run again.
Speedups are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parents[1]

NONE, OURS = "none", "Token Recycling"
WORKS = ("fresh", "again", "edits")
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
_LONGEST = 4000
"""Maximum number of characters of a question."""
_ALONE = 8
"""Number of questions asked one at a time, the slowest load."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # with more, vLLM's ngram waits for threads on a small machine, 30 times as long
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ANSWER = "answer: "
"""Prefix of a line with a result; engines print other lines too."""


class Answered(NamedTuple):
    """Outputs, steps and time of some requests."""

    outputs: list[list[int]]
    steps: int  # sum over all requests
    seconds: float  # 0 if the time is meaningless


class Vllm:
    """vLLM, with all requests concurrent."""

    METHODS: ClassVar[dict[str, Any]] = {
        NONE: None,
        "ngram, 5 tokens": {
            "method": "ngram",
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 4,
            "num_speculative_tokens": 5,
        },
        "suffix decoding": {"method": "suffix", "num_speculative_tokens": 24},
        OURS: {"model": "token_recycling.VLLM", "num_speculative_tokens": 24},
    }
    loads: ClassVar = ("1", "8", "32")

    def __init__(self, method: str, model: str, tokens: int) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings: dict[str, Any] = {"max_model_len": 2048, "dtype": "float32", "enforce_eager": True}
        self._llm = LLM(model=model, speculative_config=self.METHODS[method], **settings)
        self._asked = SamplingParams(temperature=0, max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
        self._number = 0

    def answer(self, questions: list[str], clock: Callable[[], float]) -> Answered:
        """Answer questions."""
        engine, tokenizer = self._llm.llm_engine, self._llm.get_tokenizer()
        outputs: dict[str, list[int]] = {}
        began, steps = clock(), 0
        for question in questions:
            self._number += 1
            outputs[name := str(self._number)] = []
            engine.add_request(name, {"prompt_token_ids": chat(tokenizer, question)}, self._asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] += output.outputs[0].token_ids
                steps += bool(output.outputs[0].token_ids)
        return Answered(list(outputs.values()), steps, clock() - began)


class LlamaCpp:
    """llama-cpp-python, one request after the other."""

    METHODS: ClassVar[dict[str, Any]] = {
        NONE: None,
        "prompt lookup, 10 tokens": 10,
        "prompt lookup, 2 tokens": 2,
        OURS: 0,
    }
    loads: ClassVar = ("1",)

    def __init__(self, method: str, model: str, tokens: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        from token_recycling.engines.llama_cpp import accelerate
        from token_recycling.model.loading import load_tokenizer

        self._tokenizer = load_tokenizer(model)
        drafted = self.METHODS[method]
        draft = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
        threads = {"n_threads": 1, "n_threads_batch": 1}
        settings = {"n_ctx": 4096, "logits_all": True, "flash_attn": True, "verbose": False, **threads}
        self._llama = Llama(model, draft_model=draft, **settings)
        if method == OURS:
            accelerate(self._llama)
        self._tokens, self._passes, evaluate = tokens, 0, self._llama.eval

        def counting(some: Sequence[int]) -> None:
            self._passes += 1
            evaluate(some)

        self._llama.eval = counting

    def answer(self, questions: list[str], clock: Callable[[], float]) -> Answered:
        """Answer questions."""
        outputs, steps, seconds = [], 0, 0.0
        ends = (self._llama.token_eos(), self._tokenizer.eos_token_id)
        for question in questions:
            generating = self._llama.generate(chat(self._tokenizer, question), temp=0)
            first = next(generating)
            began, self._passes = clock(), 0
            rest = takewhile(lambda token: token not in ends, islice(generating, self._tokens - 1))
            outputs.append([first, *rest])
            seconds, steps = seconds + clock() - began, steps + 1 + self._passes
        return Answered(outputs, steps, seconds)


class Mlx:
    """mlx-lm, one request after the other."""

    METHODS: ClassVar[dict[str, Any]] = {NONE: None, OURS: {}, "Token Recycling, whole chains": {"token_cost": 0.0}}
    loads: ClassVar = ("1",)

    def __init__(self, method: str, model: str, tokens: int) -> None:
        import mlx.core as mx
        import mlx_lm

        from token_recycling.engines.mlx import TokenRecycling, stream_generate

        self._model, self._tokenizer = mlx_lm.load(model)
        self._model.set_dtype(mx.float32)
        self._tokens, self._stream, self._options = tokens, mlx_lm.stream_generate, {}
        if method != NONE:
            self._stream, self._options = stream_generate, {"draft_model": TokenRecycling(**self.METHODS[method])}

    def answer(self, questions: list[str], clock: Callable[[], float]) -> Answered:
        """Answer questions."""
        outputs, steps, seconds = [], 0, 0.0
        for question in questions:
            prompt = chat(self._tokenizer, question)
            stream = self._stream(self._model, self._tokenizer, prompt, self._tokens, **self._options)
            found, began = [next(stream)], clock()
            found += stream
            outputs.append([each.token for each in found])
            seconds, steps = seconds + clock() - began, steps + sum(not each.from_draft for each in found)
        return Answered(outputs, steps, seconds)


class Sglang:
    """SGLang's own worker with the tests' STAND-INS for its CUDA kernels: trees and tokens, no times."""

    METHODS: ClassVar[dict[str, Any]] = {NONE: 1, OURS: 16, "Token Recycling, no history": 16}
    """Number of nodes of a tree, by method."""
    loads: ClassVar = ("1", "8")

    def __init__(self, method: str, model: str, tokens: int) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        from support.sglang_standins import Scheduler, stand_in, worker
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from token_recycling.engines.engine import EngineOptions, Replica

        stand_in()
        self._model = AutoModelForCausalLM.from_pretrained(model).float()
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._nodes, self._tokens, self._scheduler, self._worker = self.METHODS[method], tokens, Scheduler, worker
        options = EngineOptions(history=0) if method.endswith("no history") else EngineOptions()
        self._recycler = Replica(self._model.config.vocab_size, max(1, self._nodes - 1), options)

    def answer(self, questions: list[str], clock: Callable[[], float]) -> Answered:
        """Answer questions."""
        prompts = [chat(self._tokenizer, question) for question in questions]
        if self._nodes == 1:
            texts = [self._plain(prompt) for prompt in prompts]
            return Answered(texts, sum(map(len, texts)), 0.0)
        scheduler, steps = self._scheduler(self._model, prompts, self._nodes, overlap=False), len(prompts)
        made = self._worker(scheduler, self._recycler)
        while waiting := sum(len(request.output_ids) < self._tokens for request in scheduler.requests):
            scheduler.step(made)
            steps += waiting
        return Answered([list(request.output_ids)[: self._tokens] for request in scheduler.requests], steps, 0.0)

    def _plain(self, prompt: list[int]) -> list[int]:
        import torch

        said = self._model.generate(
            torch.tensor([prompt]), max_new_tokens=self._tokens, min_new_tokens=self._tokens, do_sample=False
        )
        return said[0, len(prompt) :].tolist()


ENGINES: dict[str, Any] = {"vllm": Vllm, "llama-cpp": LlamaCpp, "mlx": Mlx, "sglang": Sglang}


def main() -> None:
    """Run the missing rounds and write the report; or, with --serve, run as the engine of one method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", help="default SmolLM2-135M-Instruct, downloaded once; sglang: models/target")
    parser.add_argument("--data", action="append", help="questions, as for `token-recycling bench`; may be repeated")
    parser.add_argument("--limit", type=int, default=32, help="maximum number of questions and of edits")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--method", action="append", help="may be repeated; default all")
    parser.add_argument("--load", action="append", help="number of concurrent requests; may be repeated")
    parser.add_argument("--clock", choices=CLOCKS, default="processor")
    parser.add_argument("--rows", type=Path, help="file of earlier results; default build/engines/ENGINE.jsonl")
    arguments = parser.parse_args()
    engine, name = ENGINES[arguments.engine], arguments.engine
    if unknown := {*(arguments.method or ()), *([arguments.serve] if arguments.serve else ())} - {*engine.METHODS}:
        parser.error(f"--method of {name} must be one of {', '.join(engine.METHODS)}, got {', '.join(unknown)}")
    model = arguments.model or default_model(name)
    if arguments.serve:
        serve(engine(arguments.serve, model, arguments.max_new_tokens), CLOCKS[arguments.clock])
        return
    asked = works(arguments.data or ["models/prompts" if name == "sglang" else "spec_bench"], arguments.limit)
    path = arguments.rows or ROOT / "build" / "engines" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["round"], row["load"]) for row in rows}
    options = [name, "--model", model, "--max-new-tokens", str(arguments.max_new_tokens), "--clock", arguments.clock]
    methods = [method for method in engine.METHODS if method in {NONE, *(arguments.method or engine.METHODS)}]
    path.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(arguments.rounds):
        for load in arguments.load or engine.loads:
            if (turn, load) not in done:
                made = measure(turn, load, asked, methods, options)
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in made)
                rows += made
                print(f"round {turn + 1}, {load} concurrent: done", file=sys.stderr, flush=True)
    print(report(rows))


def default_model(engine: str) -> str:
    """Return the default model of an engine: a folder, or for llama.cpp a file."""
    from benchmarks.real_model import fetched
    from token_recycling.model.loading import resolved

    if engine == "sglang":  # without kernels every token passes through the whole sequence
        return str(ROOT / "models" / "target")
    return str(fetched()) if engine == "llama-cpp" else resolved(str(fetched()))


def works(data: list[str], limit: int) -> dict[str, list[str]]:
    """Return the requests of each work."""
    from token_recycling.bench.data import load

    questions = load(data, -(-limit // 7))
    fresh = [question.turns[0] for question in questions if len(question.turns[0]) < _LONGEST][:limit]
    file = (ROOT / "benchmarks" / "real_model.py").read_text()[:1200]
    words = list(dict.fromkeys(re.findall(r"\b[a-z_]{5,}\b", file)))[: min(limit, 16)]
    edits = [f"```python\n{file}\n```\n\nRename {word} to {word}_new and give back the whole file." for word in words]
    return dict(zip(WORKS, (fresh, fresh, edits), strict=True))


def chat(tokenizer: Any, question: str) -> list[int]:
    """Return the ids of a question in the model's chat template, or of the plain question if there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(question)
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def measure(
    turn: int, load: str, asked: dict[str, list[str]], methods: list[str], options: list[str]
) -> list[dict[str, Any]]:
    """Return a row for each method and work of one round; `options` are passed to the engine processes."""
    command = [sys.executable, "-m", "benchmarks.engines", *options, "--serve"]
    environment = {**os.environ, **_ENVIRONMENT}
    engines = {
        method: subprocess.Popen(
            [*command, method], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        for method in methods
    }
    for engine in engines.values():
        ask(engine, ["Hello."])  # loads the model and compiles
    rows = []
    for work, questions in asked.items():
        found: dict[str, list[Answered]] = {method: [] for method in methods}
        for number, some in enumerate(portions(questions, int(load))):
            for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
                found[method].append(ask(engines[method], some))
        wanted = [output for answered in found[NONE] for output in answered.outputs]
        for method, parts in found.items():
            outputs = [output for answered in parts for output in answered.outputs]
            steps, seconds = sum(each.steps for each in parts), sum(each.seconds for each in parts)
            row = {"round": turn, "load": load, "work": work, "method": method, "tokens": sum(map(len, outputs))}
            differ = sum(one != other for one, other in zip(outputs, wanted, strict=True))
            rows.append({**row, "steps": steps, "seconds": seconds, "requests": len(outputs), "differ": differ})
    for engine in engines.values():
        assert engine.stdin is not None
        engine.stdin.close()
        engine.wait()
    return rows


def portions(questions: list[str], together: int) -> Iterator[list[str]]:
    """Yield groups of questions that are asked together."""
    some = questions[:_ALONE] if together == 1 else questions
    for first in range(0, len(some), together):
        yield some[first : first + together]


def ask(engine: subprocess.Popen[str], questions: list[str]) -> Answered:
    """Return an engine's answers and counts; raises RuntimeError if the engine has ended."""
    assert engine.stdin is not None
    assert engine.stdout is not None
    print(json.dumps(questions), file=engine.stdin, flush=True)
    for line in engine.stdout:
        if line.startswith(_ANSWER):
            return Answered(*json.loads(line.removeprefix(_ANSWER)))
    raise RuntimeError(f"the engine ended with exit code {engine.wait()}; see its messages above")


def serve(engine: Any, clock: Callable[[], float]) -> None:
    """Answer every line of questions on standard input."""
    for line in sys.stdin:
        print(f"{_ANSWER}{json.dumps(engine.answer(json.loads(line), clock))}", flush=True)


def report(rows: list[dict[str, Any]]) -> str:
    """Return the table of all rounds in Markdown."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    places = list(dict.fromkeys((row["work"], row["load"]) for row in rows))

    def cell(method: str, *place: str) -> str:
        own, plain = (
            [row for row in rows if (row["method"], row["work"], row["load"]) == (name, *place)]
            for name in (method, NONE)
        )
        found = f"{sum(row['tokens'] for row in own) / sum(row['steps'] for row in own):.2f}"
        rates = [[row["tokens"] / row["seconds"] for row in some if row["seconds"]] for some in (own, plain)]
        if rates[0]:
            found += f", {statistics.median(one / other for one, other in zip(*rates, strict=True)):.2f}x"
        differ = sum(row["differ"] for row in own)
        return found + f", {differ} of {sum(row['requests'] for row in own)} differ" * (differ > 0)

    head = ["", *(f"{work}, {load} concurrent" for work, load in places)]
    lines = [head, ["---"] * len(head), *([method, *(cell(method, *place) for place in places)] for method in methods)]
    return "Tokens per step, and speedup over no drafts:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
