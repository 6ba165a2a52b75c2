"""What the commands that decode share: a drafter and a model made ready, prompts encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..model import loading
from . import console

if TYPE_CHECKING:
    import torch

    from ..drafters._base import Drafter


def drafter_and_model(
    drafter: str, model: str, dtype: str | None, device: str | None, threads: int | None
) -> tuple[Drafter, loading.Loaded]:
    """What is quick to check comes first, so that a wrong path or option is not waited for."""
    loading.check_source(model)
    with console.working(f"loading {model}"):
        from ..drafters._registry import make_drafter

        return make_drafter(drafter), loading.load(model, dtype, device, threads)


def encoded(loaded: loading.Loaded, prompts: Sequence[loading.Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Prompts as ids, (1, length) each, with a note where the tokenizer decided on the chat template."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        console.note("prompts go through the tokenizer's chat template; --no-chat gives them as they are")
    return [loading.encode(loaded, prompt, through_template) for prompt in prompts]
