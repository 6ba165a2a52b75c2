"""Functions shared by the commands that decode: load drafter and model, encode prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._util.chat_templates import readable
from .._util.extras import lacking
from .._util.prompts import Prompt
from ..model import gguf_files, loading
from . import console
from .options import ModelOptions

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessor

    from ..drafters._base import Drafter


def note_template() -> None:
    """Note that the chat template was chosen automatically."""
    console.note("prompts go through the tokenizer's chat template; --raw passes them unchanged")


def drafter_and_model(drafter: str, model: ModelOptions, reproducible: bool = False) -> tuple[Drafter, loading.Loaded]:
    """Create the drafter and load the model; quick checks come first."""
    with loading_progress(model.model):
        from ..drafters._registry import make_drafter

        new_drafter = make_drafter(drafter, reproducible=reproducible)
        loaded = model.load(reproducible)
    note_dtype(model.dtype, loaded)
    return new_drafter, loaded


def note_dtype(dtype: str | None, loaded: loading.Loaded) -> None:
    """Note that 16-bit weights are computed in float32 by default, and that 16 bits may be faster on CPUs with 16-bit
    instructions.
    """
    if dtype is not None or loaded.model.device.type != "cpu":
        return
    stored = loaded.stored_dtype
    if stored in ("bfloat16", "float16"):
        from .._util.device import cpu_dtypes

        faster = f"; --dtype {stored} may be faster" if stored in cpu_dtypes() else ""
        console.note(f"the {stored} weights are computed in float32, so that outputs equal generate's exactly{faster}")


@contextlib.contextmanager
def loading_progress(*models: str, weights: bool = True) -> Iterator[None]:
    """Show progress while models are loaded or unpacked; transformers' own progress bars are disabled."""
    new = loading.to_unpack(*models)
    if new and weights:
        into = gguf_files.unpacked_in()
        console.note(f"unpacking {' and '.join(new)} into {into}, in float32; later starts reuse the copy")
    with console.working(f"{'unpacking and ' if new and weights else ''}loading {' and '.join(models)}"):
        loading.silence_transformers()
        yield


def encoded(loaded: loading.Loaded, prompts: Sequence[Prompt], chat: bool | None) -> list[torch.Tensor]:
    """Return prompts as ids, (1, length) each; print a note if the chat template is applied by default."""
    through_template = bool(prompts) and loading.uses_chat(loaded, chat)
    if through_template and chat is None:
        note_template()
    return [_encoded(loaded, prompt, through_template) for prompt in prompts]


def _encoded(loaded: loading.Loaded, prompt: Prompt, chat: bool) -> torch.Tensor:
    """Return a prompt as ids (1, length) on the model's device; raises ValueError if the model cannot continue it."""
    from ..model.prefill import checked_prompt
    from ..model.target import Target

    text = prompt.text
    if chat:
        messages = readable(loaded.tokenizer, [{"role": "user", "content": text}])
        text = str(loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    # A chat template adds the special tokens itself.
    ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    ids = checked_prompt(ids, Target(loaded.model))[None]
    if loaded.context is not None and ids.shape[1] >= loaded.context:
        raise ValueError(
            f"the prompt must have fewer tokens than the model's context of {loaded.context}, got {ids.shape[1]} "
            f"({prompt.name}); shorten it"
        )
    return ids


def generate_arguments(loaded: loading.Loaded, ids: torch.Tensor, max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the arguments of `model.generate` for a prompt; new tokens are limited to the model's context."""
    room = max_new_tokens if loaded.context is None else loaded.context - ids.shape[1]
    return {
        "input_ids": ids,
        "attention_mask": ids.new_ones(ids.shape),
        "max_new_tokens": min(max_new_tokens, room),
        "do_sample": False,
        **more,
    }


def stated_schema(schema: str) -> Any:
    """Return a JSON schema, given as its text or as a file; raises ValueError."""
    if missing := lacking("grammar", "llguidance"):
        raise ValueError(f"--schema {missing}")
    try:
        text = schema if schema.lstrip()[:1] in ("{", "") else Path(schema).read_text(encoding="utf-8-sig")
        return json.loads(text)
    except (ValueError, OSError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"--schema must be a JSON schema or a file with one, got {schema[:300]!r}: {why}") from None


def schema_processor(loaded: loading.Loaded, schema: Any) -> LogitsProcessor:
    """Return a processor that constrains an output to a JSON schema."""
    from ..grammar.adapters import GrammarProcessor
    from ..grammar.compile import compiled
    from ..hf.constrain import vocabulary_of

    return GrammarProcessor(compiled(vocabulary_of(loaded.model, loaded.tokenizer), "json_schema", schema))


def described(loaded: loading.Loaded, name: str) -> str:
    """Return a description of the model, its dtype, device and threads."""
    import torch

    model = loaded.model
    threads = f", {torch.get_num_threads()} threads" if model.device.type == "cpu" else ""
    return f"{Path(name).name}, {str(model.dtype).removeprefix('torch.')}, {model.device}{threads}"
