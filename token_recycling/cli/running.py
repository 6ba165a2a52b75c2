"""Shared by the commands that decode: load drafter and model, encode prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._util.prompts import Prompt
from ..model import gguf_files, loading
from . import console
from .options import ModelOptions

if TYPE_CHECKING:
    import torch

    from ..drafters._base import Drafter


def note_template() -> None:
    """Note that the chat template was chosen for the user."""
    console.note("prompts go through the tokenizer's chat template; --raw gives them as they are")


def drafter_and_model(drafter: str, model: ModelOptions, reproducible: bool = False) -> tuple[Drafter, loading.Loaded]:
    """Make the drafter and load the model; quick checks come first."""
    with loading_shown(model.model):
        from ..drafters._registry import make_drafter

        made = make_drafter(drafter, reproducible=reproducible)
        loaded = model.load(reproducible)
    note_dtype(model.dtype, loaded)
    return made, loaded


def note_dtype(dtype: str | None, loaded: loading.Loaded) -> None:
    """Note that 16-bit weights are computed in float32 by default, and that 16 bits may be faster on CPUs with
    instructions for it.
    """
    if dtype is not None or loaded.model.device.type != "cpu":
        return
    stored = loaded.stored_dtype
    if stored in ("bfloat16", "float16"):
        from .._util.device import cpu_dtypes

        faster = f"; --dtype {stored} may be faster" if stored in cpu_dtypes() else ""
        console.note(f"the weights are {stored} and computed in float32, so that texts are exactly generate's{faster}")


@contextlib.contextmanager
def loading_shown(*models: str, weights: bool = True) -> Iterator[None]:
    """Show progress while models are loaded or unpacked; transformers' own bars are turned off."""
    new = loading.to_unpack(*models)
    if new and weights:
        into = gguf_files.unpacked_in()
        console.note(f"{' and '.join(new)} is unpacked into {into}, in float32; later starts find it there")
    with console.working(f"{'unpacking and ' if new and weights else ''}loading {' and '.join(models)}"):
        loading.quieten()
        yield


def encoded(loaded: loading.Loaded, prompts: Sequence[Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Return prompts as ids, (1, length) each; note where the tokenizer decided on the chat template."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        note_template()
    return [loading.encode(loaded, prompt, through_template) for prompt in prompts]


def described(loaded: loading.Loaded, name: str) -> str:
    """Return a description of the model and how it runs."""
    import torch

    model = loaded.model
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}, {model.device}{threads}"
