"""The app: routes for OpenAI's and Anthropic's APIs, for metrics and for steps, around one `Service`.

`create_app(model, tokenizer, ...)` makes a FastAPI app whose `state.service` is the `Service`. Custom routes are
added with `app.include_router`. One that needs the API key has a parameter of type `access.User`, which is the `Key`,
or None where no keys are configured. One that generates is an `answers.Answer`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json

from ..model.loading import Loaded
from . import playground
from .access import LimitMiddleware, LocalNamesMiddleware, MetricsUser, User, client_key, is_local
from .answers import Answer
from .chat import ChatAnswer
from .completions import CompletionAnswer
from .errors import ApiError, CancelledError, add_error_handlers, client_error
from .job import Job
from .keys import Key
from .messages import MessageAnswer, MessagesRequest, TokenCountRequest, count_tokens
from .protocol import ChatRequest, CompletionRequest, StepsRequest
from .protocol import Request as Body
from .responses import ResponseAnswer, ResponsesRequest
from .sequences import sequences_of
from .service import Service
from .settings import Settings
from .steps import StepsAnswer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_WARM_UP = CompletionRequest.model_validate({"prompt": "The first of the", "max_tokens": 8})
_SILENCE = 15.0
"""Seconds without an event before a stream gets a comment."""


class _JsonRequest(Request):
    """Reads its body with pydantic's parser, which refuses what templates and UTF-8 cannot take: NaN, half a surrogate
    pair, and values nested more than 200 deep. A byte order mark is skipped, as RFC 8259 allows.
    """

    async def json(self) -> Any:
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)
        try:
            value = from_json(body, allow_inf_nan=False)
            if _MAY_OVERFLOW.search(body):
                json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
        except ValueError as error:
            raise ApiError(400, f"the body must be a JSON object in UTF-8: {error}", "invalid_body") from None
        return value


_MAY_OVERFLOW = re.compile(rb"[0-9][eE]\+?[0-9]{3}|[0-9]{300}")


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, has_body = super().get_route_handler(), self.body_field is not None

        async def handle(request: Request) -> Response:
            if has_body:  # before it is read
                await client_key(request)
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


async def warm_up(service: Service) -> None:
    """Compile what the first requests would wait for, by a request of the server's own. Raise RuntimeError if it fails,
    or if requests must be batched and this one was not.
    """
    if service.warm:
        return
    job = Job(service.decoder, service.pool.base.fork, warm_up=True)
    ids = service.loaded.tokenizer(_WARM_UP.prompts, return_tensors="pt")["input_ids"]
    (sequence,), _ = await sequences_of(service, job, ids, _WARM_UP)
    try:
        await service.decoder.workers.async_submit(job.generate, sequence, lambda tokens: None)
    except Exception as error:
        why = error.__cause__ or error  # an ApiError does not say it
        raise RuntimeError(f"the warm-up request failed: {type(why).__name__}: {why}") from error
    if service.decoder.batch is not None and job.fallback is not None:
        # It would sample from the generator of the whole process, so that seeds would not hold.
        if service.settings.concurrency is not None:
            raise RuntimeError(f"requests cannot be batched: {job.fallback}; omit --concurrency")
        service.decoder.unbatch(f"requests cannot be batched: {job.fallback}")
    service.warm = True


def create_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> FastAPI:
    """An app that serves a model; run it with one worker. `settings` are the fields of `Settings`.

    Raises ValueError for settings that do not fit; importing it from `token_recycling.serving` raises ValueError where
    the extra `serving` is not installed.
    """
    return app_of(Service(Loaded(model, tokenizer), Settings(**settings)))


def app_of(service: Service) -> FastAPI:
    """The app of a service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await warm_up(service)
        saving = asyncio.create_task(service.save_at_intervals())
        try:
            yield
        finally:
            saving.cancel()
            service.close()

    app = FastAPI(
        title="token-recycling", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.state.service = service
    add_error_handlers(app)
    if not service.settings.keys:
        hosts, origins = service.settings.allow_hosts, service.settings.allow_origins
        app.add_middleware(LocalNamesMiddleware, allowed=hosts, origins=origins)
    app.add_middleware(LimitMiddleware, max_bytes=int(service.settings.max_body * 1_000_000), metrics=service.metrics)
    if service.settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    for router in (_openai_routes(service), _own_routes(service), playground.router(service)):
        app.include_router(router)
    return app


def _openai_routes(service: Service) -> APIRouter:
    """OpenAI's API."""
    router, name = APIRouter(route_class=_JsonRoute), service.settings.name
    described = {
        one: {
            "id": one,
            "object": "model",
            "created": service.created,
            "owned_by": "token-recycling",
            "max_model_len": service.loaded.context,
            # Anthropic's fields.
            "type": "model",
            "display_name": one,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        }
        for one in (name, *service.settings.aliases)
    }

    @router.get("/v1/models")
    async def models(key: User) -> dict[str, Any]:
        names = list(described)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": list(described.values()), **pages}

    @router.get("/v1/models/{model:path}")
    async def model(model: str, key: User) -> dict[str, Any]:
        service.check_model(model)
        return described[model]

    @router.post("/v1/completions")
    async def text(request: Request, body: CompletionRequest, key: User) -> Response:
        return await _answer(service, CompletionAnswer, request, body, key)

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest, key: User) -> Response:
        return await _answer(service, ChatAnswer, request, body, key)

    @router.post("/v1/responses")
    async def items(request: Request, body: ResponsesRequest, key: User) -> Response:
        return await _answer(service, ResponseAnswer, request, body, key)

    @router.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest, key: User) -> Response:
        return await _answer(service, MessageAnswer, request, body, key)

    @router.post("/v1/messages/count_tokens")
    async def counted(body: TokenCountRequest, key: User) -> dict[str, Any]:
        service.check_model(body.model)
        return await count_tokens(service, body)

    @router.post("/v1/embeddings")
    async def embeddings(key: User) -> Response:
        raise ApiError(400, "this server makes no embeddings; it serves a model that continues texts", "unsupported")

    return router


def _own_routes(service: Service) -> APIRouter:
    """Steps, metrics and health."""
    router = APIRouter(route_class=_JsonRoute)

    @router.post("/v1/token_recycling/steps")
    async def steps(request: Request, body: StepsRequest, key: User) -> Response:
        return await _answer(service, StepsAnswer, request, body, key, body.drafter)

    @router.get("/metrics")
    async def metrics(key: MetricsUser) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "closing" if service.closing else "ok"}, 503 if service.closing else 200)

    return router


async def _answer(
    service: Service, kind: type[Answer], request: Request, body: Body, key: Key | None, drafter: str = "accelerated"
) -> Response:
    """The answer to a request, streamed where it asks for that."""
    service.check_model(body.model)
    job = service.create_job(key, body, kind.prefix, drafter, is_local(request.scope))
    with _cancelled_on_disconnect(request, job) as watch:
        answer = await kind.prepare(service, body, job)
        if body.stream or kind is StepsAnswer:
            headers = {"x-request-id": job.id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(
                _kept_alive(_watched(answer, watch)), media_type="text/event-stream", headers=headers
            )
        whole = await answer.complete()
    watch.cancel()
    return JSONResponse(whole, headers={"x-request-id": job.id})


async def _watched(answer: Answer, watch: asyncio.Task[None]) -> AsyncGenerator[str]:
    try:
        async with contextlib.aclosing(answer.streamed()) as events:
            async for event in events:
                yield event
    finally:
        watch.cancel()


async def _kept_alive(events: AsyncGenerator[str]) -> AsyncIterator[str]:
    """Add a comment wherever nothing came for a while, as during the prefill of a long prompt: clients and proxies
    close connections that stay silent.
    """
    async with contextlib.aclosing(events):
        while True:
            event = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait({event}, timeout=_SILENCE))[0]:
                    yield ": keep-alive\n\n"
            finally:
                if not event.done():
                    event.cancel()
                    await asyncio.wait({event})
            if (written := event.result()) is None:
                return
            yield written


@contextlib.contextmanager
def _cancelled_on_disconnect(request: Request, job: Job) -> Iterator[asyncio.Task[None]]:
    """Cancels the job when its client disconnects, even while there is nothing to send; gives the task that watches,
    which goes on after the block. If the block raises, the job ends, and the error is raised as an ApiError.
    """

    async def cancel_on_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watch = asyncio.create_task(cancel_on_disconnect())
    try:
        yield watch
    except CancelledError:
        watch.cancel()
        job.end()
        raise
    except Exception as error:
        watch.cancel()
        job.end()
        raise client_error(error, "preparing a request") from error
    except BaseException:  # the server ends while the client waits
        watch.cancel()
        job.cancel()
        raise
