"""transformers' handler of /v1/responses for one model that is loaded already, with a `Job` for each request."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
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
    """Threads in which everything is generated: one text in each, and of the texts that wait those of each key in turn.

    They are an executor's: transformers' own thread ends with the first answer that finds the event loop closed.
    """

    def __init__(self, threads: int = 1) -> None:
        self.running = 0
        """Texts that are generated."""
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="generation")
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """By key; the one whose turn is next comes first."""
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Texts that are not."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, fn: Callable[..., Any], *args: Any, key: str = "", **kwargs: Any) -> Future[Any]:
        task: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(key, deque()).append((task, partial(fn, *args, **kwargs)))
        self._pool.submit(self._next)
        return task

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def close(self) -> None:
        """Waits for all that was submitted; nothing more may be."""
        self._pool.shutdown()

    def _next(self) -> None:
        """What is next: one task of a key, which is the last one then."""
        with self._lock:
            key = next(iter(self._waiting))
            tasks = self._waiting.pop(key)
            task, call = tasks.popleft()
            if tasks:
                self._waiting[key] = tasks
            self.running += 1
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(call())
        except BaseException as error:
            task.set_exception(error)
        finally:
            with self._lock:
                self.running -= 1


class JobWorker(GenerateManager):
    """The worker, as transformers' handler sees it. `checked_job` gives the job of a request id, which takes the
    model's place, for its inputs and configuration; it raises ApiError.
    """

    def __init__(self, worker: Worker, checked_job: Callable[[str, Any, GenerationConfig], Job]) -> None:
        self._worker, self._checked_job = worker, checked_job

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._worker.submit(fn, *args, key=_key.get(), **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **more: Any
    ) -> Any:
        job = self._checked_job(request_id, inputs, gen_config)
        _key.set(job.key)
        return super().generate_streaming(job, processor, inputs, gen_config, request_id, **more)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> Any:
        job = self._checked_job(request_id, inputs, gen_config)
        _key.set(job.key)
        return await super().generate_non_streaming(job, processor, inputs, gen_config, request_id)


_key: ContextVar[str] = ContextVar("_key")
"""Of the request that transformers' handler works on."""


class State(GenerationState):
    """Hands out the one worker."""

    def __init__(self, worker: JobWorker) -> None:
        super().__init__()
        self._worker = worker

    def get_manager(self, model_id: str, use_cb: bool = False) -> JobWorker:
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
