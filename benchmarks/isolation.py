"""What isolation costs: mean accepted tokens where all users of a server share a matrix, where each has one, and where
every request begins anew.

The prompts are dealt to `--users` in turn, and asked for in order, as a server would see them. Each way is measured
with nothing learned before and with a base: a matrix learned from one half of the prompts, for the other half, and the
other way round. Texts are generated greedily, and the second halves of the prompts are replayed, which no loop of the
model can flatter. All run with one drafter of a fixed tree, so that the figures do not depend on the machine. The last
line is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from token_recycling import Drafter, Stats, generate
from token_recycling.bench.run.replay import replay
from token_recycling.model.loading import Loaded, load
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.settings import Isolation

ROOT = Path(__file__).parent.parent
Run = Callable[[torch.Tensor, Drafter], Stats]
Text = tuple[str, torch.Tensor]
"""Whose it is, and the ids of the prompt."""


def main(
    model: Annotated[Path, typer.Argument(help="a local model folder")] = ROOT / "models" / "target",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    limit: Annotated[int, typer.Option(help="number of prompts, the first ones")] = 24,
    users: Annotated[int, typer.Option(help="users to whom the prompts are dealt")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated or replayed for each prompt")] = 128,
    drafter: Annotated[str, typer.Option(help="drafter with options")] = "recycling:tree=16",
) -> None:
    """Prints a row for every isolation, without and with a base."""
    transformers.utils.logging.disable_progress_bar()
    loaded = load(str(model))
    files = sorted(prompts.iterdir())[:limit]
    ids = [loaded.tokenizer(file.read_text(), return_tensors="pt").input_ids for file in files]
    texts = [(f"user{place % users}", one) for place, one in enumerate(ids)]
    folds = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    ways = {"generated": generated(loaded, max_new_tokens), "replayed": replayed(loaded, max_new_tokens)}
    table = Table(title=f"MAT, {len(texts)} prompts of {users} users, {drafter}")
    for column in ("isolation", "base", *ways):
        table.add_column(column, justify="right" if column in ways else "left")
    rows = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        bases = [
            learned(loaded, drafter, fold, ways["generated"], Path(folder) / str(n)) for n, fold in enumerate(folds)
        ]
        task = progress.add_task("measuring", total=2 * len(Isolation) * len(ways))
        for base in ("none", "the other half"):
            for isolation in Isolation:
                row = {"isolation": isolation.value, "base": base}
                for name, run in ways.items():
                    found = Stats()
                    for fold, file in zip(folds, reversed(bases), strict=True):
                        drafters = DrafterPool(loaded, drafter, isolation, None if base == "none" else file)
                        for stats in asked(drafters, fold, run):
                            found += stats
                    row[name] = f"{found.mat:.2f}"
                    progress.advance(task)
                rows.append(row)
                table.add_row(*row.values())
    Console(width=100).print(table)
    print(json.dumps(rows))


def asked(drafters: DrafterPool, texts: Sequence[Text], run: Run) -> Iterator[Stats]:
    """One text after another."""
    for user, ids in texts:
        with drafters.acquire(user) as acquired:
            yield run(ids, acquired)


def learned(loaded: Loaded, drafter: str, texts: Sequence[Text], run: Run, file: Path) -> Path:
    """The file of a matrix learned from texts that are generated."""
    drafters = DrafterPool(loaded, drafter, Isolation.shared, file)
    for _ in asked(drafters, texts, run):
        pass
    drafters.save()
    return file


def generated(loaded: Loaded, max_new_tokens: int) -> Run:
    """Greedy text."""

    def run(ids: torch.Tensor, drafter: Drafter) -> Stats:
        stats = Stats()
        generate(loaded.model, ids, drafter=drafter, stats=stats, max_new_tokens=max_new_tokens, do_sample=False)
        return stats

    return run


def replayed(loaded: Loaded, max_new_tokens: int) -> Run:
    """The second half of each prompt after the first."""

    def run(ids: torch.Tensor, drafter: Drafter) -> Stats:
        half = ids.shape[1] // 2
        return replay(loaded.model, drafter, ids[0, :half], ids[0, half : half + max_new_tokens]).stats

    return run


if __name__ == "__main__":
    typer.run(main)
