"""`make demo`: two minutes with a real chat model, plain `generate` next to accelerated calls.

Three jobs with two requests each: a chat answer, a JSON answer that follows a schema, and an edit of a file, where the
file itself is the `prediction`. The first request of a job is cold: its drafter is new. The second is warm: the drafter
has answered the first. Decoding is greedy in float32, so both outputs must be identical.

The model is SmolLM2-135M-Instruct, or without a network the repository's own tiny model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from token_recycling import constrain, generate, load, make_drafter

from .real_model import NoRealModelError, fetched

NEW_TOKENS = 96
FILE = """\
def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]+ [A-Z][a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "pattern": "^[a-z]+$"},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
    },
    "required": ["name", "age", "occupation", "city"],
    "additionalProperties": False,
}
EDIT = "{} Answer with the whole file and nothing else.\n\n" + FILE


class Job(NamedTuple):
    """Two requests of one kind; a new drafter answers the first."""

    title: str
    prompts: tuple[str, str]
    schema: dict[str, Any] | None = None
    prediction: str | None = None


JOBS = (
    Job("chat", ("Why is the sky blue?", "Why is the sea blue? Answer in a few sentences.")),
    Job(
        "JSON by schema",
        (
            "Extract the person: Maria Lopez, 34, is a nurse from Madrid.",
            "Extract the person: Tom Baker, 51, works as a carpenter in Leeds.",
        ),
        schema=SCHEMA,
    ),
    Job(
        "edit with prediction",
        (EDIT.format("Rename `values` to `numbers` in this file."), EDIT.format("Rename `total` to `sum_` in it.")),
        prediction=FILE,
    ),
)


class Measured(NamedTuple):
    """Tokens per second of one request, decoded plainly and accelerated, and whether the outputs are identical."""

    job: str
    drafter: str
    plain: float
    accelerated: float
    identical: bool


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, console: Console) -> Iterator[Measured]:
    """Answer all requests plainly and accelerated, and print the answers."""
    for job in JOBS:
        drafter = make_drafter("recycling")
        for state, prompt in zip(("cold", "warm"), job.prompts, strict=True):
            inputs = _encoded(tokenizer, prompt)
            length = inputs["input_ids"].shape[1]

            def options(job: Job = job) -> dict[str, Any]:
                processors = [] if job.schema is None else [constrain(tokenizer, json_schema=job.schema)]
                return {"max_new_tokens": NEW_TOKENS, "do_sample": False, "logits_processor": processors}

            start = time.perf_counter()
            plain = model.generate(**inputs, **options())
            middle = time.perf_counter()
            ours = generate(
                model, **inputs, drafter=drafter, prediction=job.prediction, tokenizer=tokenizer, **options()
            )
            end = time.perf_counter()
            console.print(f"\n[bold]{job.title}, {state}[/]: {prompt.splitlines()[0]}")
            console.print(tokenizer.decode(ours[0, length:], skip_special_tokens=True).strip(), markup=False)
            yield Measured(
                job.title,
                state,
                (plain.shape[1] - length) / (middle - start),
                (ours.shape[1] - length) / (end - middle),
                torch.equal(plain, ours),
            )


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, Any]:
    if tokenizer.chat_template is None:
        return dict(tokenizer(prompt, return_tensors="pt"))
    messages = [{"role": "user", "content": prompt}]
    return dict(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    )


def main() -> None:
    """Measure all jobs, and print the answers and the table."""
    console = Console()
    try:
        name = str(fetched())
    except NoRealModelError as error:
        name = "models/target"
        console.print(f"SmolLM2-135M-Instruct is not available ({error}); using {name} instead", markup=False)
    console.print(f"loading {name} in float32, compiling the drafting loops (5 to 15 s, once) ...", markup=False)
    model, tokenizer = load(name)
    generate(model, torch.tensor([[0, 1]]), max_new_tokens=2, do_sample=False)
    rows = list(measure(model, tokenizer, console))

    title = f"\ntokens per second, {torch.get_num_threads()} threads, greedy, float32"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("job", "drafter", "generate", "accelerated", "speedup", "identical"):
        table.add_column(heading, justify="left" if heading in ("job", "drafter") else "right", no_wrap=True)
    for row in rows:
        speedup = f"{row.accelerated / row.plain:.2f}x"
        identical = "yes" if row.identical else "NO"
        table.add_row(row.job, row.drafter, f"{row.plain:.1f}", f"{row.accelerated:.1f}", speedup, identical)
    console.print(table)
    console.print(f"identical: {'yes' if all(row.identical for row in rows) else 'no'}")


if __name__ == "__main__":
    main()
