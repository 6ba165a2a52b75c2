"""The app: routes for OpenAI's API, for metrics and for steps, around one `Service`.

`create_app(model, tokenizer, ...)` makes a FastAPI app whose `state.service` is the `Service`. More routes are included
in `_routes`, from a module with a function `router(service) -> APIRouter`; the path `/` is free. A route that needs the
API key has a parameter of type `User`, which is the `Key`, or None where no keys are configured. One that generates
gets a job from `service.admit` and runs it as `steps.step_events` does. A page in a browser needs none of this: it asks
the route of `steps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ..model.loading import Loaded
from . import errors, wire
from .errors import CancelledError
from .job import Job
from .keys import Key
from .middleware import Gate
from .requests import ChatBody, ResponsesBody, StepsBody, TextBody, _Body
from .service import Service, Settings
from .steps import prepare, server_sent, step_events

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


async def _key_of(request: Request) -> Key | None:
    return request.app.state.service.key_of(request.headers.get("authorization"))


User = Annotated[Key | None, Depends(_key_of)]
"""Parameter of a route that needs an API key, where keys are configured."""


def create_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> FastAPI:
    """An app that serves a model; run it with one worker. `settings` are the fields of `Settings`.

    Raises ValueError for settings that do not fit; importing it from `token_recycling.serving` raises ValueError where
    the extra `serving` or the right version of transformers is not installed.
    """
    return app_of(Service(Loaded(model, tokenizer), Settings(**settings)))


def app_of(service: Service) -> FastAPI:
    """The app of a service."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.open()
        saving = asyncio.create_task(service.save_at_intervals())
        try:
            yield
        finally:
            saving.cancel()
            service.close()

    app = FastAPI(title="token-recycling", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    errors.install(app)
    app.add_middleware(Gate, service=service)
    _routes(app, service)
    return app


def _routes(app: FastAPI, service: Service) -> None:
    """All routes; further ones are included here."""
    app.include_router(_openai(service))
    app.include_router(_own(service))
    from .playground import router as playground  # which takes `User` from here

    app.include_router(playground(service))


def _openai(service: Service) -> APIRouter:
    """What OpenAI's API has."""
    router, name = APIRouter(), service.settings.name
    described = {"id": name, "object": "model", "created": service.created, "owned_by": "token-recycling"}

    @router.get("/v1/models")
    async def models(key: User) -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str, key: User) -> dict[str, Any]:
        service.check_model(model)
        return described

    @router.post("/v1/completions")
    async def completions(request: Request, body: TextBody, key: User) -> Response:
        return await _answer(service, service.text, request, body, service.admit(key, "cmpl-", **_chosen(body)))

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody, key: User) -> Response:
        service.check_chat()
        return await _answer(service, service.chat, request, body, service.admit(key, "chatcmpl-", **_chosen(body)))

    @router.post("/v1/responses")
    async def responses(request: Request, body: ResponsesBody, key: User) -> Response:
        service.check_chat()
        job = service.admit(key, "", **_chosen(body))
        return await _answer(service, service.responses, request, body, job)

    return router


def _own(service: Service) -> APIRouter:
    """What is ours, and the address at which the server is asked whether it lives."""
    router = APIRouter()

    @router.post("/v1/token_recycling/steps")
    async def steps(request: Request, body: StepsBody, key: User) -> Response:
        service.check_model(body.model)
        job = service.admit(key, "steps-", drafter=body.drafter, **_chosen(body))
        watch = asyncio.create_task(_gone(request, job))
        with _ended_if_refused(job, watch):
            arguments = prepare(service, body, job)
        return _streaming(server_sent(step_events(service, job, arguments)), job, watch)

    @router.post("/load_model")
    async def load_model(body: dict[str, Any]) -> Response:
        """What `transformers chat` asks before anything else; the model is loaded."""
        service.check_model(body.get("model"))
        ready = {"status": "ready", "model": service.settings.name, "cached": True}
        return Response(f"data: {json.dumps(ready)}\n\n", media_type="text/event-stream")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.check_metrics(request.headers.get("authorization"))
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "closing" if service.closing else "ok"}, 503 if service.closing else 200)

    return router


def _chosen(body: _Body) -> dict[str, Any]:
    return {"seed": body.seed, "stop": body.stops}


async def _answer(service: Service, handler: Any, request: Request, body: _Body, job: Job) -> Response:
    """What transformers' handler answers, completed."""
    watch = asyncio.create_task(_gone(request, job))
    with _ended_if_refused(job, watch):
        service.check_model(body.model)
        given = {**body.model_dump(exclude_unset=True), "stream": bool(body.stream)}
        try:
            response = await handler.handle_request(given, job.id)
        except CancelledError:
            return Response(status_code=499)
    if isinstance(response, StreamingResponse):
        source = wire.events(response.body_iterator, job, done=handler is not service.responses)  # type: ignore[arg-type]
        return _streaming(source, job, watch)
    watch.cancel()
    return JSONResponse(wire.complete(json.loads(response.body), job), headers={"x-request-id": job.id})


def _streaming(source: AsyncIterator[str], job: Job, watch: asyncio.Task[None]) -> StreamingResponse:
    async def watched() -> AsyncIterator[str]:
        try:
            async for some in source:
                yield some
        finally:
            watch.cancel()
            await source.aclose()  # type: ignore[attr-defined]

    headers = {"x-request-id": job.id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(watched(), media_type="text/event-stream", headers=headers)


async def _gone(request: Request, job: Job) -> None:
    """Waits until the client has gone, and cancels: even while there is nothing to send to it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


@contextlib.contextmanager
def _ended_if_refused(job: Job, watch: asyncio.Task[None]) -> Iterator[None]:
    """Ends a job whose request turns out to be wrong, and says so in OpenAI's form."""
    try:
        yield
    except Exception as error:
        watch.cancel()
        job.end()
        told = errors.told(error)
        if told is error:
            raise
        raise told from error
    except BaseException:  # the server ends while the client waits
        watch.cancel()
        job.cancel()
        raise
