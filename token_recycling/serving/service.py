"""The model that is served, and all that requests share: the generating threads, the drafters, limits and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor

from ..cuda_graphs import FAST, Way, capture_common, captured_or_ordinary, way_of
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..hf.batched import DecodingThread
from ..loop.hints import Hints
from ..model.loading import Loaded
from ..model.prefixes import PrefixCache, default_budget
from ..model.tree_model import TreeModel
from .batch_slots import BatchSlots, batch_slots
from .drafter_pool import DrafterPool, OfferedDrafters
from .errors import ApiError, invalid
from .grammars import Grammars
from .job import Job, Text
from .keys import Key
from .logprobs import LogprobRecorder
from .metrics import Metrics
from .protocol import ChatRequest, CompletionRequest, Form, Prediction, Request, SamplingRequest
from .sampling import FORBIDDING, config_of, processors_of
from .settings import Isolation, Settings
from .templates import check_template
from .worker import Worker

_FIRST_TEXT = "The first of the"


class Service:
    """Serves one model. Made before the event loop runs; raises ValueError where the settings do not fit."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        check_template(loaded.tokenizer)
        self.loaded, self.settings, self.metrics = loaded, settings, Metrics()
        self.target = TreeModel(loaded.model)
        limit = default_budget(self.target) if settings.cache is None else int(settings.cache * 1_000_000)
        self.prefixes = PrefixCache(self.target, limit)
        self.metrics.cached_bytes.set_function(lambda: self.prefixes.nbytes)
        self.pool = DrafterPool(
            loaded,
            settings.drafter,
            settings.isolation,
            settings.matrix,
            settings.max_keys,
            self.metrics.count_save,
            settings.reproducible,
        )
        self.offered = OfferedDrafters(settings.offers, settings.free_options, settings.reproducible)
        self.metrics.drafters.set_function(lambda: len(self.pool))
        self.slots = batch_slots(self.target, self.pool.base, settings, limit)
        self.way = self._way()
        self.together = DecodingThread(loaded.model) if self.slots.size > 1 else None
        self.worker = Worker(self.slots.size)
        self.metrics.generating.set_function(lambda: self.worker.running)
        self.metrics.waiting.set_function(lambda: self.worker.waiting)
        self.grammars = Grammars(loaded, settings.isolation, len(settings.keys), settings.grammar_seconds)
        self._jobs: dict[str, Job] = {}
        self._by_key: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.closing = self._opened = False
        self.created = int(time.time())

    def _way(self) -> Way:
        """Return how steps are made where one sequence is decoded at a time, after capturing the common shapes; raises
        NoFastPathError.
        """
        fast = FAST[self.settings.fast]
        capture_common(self.target, self.pool.base, way_of(fast))
        return captured_or_ordinary if fast is True else way_of(fast)

    @property
    def running(self) -> int:
        """Number of requests that run or wait."""
        return len(self._jobs)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than the one that is served."""
        names = [self.settings.name, *self.settings.aliases]
        if name is not None and name not in names:
            message = f"model must be {' or '.join(map(repr, names))}, got {name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def check_chat(self) -> None:
        """Raises ApiError if there is no chat template."""
        if not getattr(self.loaded.tokenizer, "chat_template", None):
            message = (
                "the model has no chat template, so that it cannot take messages; use /v1/completions, or start the "
                "server with --chat-template"
            )
            raise ApiError(400, message, "no_chat_template", "messages")

    def create_job(
        self, key: Key | None, body: Request, prefix: str, drafter: str = "accelerated", local: bool = True
    ) -> Job:
        """A job for a request with that key, whose id begins with `prefix`. Its drafter is the server's own
        ("accelerated"), the same with nothing learned ("anew"), none ("plain") or an offered one. `local`: it was made
        on this machine. It must be ended or cancelled. Raises ApiError for another drafter, too many jobs, or a server
        that is shutting down.
        """
        if body.speculation is not None and not body.speculation.enabled:
            drafter = "plain"
        settings, name, retry = self.settings, key.name if key else "", {"Retry-After": "1"}
        with self._lock:
            if self.closing:
                raise ApiError(503, "the server is shutting down", "shutting_down", headers=retry)
            if settings.max_requests_per_key is not None and self._by_key[name] >= settings.max_requests_per_key:
                most = settings.max_requests_per_key
                message = f"this API key has {most} requests running or queued, its maximum; try again later"
                raise ApiError(429, message, "too_many_requests", headers=retry)
            if len(self._jobs) >= settings.max_requests:
                message = (
                    f"the server has {settings.max_requests} requests running or queued, its maximum; try again later"
                )
                raise ApiError(503, message, "overloaded", headers=retry)
            job = Job(
                self.loaded.model, None, name, prefix, settings.timeout, self.together, self.way, on_end=self._on_end
            )
            forwarded = settings.isolate_forwarded and not settings.keys and not local
            job.alone = forwarded or settings.isolation is Isolation.per_request
            self._jobs[job.id] = job
            self._by_key[name] += 1
            self.metrics.running.set(len(self._jobs))
        try:
            job.drafter = self._drafter(drafter, job, local)
        except BaseException:
            job.end()
            raise
        return job

    def _drafter(self, chosen: str, job: Job, local: bool) -> contextlib.AbstractContextManager[Drafter]:
        """Return the drafter for a request; raises ApiError. A new one costs memory: call it for admitted requests."""
        if chosen == "accelerated":
            return self.pool.acquire(job.key, job.alone)
        if chosen == "anew":
            return contextlib.nullcontext(self.pool.anew())
        return contextlib.nullcontext(make_drafter("plain") if chosen == "plain" else self.offered.make(chosen, local))

    def limit(self, job: Job, length: int, config: GenerationConfig, field: str) -> None:
        """Add a prompt of that length, from that field of the request, to a job, and limit `config.max_new_tokens`;
        raises ApiError for a long prompt, and where more tokens are asked for than fit.
        """
        job.prompt_tokens += length
        limit, context = self.settings.max_prompt_tokens, self.loaded.context
        if not length:
            raise ApiError(400, f"{field}: the prompt must have at least one token, got 0", "empty_prompt", field)
        limit = None if job.warm_up else limit
        longest = min((most for most in (limit, context and context - 1) if most is not None), default=length)
        if length > longest:
            message = f"{field}: the prompt must have at most {longest} tokens, got {length}; shorten it"
            raise ApiError(400, message, "context_length_exceeded", field)
        limits = [config.max_new_tokens, self.settings.max_new_tokens, None if context is None else context - length]
        config.max_new_tokens = min(limit for limit in limits if limit is not None)
        if (config.min_new_tokens or 0) > config.max_new_tokens:
            raise invalid(
                "min_tokens", f"must be <= {config.max_new_tokens}, the tokens that fit, got {config.min_new_tokens}"
            )

    async def texts(
        self,
        job: Job,
        ids: torch.Tensor,
        body: CompletionRequest | ChatRequest,
        default_tokens: int | None,
        top: int | None,
        calls: tuple[str, Form] | None = None,
    ) -> tuple[list[Text], GenerationConfig]:
        """The texts that continue a prompt (1, length), and their configuration; raises ApiError. `default_tokens`: the
        length where the body says none; `top`: the likeliest tokens that are wanted; `calls`: the field that constrains
        an output with tools, and its grammar.
        """
        config = config_of(body, self.loaded.model, default_tokens)
        self.limit(job, ids.shape[-1], config, "messages" if isinstance(body, ChatRequest) else "prompt")
        hints = self.hints(job, body, body.prediction if isinstance(body, ChatRequest) else None)
        grammar = await self.grammar(job, body, config, calls)
        texts = []
        for choice in range(body.n or 1):
            recorder = None if top is None else LogprobRecorder(top)
            seed = None if body.seed is None else body.seed + choice
            arguments = self.arguments(body, ids, config, recorder, grammar)
            texts.append(Text(arguments, seed, recorder, hints=hints, first=not choice))
        return texts, config

    def hints(self, job: Job, body: Request, prediction: Prediction | None = None) -> Hints:
        """What is known of the texts of a request; raises ApiError for a prediction that nobody drafts from."""
        nodes = None if body.speculation is None else body.speculation.nodes
        alone = job.alone or job.warm_up
        alone = alone or (isinstance(body, SamplingRequest) and body.cache_prompt is False)
        prefixes = None if alone else self.prefixes.of(job.key)
        if prediction is None or (body.speculation is not None and not body.speculation.enabled):
            return Hints(prefixes, nodes=nodes)
        if not self.pool.base.traits.predictions:
            raise invalid(
                "prediction",
                f"the server's drafter, {self.pool.base.name}, does not draft from predictions; start the server with "
                "--drafter recycling, or omit prediction",
            )
        ids = self.loaded.tokenizer(prediction.text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        ids = ids[ids < self.target.vocab_size]
        job.predicted_tokens += len(ids) * (getattr(body, "n", None) or 1)
        return Hints(prefixes, ids.long(), nodes)

    async def grammar(
        self, job: Job, body: SamplingRequest, config: GenerationConfig, calls: tuple[str, Form] | None = None
    ) -> Callable[[], LogitsProcessor] | None:
        """Return a function that makes the processor of the request's output format, or of its tool `calls`; None where
        it has neither. Raise ApiError.
        """
        if (constrained := calls or body.form) is None:
            return None
        field, form = constrained
        for name in ("min_tokens", "ignore_eos"):
            if getattr(body, name):
                raise invalid(
                    name, f"cannot be combined with {field}: the output ends where its format ends; omit one of them"
                )
        if forbidding := [name for name in FORBIDDING if getattr(config, name)]:
            raise invalid(
                "generation_config",
                f"{forbidding[0]} cannot be combined with {field}: both restrict the next token; omit one of them",
            )
        return await self.grammars.processor(field, form, job.key, lambda: job.cancelled, job.alone)

    def arguments(
        self, body: SamplingRequest, ids: torch.Tensor, config: GenerationConfig, *more: Any
    ) -> dict[str, Any]:
        """The arguments of `generate` for a prompt (1, length); raises ApiError. `more` goes to `processors_of`."""
        config = copy.deepcopy(config)
        processors = processors_of(body, config, ids.shape[-1], self.target.vocab_size, *more)
        ids = ids.to(self.target.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "generation_config": config,
            "logits_processor": processors,
            "tokenizer": self.loaded.tokenizer,
        }

    def _on_end(self, job: Job) -> None:
        with self._lock:
            del self._jobs[job.id]
            self._by_key[job.key] -= 1
            self.metrics.running.set(len(self._jobs))
            if job.outcome is not None:
                self.metrics.count_job(job)

    async def open(self) -> None:
        """Compiles what the first requests would wait for, and completes a text as they do. May be called
        again. Raises RuntimeError if that fails, or where texts are asked to be decoded together and this one was not.
        """
        if self._opened:
            return
        drafter = contextlib.nullcontext(self.pool.base.fork())
        job = Job(self.loaded.model, drafter, together=self.together, way=self.way, warm_up=True)
        ids = self.loaded.tokenizer(_FIRST_TEXT, return_tensors="pt")["input_ids"]
        texts, _ = await self.texts(job, ids, CompletionRequest.model_validate({"prompt": _FIRST_TEXT}), 8, None)
        try:
            await self.worker.async_submit(job.generate_text, texts[0], lambda tokens: None)
        except Exception as error:
            why = error.__cause__ or error  # an ApiError does not say it
            raise RuntimeError(f"the warm-up request failed: {type(why).__name__}: {why}") from error
        if self.together is not None and job.fallback is not None:
            # It would draw from the generator of the whole process, so that seeds would not hold.
            if self.settings.concurrency is not None:
                raise RuntimeError(f"requests cannot be batched: {job.fallback}; omit --concurrency")
            self.slots = BatchSlots(1, f"requests cannot be batched: {job.fallback}")
            self.together.close()
            self.worker.close()
            self.together, self.worker = None, Worker()
        self._opened = True

    async def save_at_intervals(self) -> None:
        """Saves what was learned every `save_every` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.save_every)
            if self.together is None:
                await self.worker.async_submit(self.pool.save)
            else:
                await asyncio.to_thread(self.pool.save, self.together.between_steps)

    def end_all(self) -> None:
        """Ends all requests with an error, at the end of the grace period."""
        for job in list(self._jobs.values()):
            job.interrupt(ApiError(503, "the server is shutting down", "shutting_down", headers={"Retry-After": "1"}))

    def close(self) -> None:
        """Ends all requests and saves; may be called again."""
        self.closing = True
        for job in list(self._jobs.values()):
            job.cancel()
        self.worker.close()
        self.grammars.close()
        self.pool.save()
        if self.together is not None:
            self.together.close()
