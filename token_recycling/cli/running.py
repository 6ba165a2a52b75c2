"""What the commands that decode share: a drafter and a model made ready, prompts encoded, how tokens are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._util.prompts import Prompt
from ..model import loading
from . import console

if TYPE_CHECKING:
    import torch

    from ..drafters._base import Drafter


def note_template() -> None:
    """Says that the chat template was chosen for the user."""
    console.note("prompts go through the tokenizer's chat template; --raw gives them as they are")


def drafter_and_model(
    drafter: str,
    model: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    prepack: bool | None = None,
    reproducible: bool = False,
    device_map: str | None = None,
) -> tuple[Drafter, loading.Loaded]:
    """What is quick to check comes first, so that a wrong path or option is not waited for."""
    with loading_shown(model):
        from ..drafters._registry import make_drafter

        made = make_drafter(drafter, reproducible=reproducible)
        loaded = loading.load(model, dtype, device, threads, prepack, reproducible, device_map)
    note_dtype(dtype, loaded)
    return made, loaded


def note_dtype(dtype: str | None, loaded: loading.Loaded) -> None:
    """Notes that 16-bit weights are computed in float32 by default, and that 16 bits may be faster on CPUs with
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
    """Shows that models are loaded, or at first unpacked, and for how long; transformers' own bars are turned off."""
    new = loading.to_unpack(*models)
    if new and weights:
        into = loading.unpacked_in()
        console.note(f"{' and '.join(new)} is unpacked into {into}, in float32; later starts find it there")
    with console.working(f"{'unpacking and ' if new and weights else ''}loading {' and '.join(models)}"):
        loading.quieten()
        yield


def encoded(loaded: loading.Loaded, prompts: Sequence[Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Prompts as ids, (1, length) each, with a note where the tokenizer decided on the chat template."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        note_template()
    return [loading.encode(loaded, prompt, through_template) for prompt in prompts]


def described(loaded: loading.Loaded, name: str) -> str:
    """The model and how it was run, for a person."""
    import torch

    model = loaded.model
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}, {model.device}{threads}"


def sampling(temperature: float, top_p: float | None, top_k: int | None, seed: int | None) -> dict[str, Any]:
    """Arguments of `model.generate`, among them all for which there is an option. For what there is none, such as a
    repetition penalty, the model's own configuration holds, as in `model.generate` itself.
    """
    if not temperature:
        if (top_p, top_k, seed) != (None, None, None):
            raise ValueError("--top-p, --top-k and --seed need --temperature > 0, got 0, which is greedy decoding")
        return {}
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": 0 if top_k is None else top_k,
    }
