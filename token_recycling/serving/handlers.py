"""transformers' handler of /v1/responses for one model that is loaded already, with a `Job` for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import GenerateManager, GenerationState

from ..model.loading import Loaded
from .job import Job
from .sampling import given_config, settled


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


class ResponsesHandler(ResponseHandler):
    """/v1/responses."""

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        """The configuration that a request asks for, where OpenAI's API says more than transformers' server does."""
        given = given_config(body.get("generation_config"))
        # The seed is set where the text is generated: at this moment another text may be drawing its tokens.
        known = {name: value for name, value in body.items() if name not in ("seed", "generation_config")}
        config = super()._build_generation_config(known, model_generation_config, use_cb)
        for name, value in {"top_k": model_generation_config.top_k or 0, **given}.items():
            setattr(config, name, value)
        return settled(config, body.get("temperature"), body.get("top_p"))
