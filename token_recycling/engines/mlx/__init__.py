"""Token Recycling with mlx-lm: its `generate` and `stream_generate`, with the same arguments and responses.

    from mlx_lm import load
    from token_recycling.engines.mlx import generate, stream_generate

    model, tokenizer = load("mlx-community/Qwen3-4B-4bit")
    text = generate(model, tokenizer, "import os", max_tokens=200)

The text is that of mlx-lm, for which its own loop runs, on a model that reads drafted tokens in the same pass
(`model`; Luo et al., 2408.08696, with the means of `recycling`). What was learned of a model is kept as long as the
model is. mlx-lm verifies no trees: drafts are chains, as long as they pay by what passes take on this machine.

Cost per step: see `model`.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Generator
from typing import Any

from ..._util.extras import lacking

if missing := lacking("mlx", "mlx", "mlx_lm"):
    raise ModuleNotFoundError(f"the adapter of mlx-lm {missing}")

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, generation_stream
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings

from .cache import unknown_layers
from .drafter import TokenRecycling
from .model import Drafting

__all__ = ["TokenRecycling", "generate", "stream", "stream_generate"]

logger = logging.getLogger("token_recycling")

_kept: dict[int, TokenRecycling] = {}
"""By the model's id: mlx's models have no hash."""


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    draft_model: TokenRecycling | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """`mlx_lm.stream_generate`, in fewer passes: the same arguments and responses. `draft_model` drafts and remembers;
    by default one kept with the model. `num_draft_tokens`: the longest draft, at most 31. Raises ValueError.
    """
    longest = kwargs.pop("num_draft_tokens", TokenRecycling.most)
    _check(model, draft_model, longest, kwargs)
    drafter = _kept_with(model) if draft_model is None else draft_model
    drafter.attach(model, tokenizer)
    cache = kwargs.pop("prompt_cache", None)
    if cache is None:
        cache = make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    unknown = unknown_layers(cache)
    if unknown:
        _say_once(f"nothing is drafted: a cache of {', '.join(unknown)} is not known to go back")
        yield from plain_stream_generate(
            model, tokenizer, prompt, max_tokens, None, stream, prompt_cache=cache, **kwargs
        )
        return
    quantised_from = None
    if kwargs.get("kv_bits") is not None:
        quantised_from = kwargs.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
    drafting = Drafting(model, cache, drafter, longest, max_tokens, quantised_from)
    progress = kwargs.pop("prompt_progress_callback", None)

    def on_progress(processed: int, total: int) -> None:
        drafting.begin(processed, total)
        if progress is not None:
            progress(processed, total)

    kwargs.update(prompt_cache=cache, prompt_progress_callback=on_progress)
    responses = plain_stream_generate(drafting, tokenizer, prompt, max_tokens, None, stream, **kwargs)
    try:
        for response in responses:
            response.from_draft = drafting.from_draft
            left = time.perf_counter()
            yield response
            drafting.away += time.perf_counter() - left
    finally:
        responses.close()
        with mx.stream(stream):
            drafting.settle()


stream = stream_generate


def generate(model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """`mlx_lm.generate`, in fewer passes; `kwargs` as of `stream_generate`. Raises ValueError."""
    shown = functools.partial(print, end="", flush=True) if verbose else lambda text: None
    shown("=" * 10 + "\n")
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        shown(response.text)
        text += response.text
    assert response is not None, "the last one always comes"
    shown(
        f"\n{'=' * 10}\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB\n"
    )
    return text


def _check(model: Any, draft_model: Any, longest: Any, kwargs: dict[str, Any]) -> None:
    if draft_model is not None and not isinstance(draft_model, TokenRecycling):
        raise ValueError(
            f"draft_model must be a TokenRecycling or None, got {type(draft_model).__name__}; "
            "mlx_lm.stream_generate takes a model that drafts"
        )
    if not isinstance(longest, int) or not 1 <= longest <= TokenRecycling.most:
        raise ValueError(f"num_draft_tokens must be from 1 to {TokenRecycling.most}, got {longest!r}")
    if kwargs.get("input_embeddings") is not None and not does_model_support_input_embeddings(model):
        raise ValueError("the model does not read input_embeddings; give tokens")
    if mx.distributed.init().size() > 1:
        raise ValueError(
            f"{mx.distributed.init().size()} processes would draft by clocks that differ; use mlx_lm.stream_generate"
        )


def _kept_with(model: Any) -> TokenRecycling:
    if id(model) not in _kept:
        _kept[id(model)] = TokenRecycling()
        weakref.finalize(model, _kept.pop, id(model))
    return _kept[id(model)]


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
