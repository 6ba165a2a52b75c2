"""What the commands that decode share: a drafter and a model made ready, prompts encoded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..model import gguf, loading, sources
from . import console

if TYPE_CHECKING:
    import torch

    from ..drafters._base import Drafter


def note_template() -> None:
    """Says that the chat template was chosen for the user."""
    console.note("prompts go through the tokenizer's chat template; --no-chat gives them as they are")


def drafter_and_model(
    drafter: str, model: str, dtype: str | None, device: str | None, threads: int | None
) -> tuple[Drafter, loading.Loaded]:
    """What is quick to check comes first, so that a wrong path or option is not waited for."""
    sources.check_source(model)
    with loading_shown(model):
        from ..drafters._registry import make_drafter

        return make_drafter(drafter), loading.load(model, dtype, device, threads)


@contextlib.contextmanager
def loading_shown(*models: str, weights: bool = True) -> Iterator[None]:
    """Shows that models are loaded, or at first unpacked, and for how long; transformers' own bars are turned off."""
    packed = [file for file in map(sources.packed, models) if weights and file is not None]
    with console.working(f"reading {' and '.join(models)}"):
        new = [file.name for file in packed if not gguf.is_unpacked(file)]
    if new:
        console.note(f"{' and '.join(new)} is unpacked into {gguf.kept_in()}, in float32; later starts find it there")
    with console.working(f"{'unpacking and ' if new else ''}loading {' and '.join(models)}"):
        loading.quieten()
        yield


def encoded(loaded: loading.Loaded, prompts: Sequence[loading.Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Prompts as ids, (1, length) each, with a note where the tokenizer decided on the chat template."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        note_template()
    return [loading.encode(loaded, prompt, through_template) for prompt in prompts]
