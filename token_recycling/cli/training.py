"""What the commands that train share: prompts cut from the user's files, and what the target says after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..model import loading
from . import console

if TYPE_CHECKING:
    from ..model.loading import Loaded
    from ..training.continuations import Continuations

WORK, TEXTS, CHECKPOINT = "training", "texts.safetensors", "checkpoint.pt"
"""In the folder of a trained part: the folder, and the files in it, from which an interrupted run goes on."""

Files = Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them.")]
Output = Annotated[Path, typer.Option(help="Folder to write to; an interrupted run goes on from what is there.")]
Texts = Annotated[int, typer.Option(min=2, help="Texts that the target writes, at most.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of FILES before each text.")]
TextTokens = Annotated[int, typer.Option(min=2, help="Tokens that the target adds, at most.")]
Temperature = Annotated[float, typer.Option(min=0, help="At which the texts are drawn; 0: greedily.")]
Steps = Annotated[int, typer.Option(min=1, help="Batches to train on.")]
Batch = Annotated[int, typer.Option(min=1, help="Texts in a batch.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is drawn.")]


@dataclass(frozen=True)
class Texting:
    """How the target's texts are made."""

    texts: int
    prompt_tokens: int
    text_tokens: int
    temperature: float
    seed: int


def checked(files: Sequence[Path], held_out: float, *models: str) -> list[Path]:
    """The text files among and below `files`; raises ValueError for what is wrong before anything large is loaded."""
    if not 0 < held_out < 1:
        raise ValueError(f"expected --held-out between 0 and 1, got {held_out}")
    found = loading.text_files(files)
    for model in models:
        loading.check_source(model)
    return found


def texts_of(loaded: Loaded, files: Sequence[Path], folder: Path, how: Texting) -> Continuations:
    """The target's continuations of pieces of `files`, kept in `folder`; raises ValueError."""
    from ..model.corpus import documents
    from ..training.continuations import continuations, pieces

    with console.advancing("reading", sum(file.stat().st_size for file in files)) as advance:
        prompts = pieces(documents(files, loaded.tokenizer, advance), how.prompt_tokens, how.texts, how.seed)
    with console.reaching("writing texts") as progress:
        return continuations(
            loaded.model,
            prompts,
            folder / TEXTS,
            max_new_tokens=how.text_tokens,
            temperature=how.temperature,
            seed=how.seed,
            progress=progress,
        )


def facts(learned_from: Continuations, measured_on: Continuations, texting: Texting, *how: Any) -> dict[str, Any]:
    """How a part was trained, for its file: `how` are dataclasses."""
    return {
        "trained_texts": len(learned_from),
        "held_out_texts": len(measured_on),
        "trained_tokens": sum(map(len, learned_from.texts)) - sum(learned_from.prompt_lengths),
        **asdict(texting),
        **{name: value for one in how for name, value in asdict(one).items()},
    }
