"""What the commands that decode share: options made into arguments, a model made ready, a run that can be stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model import loading
from . import console

if TYPE_CHECKING:
    import torch

    from ..drafter import Drafter
    from ..hf.accelerate import Acceleration
    from ..text_stream import StepRecorder


def sampling(temperature: float, top_p: float | None, top_k: int | None, seed: int | None) -> dict[str, Any]:
    """Arguments of `model.generate`; all are set, so that the model's own configuration cannot add to the options."""
    if not temperature:
        if (top_p, top_k, seed) != (None, None, None):
            raise ValueError(
                "expected --temperature above 0 with --top-p, --top-k or --seed, got 0, which draws nothing"
            )
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


def drafter_and_model(
    drafter: str, model: str, dtype: str | None, device: str | None, threads: int | None
) -> tuple[Drafter, loading.Loaded]:
    """What is quick to check comes first, so that a wrong path or option is not waited for."""
    loading.check_source(model)
    with console.working(f"loading {model}"):
        from ..registry import make_drafter

        return make_drafter(drafter), loading.load(model, dtype, device, threads)


def encoded(loaded: loading.Loaded, prompts: Sequence[loading.Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Prompts as ids, (1, length) each, with a note where the tokenizer decided on the chat template."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        console.note("prompts go through the tokenizer's chat template; --no-chat gives them as they are")
    return [loading.encode(loaded, prompt, through_template) for prompt in prompts]


def run(
    loaded: loading.Loaded,
    drafter: Drafter,
    arguments: dict[str, Any],
    recorder: StepRecorder,
    matrix: Path | None,
    measure: bool,
) -> tuple[Acceleration, bool]:
    """Generates until the end or Ctrl-C; the flag says which. Whatever ends it, what was learned is saved."""
    from ..candidates.matrix import fingerprint
    from ..hf.accelerate import accelerated

    with accelerated(loaded.model, drafter) as acceleration:
        acceleration.stats.synchronize = measure
        try:
            loaded.model.generate(**arguments, streamer=recorder)
        except KeyboardInterrupt:
            return acceleration, True
        finally:
            if matrix is not None and recorder.steps:
                drafter.matrix.save(matrix, fingerprint(loaded.tokenizer))  # type: ignore[attr-defined]
    return acceleration, False
