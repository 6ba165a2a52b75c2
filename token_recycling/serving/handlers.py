"""transformers' handlers for one model that is loaded already, with a `Job` for each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from ..model.loading import Loaded
from .errors import ApiError
from .job import Job

_SAMPLING = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens", "bad_words_ids",
    "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "renormalize_logits", "remove_invalid_values",
}  # fmt: skip
"""What the extra field `generation_config` may set: how tokens are chosen, not what is computed or kept."""


class OneModel(ModelManager):
    """Knows the model that is served, under one name."""

    def __init__(self, loaded: Loaded, name: str) -> None:
        super().__init__(device="cpu", model_timeout=-1)  # nothing is ever loaded
        self.force_model, self._loaded = name, loaded

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._loaded.model, self._loaded.tokenizer


class Worker(GenerateManager):
    """One thread in which everything is generated, one request after another. `checked_job` gives the job of a request
    id, which takes the model's place, for its inputs and configuration; it raises ApiError.

    The thread is an executor's: transformers' own ends with the first answer that finds the event loop closed.
    """

    def __init__(self, checked_job: Callable[[str, Any, GenerationConfig], Job]) -> None:
        self._checked_job = checked_job
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **more: Any
    ) -> Any:
        job = self._checked_job(request_id, inputs, gen_config)
        return super().generate_streaming(job, processor, inputs, gen_config, request_id, **more)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> Any:
        job = self._checked_job(request_id, inputs, gen_config)
        return await super().generate_non_streaming(job, processor, inputs, gen_config, request_id)


class State(GenerationState):
    """Hands out the one worker."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def get_manager(self, model_id: str, use_cb: bool = False) -> Worker:
        return self._worker


class _GenerationConfigMixin:
    """The configuration that a request asks for, where OpenAI's API says more than transformers' server does."""

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        given = _given_config(body.get("generation_config"))
        # The seed is set where the text is generated: at this moment another text may be drawing its tokens.
        known = {name: value for name, value in body.items() if name not in ("seed", "generation_config")}
        config = super()._build_generation_config(known, model_generation_config, use_cb)  # type: ignore[misc]
        for name, value in given.items():
            setattr(config, name, value)
        if body.get("temperature") or (body.get("top_p") is not None and body.get("temperature") is None):
            config.do_sample = True
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        return config


def _given_config(text: str | None) -> dict[str, Any]:
    """What the extra field `generation_config`, JSON of a GenerationConfig, sets; raises ApiError."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ApiError(400, "generation_config: expected a JSON object in a string", "invalid_value")
    usual = GenerationConfig().to_dict()
    given = {name: value for name, value in given.items() if value is not None and value != usual.get(name)}
    others = sorted(name for name in given.keys() - _SAMPLING if not name.startswith(("_", "transformers_version")))
    if others:
        raise ApiError(400, f"generation_config: expected {', '.join(sorted(_SAMPLING))}, got {', '.join(others)}")
    return {name: value for name, value in given.items() if name in _SAMPLING}


class ChatHandler(_GenerationConfigMixin, ChatCompletionHandler):
    """/v1/chat/completions."""


class TextHandler(_GenerationConfigMixin, CompletionHandler):
    """/v1/completions."""


class ResponsesHandler(_GenerationConfigMixin, ResponseHandler):
    """/v1/responses."""
