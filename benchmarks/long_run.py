"""Whether a long run gets better, and what memory that takes: MAT by quarter of one long stream of texts.

Known texts are decoded one after another, in one shuffled order for all drafters, each of which keeps what its options
let it keep. The target reads every text in a single pass, which is a tenth of the work of decoding it: so the tokens of
the texts teach, and no rejected node does. A line is printed for every drafter after each quarter, as JSON.

    python benchmarks/long_run.py --data FILE.jsonl --data FOLDER --drafter recycling:tree=16 --drafter ...
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from token_recycling import make_drafter
from token_recycling.bench.run.data import load
from token_recycling.bench.run.prompts import BenchmarkConfig, replayed
from token_recycling.drafters._base import TextDrafter
from token_recycling.model import loading
from token_recycling.model.pass_times import costs_of
from token_recycling.model.self_test import ready
from token_recycling.trees.draft import Context, Draft, Step
from token_recycling.trees.tree import Tree

ROOT = Path(__file__).parent.parent
PARTS = 4


@torch.no_grad()
def main(
    data: Annotated[list[str], typer.Option(help="questions with known answers, or texts, as of `bench --data`")],
    drafter: Annotated[list[str], typer.Option(help="a drafter with options, with a fixed number of nodes")],
    model: Annotated[Path, typer.Option(help="a local model folder")] = ROOT / "models" / "target",
    max_new_tokens: Annotated[int, typer.Option(help="of a text at most")] = 512,
    tokens: Annotated[int, typer.Option(help="of all texts together at most")] = 1_000_000,
) -> None:
    """Replays the texts, and prints MAT of every drafter so far, by quarter."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    loaded = loading.load(str(model))
    config = BenchmarkConfig(loaded.model, loaded.tokenizer, max_new_tokens)
    pairs = [pair for question in load(data) for pair in replayed(config, question)]
    random.Random(0).shuffle(pairs)
    total = min(tokens, sum(len(following) for _, following in pairs))
    target, drafters = ready(loaded.model), {spec: make_drafter(spec) for spec in drafter}
    done = 0
    emitted, steps = [0] * PARTS, {spec: [0] * PARTS for spec in drafters}
    for prompt, following in pairs:
        part = PARTS * done // total
        following = following[: total - done]
        text = torch.cat([prompt, following])
        logits = target.model(text[None]).logits[0, len(prompt) - 1 :]
        for spec, one in drafters.items():
            costs = costs_of(target, 1, len(text))
            steps[spec][part] += follow(one.start(prompt, target, costs), text, len(prompt), logits)
        emitted[part] += len(following)
        done += len(following)
        if done == total or PARTS * done // total > part:
            for spec, taken in steps.items():
                mats = [round(count / most, 3) for count, most in zip(emitted, taken, strict=True) if most]
                print(json.dumps({"drafter": spec, "tokens": done, "mat": mats}), flush=True)
        if done == total:
            break


def follow(
    drafter: TextDrafter, text: torch.Tensor, at: int, logits: torch.Tensor, states: torch.Tensor | None = None
) -> int:
    """Decodes `text` (length,) from place `at` on; returns the number of steps. `logits` (length - at + 1, vocabulary)
    are those of its tokens from the one before on; `states` (length, hidden) the last ones of all, for a drafter that
    asks for them.
    """
    steps, wanted, first = 0, text.tolist(), at - 1
    if states is not None:
        drafter.read_prompt(states[: at - 1])
    while at < len(text):
        draft = drafter.draft(Context(text[:at], len(text) - at)).cut(len(text) - at - 1)
        node, count, drafted = 0, 1, draft.tokens.tolist()
        while (child := _child(draft, drafted, node, wanted[at + count - 1])) is not None:
            node, count = child, count + 1
        read = Draft(Tree(tuple(range(-1, count - 1)), (0,) * count), text[at - 1 : at - 1 + count])
        written = wanted[at : at + count]
        at, steps = at + count, steps + 1
        path = list(range(count))
        seen = slice(at - count - 1, at - 1)
        said = logits[seen.start - first : seen.stop - first]
        step = Step(read, said, path, written, finished=at == len(text))
        drafter.observe(step if states is None else replace(step, states=states[seen]))
    return steps


def _child(draft: Draft, drafted: list[int], node: int, token: int) -> int | None:
    """The first child of a node that carries the token."""
    return next((child for child in draft.tree.children[node] if drafted[child] == token), None)


if __name__ == "__main__":
    typer.run(main)
