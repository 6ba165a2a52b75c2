"""What drafters learn: tokens a step on held-out chats, against the tokens of other chats that were read before.

The model's own greedy answers are written once and kept in a folder, with the states of every text, so that another run
reads nothing. The answers to other questions are then decoded one after another, in one shuffled order, by every
drafter, those of `--further` sets after them, and at some numbers of tokens a copy of each decodes every held-out
answer, which teaches the next one nothing.
The target reads each text in a single pass: so the tokens of the texts teach, and no rejected node does. A pass of 16
tokens is timed beside every text, and bounds what may be spent on learning as it does while decoding. A line is printed
for every drafter at each number of tokens, as JSON.

    python -m benchmarks.learning --model MODEL --data FILE.jsonl --texts build/answers --drafter ...
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import transformers
import typer
from transformers import PreTrainedModel

from benchmarks.long_run import follow
from token_recycling import make_drafter
from token_recycling.bench.run.data import Question, load
from token_recycling.bench.run.prompts import BenchmarkConfig, prompt
from token_recycling.drafters._base import Drafter
from token_recycling.model import loading
from token_recycling.model.inspection import hidden_states, output_layer
from token_recycling.model.pass_times import costs_of
from token_recycling.model.self_test import ready
from token_recycling.model.tree_model import TreeModel

MARKS = (0, 1_000, 3_000, 10_000, 30_000, 100_000)
_AT_ONCE, _GROUP, _NODES = 32, 8, 16
"""Answers written together, how many such batches are sorted by length, and nodes of the pass that is timed."""
_LONGEST = 1_200
"""Tokens of a prompt; longer ones are left out."""


class Answer(NamedTuple):
    """A question's prompt and the model's own answer."""

    category: str
    prompt: list[int]
    following: list[int]


class Read(NamedTuple):
    """An answer with what the target says at all of its tokens."""

    category: str
    text: torch.Tensor  # (length,) int64
    begin: int  # tokens of the prompt
    logits: torch.Tensor  # (length - begin + 1, vocabulary): from the prompt's last token on
    states: torch.Tensor  # (length, hidden)
    pass_seconds: float  # of a pass over 16 tokens


@torch.no_grad()
def main(
    data: Annotated[list[str], typer.Option(help="questions, as of `bench --data`")],
    drafter: Annotated[list[str], typer.Option(help="a drafter with options, with a fixed number of nodes")],
    texts: Annotated[
        Path, typer.Option(help="folder of the model's answers, which are written where they are not there")
    ],
    model: Annotated[Path, typer.Option(help="a local model folder")],
    first: Annotated[int, typer.Option(help="questions of each category that are left out")] = 0,
    held_out: Annotated[int, typer.Option(help="questions of each category, after these, to measure with")] = 4,
    limit: Annotated[int | None, typer.Option(help="questions of each category in all")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="of an answer at most")] = 200,
    marks: Annotated[list[int], typer.Option(help="tokens after which to measure")] = MARKS,  # type: ignore[assignment]
    further: Annotated[list[str] | None, typer.Option(help="questions that are read after all of the others")] = None,
    written_in: Annotated[str, typer.Option(help="the type in which answers are written, and read")] = "float32",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
) -> None:
    """Prints tokens a step of every drafter on held-out answers after so many tokens."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    loaded = loading.load(str(model), "float32")
    config = BenchmarkConfig(loaded.model, loaded.tokenizer, max_new_tokens, chat=loading.uses_chat(loaded, None))
    measured, others = divided(load(data, limit), first, held_out)
    others += divided(load(further or []), 0, 0)[1]
    writer = loaded.model if written_in == "float32" else loading.load(str(model), written_in).model
    answers = Answers(replace(config, model=writer), texts)
    target, drafters = ready(loaded.model), {spec: make_drafter(spec) for spec in drafter}
    held = [read(target, writer, answer, texts) for answer in answers.of(measured)]
    seen, waiting = 0, sorted(marks)
    for answer in answers.of(others):
        if not waiting:
            break
        if seen >= waiting[0]:
            report(target, drafters, held, seen)
            waiting.pop(0)
        known = read(target, writer, answer, texts)
        for one in drafters.values():
            decode(target, one, known)
        seen += len(answer.following)
    if waiting:
        report(target, drafters, held, seen)


def divided(questions: Sequence[Question], first: int, held_out: int) -> tuple[list[Question], list[Question]]:
    """Held-out questions, and others in one shuffled order; of each category without the first ones."""
    counted, parts = Counter[str](), ([], [])  # type: ignore[var-annotated]
    for question in questions:
        counted[question.category] += 1
        if counted[question.category] > first:
            parts[counted[question.category] > first + held_out].append(question)
    random.Random(0).shuffle(parts[1])
    return parts


class Answers:
    """The model's own answers, from a folder where they are there."""

    def __init__(self, config: BenchmarkConfig, folder: Path) -> None:
        self._config, self._path = config, folder / "answers.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._known = {tuple(line["prompt"]): line["following"] for line in map(json.loads, lines)}

    def of(self, questions: Sequence[Question]) -> Iterator[Answer]:
        """Those to the questions that are not too long, in order."""
        for place in range(0, len(questions), _AT_ONCE * _GROUP):
            some = questions[place : place + _AT_ONCE * _GROUP]
            prompts = [prompt(self._config, question)[0].tolist() for question in some]
            new = [ids for ids in prompts if tuple(ids) not in self._known and len(ids) <= _LONGEST]
            new.sort(key=len)
            for begin in range(0, len(new), _AT_ONCE):
                self._write(new[begin : begin + _AT_ONCE])
            for question, ids in zip(some, prompts, strict=True):
                if tuple(ids) in self._known:
                    yield Answer(question.category, ids, self._known[tuple(ids)])

    def _write(self, prompts: list[list[int]]) -> None:
        tokenizer, model = self._config.tokenizer, self._config.model
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        written = model.generate(**inputs, max_new_tokens=self._config.max_new_tokens, do_sample=False)
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for ids, row in zip(prompts, written[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
                self._known[tuple(ids)] = row[:length]
                file.write(json.dumps({"prompt": ids, "following": row[:length]}) + "\n")


def read(target: TreeModel, reader: PreTrainedModel, answer: Answer, folder: Path) -> Read:
    """Reads an answer in one pass of `reader`, or its states, in half precision, from the folder."""
    text = torch.tensor(answer.prompt + answer.following)
    kept = folder / "states" / f"{hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]}.npy"
    if not kept.exists():
        with hidden_states(reader) as seen:
            reader(text[None])
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, seen[0][0].half().numpy())
    states, begin = torch.from_numpy(np.load(kept)).float(), len(answer.prompt)
    logits = output_layer(target.model)(states[begin - 1 :])
    began = time.perf_counter()
    target.model(text[None, :_NODES])
    return Read(answer.category, text, begin, logits, states, time.perf_counter() - began)


def decode(target: TreeModel, drafter: Drafter, known: Read) -> int:
    """Decodes a text; returns the number of steps."""
    costs = costs_of(target, 1, len(known.text))
    costs.took(_NODES, known.pass_seconds, len(known.text))
    begun = drafter.start(known.text[: known.begin], target, costs)
    states = None if drafter.traits.states is None else known.states
    return follow(begun, known.text, known.begin, known.logits, states)


def report(target: TreeModel, drafters: dict[str, Drafter], held: Sequence[Read], seen: int) -> None:
    """Prints tokens a step of a copy of every drafter, over all held-out texts and of each category."""
    for spec, drafter in drafters.items():
        emitted, steps = Counter[str](), Counter[str]()
        for known in held:
            taken = decode(target, drafter.fork(), known)
            for which in ("all", known.category):
                emitted[which] += len(known.text) - known.begin
                steps[which] += taken
        mats = {which: round(emitted[which] / steps[which], 3) for which in emitted}
        print(json.dumps({"drafter": spec, "read": seen, "mat": mats}), flush=True)


if __name__ == "__main__":
    typer.run(main)
