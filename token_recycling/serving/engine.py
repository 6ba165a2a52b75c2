"""The served model, and everything that requests share: admission, a fair queue, drafters, caches and metrics.

`Engine.admit` accepts a request as a `Job`; `Engine.generate` yields the deltas of its outputs. Each output is decoded
in a worker thread by transformers' `generate`. With batching, these calls share the forward passes of one decoding
thread. A job ends as soon as its client disconnects or its timeout expires. This module is independent of HTTP, except
that errors carry a status.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from .._util.options import SWITCH
from ..drafters._base import PREDICTED, Drafter
from ..grammar.json_schema.errors import Unenforced
from ..hf.acceleration import Acceleration, view
from ..hf.call import GenerateCall
from ..loop.request import Hints
from ..loop.stats import Stats
from ..model.backend import Backend
from ..model.loading import Loaded
from ..model.prefixes import PrefixCache, Prefixes, default_budget
from ..model.support import ready
from .batch_slots import BatchSlots, batch_slots
from .decoding_thread import DecodingThread
from .drafter_pool import DrafterPool
from .errors import ApiError, CancelledError, client_error
from .generation import Generation, scored_prompt
from .grammars import Grammars
from .keys import Key
from .metrics import Metrics
from .output import Delta, Output, whole
from .prompt import check_template
from .settings import Isolation, Settings

T = TypeVar("T")
OnDeltas = Callable[[list[Delta]], None]
"""Called after each step of an output with one delta per token."""

_ANOTHER_LOOP = (
    "transformers decodes the call in another way: beam search, assisted generation (a draft model or prompt lookup), "
    "or custom_generate"
)
_WARM_UP, _WARM_UP_TOKENS = "The first of the", 8


class Job:
    """One accepted request, from its arrival to its last token."""

    def __init__(
        self,
        prefix: str = "",
        key: str = "",
        new_drafter: Callable[[], Drafter] | None = None,
        timeout: float | None = None,
        isolated: bool = False,
        on_end: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """`prefix` of the job's id; `key`: name of its API key; `new_drafter` is called once, when the first output
        begins; `timeout`: maximum seconds from arrival to the last token; `isolated`: the job shares no drafter and no
        cache with other requests; `on_end` is called once, after the last token or a cancellation.
        """
        self.id, self.key, self.isolated = f"{prefix}{uuid.uuid4().hex}", key, isolated
        self.unenforced: list[Unenforced] = []
        """Keywords of its schemas that are not enforced."""
        self._new_drafter, self._timeout, self._on_end = new_drafter, timeout, on_end
        self.outputs: list[Output] = []
        self.tasks: list[Future[None]] = []
        """One per output."""
        self.stats = Stats()
        self.fallback: str | None = None
        """Reason for the fallback to transformers' own decoding, or None."""
        self.prompt_tokens = self.cached_tokens = self.predicted_tokens = 0
        """Tokens of its prompts, of their cached prefixes, and of its predictions, counted once per output."""
        self.waited = 0.0
        """Seconds in the queue."""
        self.first_token_seconds: float | None = None
        """From arrival to the first generated token of any output."""
        self.started = self.cancelled = False
        self.failure: ApiError | None = None
        """The client's error if an output failed, which ends the other outputs."""
        self._since = time.monotonic()
        self._interrupted: ApiError | None = None
        self._ended = False
        self._running = self._begun = 0
        """Number of outputs in progress, and of all started outputs."""
        self._read: set[Generation] = set()
        """Those of which an output has emitted its first token."""
        self._drafter: Drafter | None = None
        self.lock = threading.Lock()

    def cancel(self) -> None:
        """Cancel after a disconnect: a running output ends after its current step, a queued one leaves the queue."""
        if not (self._ended or self.failure):
            self.cancelled = True
        for task in self.tasks:
            task.cancel()
        if not self._running:
            self.end()

    def interrupt(self, error: ApiError) -> None:
        """End the generation and send `error` to the client."""
        self._interrupted = error

    def end(self) -> None:
        """Call `on_end`; repeated calls have no effect."""
        with self.lock:
            first, self._ended = not self._ended, True
        if first:
            self._on_end(self)

    def begin(self) -> Drafter:
        """Count a started output, and return the drafter."""
        with self.lock:
            if self._drafter is None:
                assert self._new_drafter is not None
                self.started, self.waited = True, self.seconds
                self._drafter = self._new_drafter()
            self._begun, self._running = self._begun + 1, self._running + 1
            return self._drafter

    def count_first_token(self, generation: Generation, cached_tokens: int) -> None:
        """Count the first token of an output whose prompt had `cached_tokens` cached tokens. Those of the first output
        of a generation count: the others find the prompt that it has read.
        """
        with self.lock:
            self.cached_tokens += 0 if generation in self._read else cached_tokens
            self._read.add(generation)
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds

    def finish(self, begun: bool) -> None:
        """Count an ended output, which had started if `begun`; end the job after its last output."""
        with self.lock:
            self._running -= begun
            over = not self._running and (self._begun == len(self.outputs) or self.failure or self.cancelled)
        if over:
            self.end()

    @property
    def seconds(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._since

    @property
    def outcome(self) -> str | None:
        """complete, cancelled or failed; None if the job was rejected before generation started."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self.failure else "complete"

    def check(self) -> None:
        """Raise the error of another output, CancelledError, or ApiError after the timeout or at shutdown."""
        if self.failure is not None:  # the first future to fail may be of an output that this failure ended
            raise self.failure
        if self.cancelled or self._ended:
            raise CancelledError
        if self._interrupted is not None:
            raise self._interrupted
        if self._timeout is None or self.seconds < self._timeout:
            return
        if not self.started:
            raise ApiError(
                503,
                f"the request timed out after {self._timeout:g} s in the queue; try again later",
                "timeout",
                headers={"Retry-After": "5"},
            )
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(
            504, f"the request timed out: it was not complete within {self._timeout:g} s", "timeout", headers=headers
        )

    def usage(self) -> dict[str, Any]:
        """Return the usage block of a response, drafting statistics included."""
        stats, accepted = self.stats, int(self.stats.drafter_statistics[PREDICTED])
        tokens = sum(output.tokens for output in self.outputs)
        speculation = {
            "drafter": stats.drafter,
            "accelerated": self.fallback is None,
            "steps": stats.steps,
            "mat": round(stats.mat, 4),
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted.total(),
            "tokens_per_second": round(stats.tokens_per_second, 2),
            "wait_seconds": round(self.waited, 6),
            "prefill_seconds": round(stats.prefill_seconds, 6),
            "decode_seconds": round(stats.decode_seconds, 6),
            **({} if self.fallback is None else {"not_accelerated_because": self.fallback}),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(output.reasoning_tokens for output in self.outputs),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.predicted_tokens - accepted,
            },
            "speculation": speculation,
        }


class Engine:
    """Serves one model. Created before the event loop starts; raises ValueError for unsuitable settings or models."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        check_template(loaded.tokenizer)
        self.loaded, self.settings, self.metrics = loaded, settings, Metrics()
        self.target = ready(loaded.model)
        limit = default_budget(self.target) if settings.cache is None else int(settings.cache * 1_000_000)
        self.prefixes = PrefixCache(self.target, limit)
        self.pool = DrafterPool(loaded, settings, self.metrics.count_save)
        self.slots = batch_slots(self.target, self.pool.base, settings, limit)
        self._backend = Backend(SWITCH[settings.fast], falls_back=True)
        self.batch = DecodingThread(loaded.model, self._backend) if self.slots.size > 1 else None
        """Decodes all sequences in one batch; None if sequences are decoded one at a time."""
        traits = self.pool.base.traits
        states = traits.states_read(self.target)
        self._backend.capture_common(self.target, states, self.slots.size, reproducible=traits.isolates_requests)
        self.workers = WorkerPool(self.slots.size)
        self.grammars = Grammars(loaded)
        self.metrics.drafters.set_function(lambda: len(self.pool))
        self.metrics.cached_bytes.set_function(lambda: self.prefixes.nbytes)
        self.metrics.generating.set_function(lambda: self.workers.running)
        self.metrics.waiting.set_function(lambda: self.workers.waiting)
        self.metrics.running.set_function(lambda: self.running)
        self._jobs: dict[str, Job] = {}
        self._by_key: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.closing = self.warm = False

    @property
    def running(self) -> int:
        """Number of running and queued requests."""
        return len(self._jobs)

    def admit(self, key: Key | None = None, prefix: str = "", drafter: str = "accelerated", local: bool = True) -> Job:
        """Accept a request with this key as a job whose id begins with `prefix`. `drafter`: "accelerated" (the server's
        own) or a name that `DrafterPool.make` accepts; `local`: the request was made on this machine. The caller must
        end or cancel the job. Raises ApiError for an unknown drafter, too many requests, or a server that is shutting
        down.
        """
        self.pool.check(drafter)
        settings, name, retry = self.settings, key.name if key else "", {"Retry-After": "1"}
        isolated = (settings.isolate_forwarded and not local) or settings.isolation is Isolation.per_request
        new_drafter: Callable[[], Drafter] = partial(self.pool.make, drafter)
        if drafter == "accelerated":
            new_drafter = partial(self.pool.acquire, name, isolated)
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
            job = Job(prefix, name, new_drafter, settings.timeout, isolated, self._on_end)
            self._jobs[job.id] = job
            self._by_key[name] += 1
        return job

    async def generate(self, job: Job, generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta]]:
        """Generate all outputs of an admitted job; yield the index of an output with each delta.

        Raises the generation's errors, and CancelledError after a disconnect. Closing the iterator ends the job.
        """
        arrivals = _Arrivals[tuple[int, Delta]]()
        choices = [(generation, choice) for generation in generations for choice in range(generation.n)]
        job.outputs = [generation.new_output() for generation, _ in choices]

        def submit(index: int) -> asyncio.Future[None]:
            generation, choice = choices[index]
            on_deltas: OnDeltas = lambda deltas: arrivals.put((index, whole(deltas)))  # noqa: E731
            return self._submit(job, generation, choice, job.outputs[index], on_deltas)

        try:
            job.check()
            arrivals.end_with([submit(index) for index in range(len(choices))])
            async for arrival in arrivals:
                yield arrival
        finally:
            job.cancel()

    async def steps(
        self,
        job: Job,
        generation: Generation,
        report: Callable[[Drafter, Callable[[T], None]], Drafter],
        on_deltas: OnDeltas,
    ) -> AsyncGenerator[T]:
        """Generate one output of an admitted job; yield the items that `report` puts. `report` wraps the drafter to
        observe its steps; `on_deltas` has already received the tokens of an observed step. Raises the same errors as
        `generate`.
        """
        arrivals = _Arrivals[T]()
        job.outputs = [generation.new_output()]
        try:
            job.check()
            wrapped = self._submit(
                job, generation, 0, job.outputs[0], on_deltas, lambda drafter: report(drafter, arrivals.put)
            )
            arrivals.end_with([wrapped])
            async for step in arrivals:
                yield step
        finally:
            job.cancel()

    async def warm_up(self) -> None:
        """Run a short request, so that the first client does not wait for compilation. Raise RuntimeError if it fails,
        or if it cannot be batched although `concurrency` was set.
        """
        if self.warm:
            return
        ids = self.loaded.tokenizer(_WARM_UP, return_tensors="pt")["input_ids"]
        config = copy.deepcopy(self.loaded.model.generation_config)
        config.max_new_tokens, config.stop_strings = _WARM_UP_TOKENS, None
        generation = Generation(ids, config, partial(Output, self.loaded.tokenizer, config))
        job = Job(new_drafter=self.pool.base.fork, isolated=True)
        try:
            await self._submit(job, generation, 0, generation.new_output(), lambda deltas: None)
        except Exception as error:
            why = error.__cause__ or error  # an ApiError hides the cause
            raise RuntimeError(f"the warm-up request failed: {type(why).__name__}: {why}") from error
        if self.batch is not None and job.fallback is not None:
            # The fallback would sample from the process-wide generator, so seeds would not hold.
            if self.settings.concurrency is not None:
                raise RuntimeError(f"requests cannot be batched: {job.fallback}; omit --concurrency")
            self._decode_one_at_a_time(f"requests cannot be batched: {job.fallback}")
        self.warm = True

    def _submit(
        self,
        job: Job,
        generation: Generation,
        choice: int,
        output: Output,
        on_deltas: OnDeltas,
        wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    ) -> asyncio.Future[None]:
        """Queue an output; return a future that completes when the output ends."""
        task = self.workers.submit(self._run, job, generation, choice, output, on_deltas, wrap, key=job.key)
        job.tasks.append(task)
        return asyncio.wrap_future(task)

    def _run(
        self,
        job: Job,
        generation: Generation,
        choice: int,
        output: Output,
        on_deltas: OnDeltas,
        wrap: Callable[[Drafter], Drafter],
    ) -> None:
        """Generate an output in a worker thread. A failure is logged, and raised as an ApiError without details."""
        begun = False
        try:
            job.check()
            drafter, begun = job.begin(), True
            if generation.scores_prompt:
                ids = generation.ids.to(self.target.device)
                on_deltas([output.push(scored_prompt(self.loaded.model, ids, generation.logprobs or 0))])
            if generation.config.max_new_tokens != 0:
                self._decode(job, generation, choice, output, on_deltas, wrap(drafter))
            on_deltas([output.end()])
        except CancelledError:
            raise
        except Exception as error:
            job.failure = client_error(error, f"generation {job.id}")
            raise job.failure from error
        finally:
            job.finish(begun)

    def _decode(
        self, job: Job, generation: Generation, choice: int, output: Output, on_deltas: OnDeltas, drafter: Drafter
    ) -> None:
        # Clients must not be able to predict each other's samples.
        seed = secrets.randbits(63) if generation.seed is None else generation.seed + choice
        hints = Hints(self._prefixes(job, generation), generation.prediction, generation.nodes)

        model = self._accelerated(drafter, seed, hints)
        acceleration = model.acceleration
        counted = _FirstToken(job, generation, on_deltas, acceleration.decode)
        acceleration.decode = counted.decode
        tokenizer, device = self.loaded.tokenizer, self.target.device
        try:
            model.generate(**generation.arguments(tokenizer, device, output, counted.put, job.check))
            if not acceleration.reached:
                acceleration.fallback = _ANOTHER_LOOP
        finally:
            with job.lock:
                job.stats += acceleration.stats
                job.fallback = acceleration.fallback

    def _prefixes(self, job: Job, generation: Generation) -> Prefixes | None:
        """Return the prefixes that an output starts from and adds to. Several outputs of an isolated job share their
        own, which end with the job.
        """
        if not generation.reuse or (job.isolated and (len(job.outputs) < 2 or self.settings.reproducible)):
            return None
        return self.prefixes.of(job.id if job.isolated else job.key)

    def _accelerated(self, drafter: Drafter, seed: int, hints: Hints) -> PreTrainedModel:
        """Return a view of the model whose `generate` decodes one sequence; called in a worker thread."""
        if self.batch is not None:
            return self.batch.model(drafter, seed, hints)
        torch.manual_seed(seed)
        return view(self.loaded.model, Acceleration(drafter, self._backend, self.target, hints=hints))

    def _decode_one_at_a_time(self, reason: str) -> None:
        """Disable batching. No sequence may be running."""
        self._close_threads()
        self.slots, self.batch, self.workers = BatchSlots(1, reason), None, WorkerPool()

    def _on_end(self, job: Job) -> None:
        with self._lock:
            self.prefixes.forget(job.id)
            del self._jobs[job.id]
            self._by_key[job.key] -= 1
            if job.outcome is not None:
                self.metrics.count_generation(job)

    async def save_at_intervals(self) -> None:
        """Save the shared matrix every `save_every` seconds, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.save_every)
            await asyncio.to_thread(self.pool.save, self.running > 0, self._between_steps)

    def _between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function between two decoding steps, when no drafter learns; return the future of its result."""
        return self.workers.submit(function) if self.batch is None else self.batch.between_steps(function)

    def end_all(self) -> None:
        """End all requests with an error, at the end of the grace period."""
        for job in list(self._jobs.values()):
            job.interrupt(ApiError(503, "the server is shutting down", "shutting_down", headers={"Retry-After": "1"}))

    def close(self) -> None:
        """End all requests and save the matrix; may be called repeatedly."""
        self.closing = True
        for job in list(self._jobs.values()):
            job.cancel()
        self._close_threads()
        self.grammars.close()
        self.pool.save()

    def _close_threads(self) -> None:
        self.workers.close()
        if self.batch is not None:
            self.batch.close()


class _FirstToken:
    """Counts the first token of an output, and the cached tokens of its prompt, which are known by then."""

    def __init__(self, job: Job, generation: Generation, on_deltas: OnDeltas, decode: Callable[..., Any]) -> None:
        """Wraps `on_deltas` and `decode`."""
        self._job, self._generation, self._on_deltas, self._decode = job, generation, on_deltas, decode
        self._stats = Stats()
        self._counted = False

    def decode(self, call: GenerateCall, drafter: Drafter, stats: Stats, *more: Any) -> Any:
        """Decode a call; `stats` counts its cached tokens."""
        self._stats = stats
        return self._decode(call, drafter, stats, *more)

    def put(self, deltas: list[Delta]) -> None:
        """Forward the deltas of a step."""
        if not self._counted:
            self._counted = True
            self._job.count_first_token(self._generation, self._stats.cached_tokens)
        self._on_deltas(deltas)


class _Arrivals(Generic[T]):
    """Async iterator over the items that worker threads put; ends when all their tasks have ended."""

    def __init__(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[T | None]()
        self._all: asyncio.Future[Any]

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def end_with(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """End the iteration after all tasks, or with the error of the first task that fails."""
        self._all = asyncio.gather(*tasks)
        self._all.add_done_callback(self._on_end)

    def _on_end(self, tasks: asyncio.Future[Any]) -> None:
        if not tasks.cancelled():
            tasks.exception()  # marks it as retrieved: nothing awaits it once the client has disconnected
        self._queue.put_nowait(None)

    def __aiter__(self) -> _Arrivals[T]:
        return self

    async def __anext__(self) -> T:
        item = await self._queue.get()
        if item is None:
            try:
                await self._all
            except asyncio.CancelledError:  # a task was cancelled; all tasks have ended
                raise CancelledError from None
            raise StopAsyncIteration
        return item


class WorkerPool:
    """Runs calls in threads; takes queued calls round-robin by API key."""

    def __init__(self, threads: int = 1) -> None:
        self.running = 0
        """Number of running calls."""
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="generation")
        self._waiting: dict[str, dict[Future[Any], Callable[[], Any]]] = {}
        """By key, in round-robin order: the next key first."""
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, fn: Callable[..., Any], *args: Any, key: str = "") -> Future[Any]:
        """Queue a call for a key; return the future of its result. Cancelling the future dequeues the call."""
        task: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(key, {})[task] = partial(fn, *args)
        task.add_done_callback(partial(self._withdraw, key))
        self._threads.submit(self._run_next)
        return task

    def close(self) -> None:
        """Wait for all queued calls; further calls are rejected."""
        self._threads.shutdown()

    def _withdraw(self, key: str, task: Future[Any]) -> None:
        """Remove a call from the queue, if it is still queued."""
        with self._lock:
            calls = self._waiting.get(key, {})
            if calls.pop(task, None) is not None and not calls:
                del self._waiting[key]

    def _run_next(self) -> None:
        """Run one call of the next key, then requeue that key last."""
        with self._lock:
            if not self._waiting:  # the remaining calls were cancelled
                return
            key = next(iter(self._waiting))
            calls = self._waiting.pop(key)
            task = next(iter(calls))
            call = calls.pop(task)
            if calls:
                self._waiting[key] = calls
            self.running += 1
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(call())
        except BaseException as error:
            task.set_exception(error)
        finally:
            with self._lock:
                self.running -= 1
