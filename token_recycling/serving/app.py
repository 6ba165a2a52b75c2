"""The app: routes of one `Engine` for OpenAI's and Anthropic's APIs, metrics and steps.

`create_app(model, tokenizer, ...)` returns a FastAPI app whose `state.engine` is the `Engine`. Add custom routes with
`app.include_router`. A route that needs the API key has a parameter of type `access.User`: the `Key`, or None if no
keys are configured. To add an API, write a module like those in `api`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import inspect
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from ..model.loading import Loaded
from . import playground
from .access import LimitMiddleware, LocalNamesMiddleware, MetricsUser, User, client_key, is_local
from .api import chat, completions, messages, responses, steps
from .api.common import Api, EventStream, events_of, whole_of
from .api.completions import CompletionRequest
from .api.messages import MessagesRequest, TokenCountRequest
from .api.responses import ResponsesRequest
from .api.steps import StepsRequest
from .engine import Engine, Job
from .errors import ApiError, CancelledError, add_error_handlers, client_error, shown
from .grammars import unenforced_header
from .keys import Key
from .protocol import ChatRequest
from .protocol import Request as Body
from .settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _JsonRequest(Request):
    """Parses its body with pydantic's parser, which rejects values that templates or UTF-8 cannot represent: NaN, lone
    surrogates, and values nested more than 200 deep. A byte order mark is skipped, as RFC 8259 allows.
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
            if has_body:  # before the body is read
                await client_key(request)
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def create_app(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> FastAPI:
    """Return an app that serves a model; run it with one worker. `settings` are the fields of `Settings`.

    Raises ValueError for settings that do not fit the model, and UnsupportedModelError for a model that cannot be
    accelerated. Importing this function from `token_recycling.serving` raises ValueError if the extra `serving` is not
    installed.
    """
    return app_of(Engine(Loaded(model, tokenizer), Settings(**settings)))


def app_of(engine: Engine) -> FastAPI:
    """Return the app of an engine."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.warm_up()
        saving = asyncio.create_task(engine.save_at_intervals())
        try:
            yield
        finally:
            saving.cancel()
            engine.close()

    app = FastAPI(
        title="token-recycling", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.state.engine = engine
    add_error_handlers(app)
    if not engine.settings.keys:
        hosts, origins = engine.settings.allow_hosts, engine.settings.allow_origins
        app.add_middleware(LocalNamesMiddleware, allowed=hosts, origins=origins)
    app.add_middleware(LimitMiddleware, max_bytes=int(engine.settings.max_body * 1_000_000), metrics=engine.metrics)
    if engine.settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=engine.settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-unenforced-keywords"],
            **_OF_PRIVATE_NETWORKS,
        )
    for router in (_openai_routes(engine), _own_routes(engine), playground.router(engine)):
        app.include_router(router)
    return app


_OF_PRIVATE_NETWORKS: Any = (
    {"allow_private_network": True} if "allow_private_network" in inspect.signature(CORSMiddleware).parameters else {}
)
"""Chromium asks for it before a public page's request to a local server; supported by Starlette 0.51 and later."""


def _openai_routes(engine: Engine) -> APIRouter:
    """Return the routes of OpenAI's and Anthropic's APIs."""
    router, described = APIRouter(route_class=_JsonRoute), _described_models(engine)

    @router.get("/v1/models")
    async def models(key: User) -> dict[str, Any]:
        names = list(described)
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        # Codex expects its own catalog in `models`, and reports an error without one.
        return {"object": "list", "data": list(described.values()), "models": [], **pages}

    @router.get("/v1/models/{model:path}")
    async def model(model: str, key: User) -> dict[str, Any]:
        _check_model(engine, model)
        return described[model]

    @router.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest, key: User) -> Response:
        return await _respond(engine, request, body, key, completions)

    @router.post("/v1/chat/completions")
    async def converse(request: Request, body: ChatRequest, key: User) -> Response:
        return await _respond(engine, request, body, key, chat)

    @router.post("/v1/responses")
    async def respond(request: Request, body: ResponsesRequest, key: User) -> Response:
        return await _respond(engine, request, body, key, responses)

    @router.post("/v1/messages")
    async def message(request: Request, body: MessagesRequest, key: User) -> Response:
        return await _respond(engine, request, body, key, messages)

    @router.post("/v1/messages/count_tokens")
    async def counted(body: TokenCountRequest, key: User) -> dict[str, Any]:
        _check_model(engine, body.model)
        return await messages.count_tokens(engine, body)

    @router.post("/v1/embeddings")
    async def embeddings(key: User) -> Response:
        raise ApiError(400, "embeddings are not supported; this server serves a language model", "unsupported")

    return router


def _described_models(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return a description of the model under each of its names, with the fields of OpenAI's and Anthropic's API."""
    created = int(time.time())
    return {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "token-recycling",
            "max_model_len": engine.loaded.context,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        }
        for name in (engine.settings.name, *engine.settings.aliases)
    }


def _own_routes(engine: Engine) -> APIRouter:
    """Return the routes of steps, metrics and health."""
    router = APIRouter(route_class=_JsonRoute)

    @router.post("/v1/token_recycling/steps")
    async def show_steps(request: Request, body: StepsRequest, key: User) -> Response:
        job = _admit(engine, request, body, key, steps.PREFIX, body.drafter)
        with _cancelled_on_disconnect(request, job):
            generation = await steps.prepare(engine, body, job)
        return EventStream(job, steps.events_of(engine, job, generation), _headers(job))

    @router.get("/metrics")
    async def metrics(key: MetricsUser) -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "closing" if engine.closing else "ok"}, 503 if engine.closing else 200)

    return router


async def _respond(engine: Engine, request: Request, body: Body, key: Key | None, api: Api) -> Response:
    """Return the response of an API to a request, streamed if requested."""
    job = _admit(engine, request, body, key, api.PREFIX)
    with _cancelled_on_disconnect(request, job):
        reply = await api.prepare(engine, body, job)
        if not body.stream:
            return JSONResponse(await whole_of(engine, job, reply), headers=_headers(job))
    return EventStream(job, events_of(engine, job, reply), _headers(job))


def _admit(
    engine: Engine, request: Request, body: Body, key: Key | None, prefix: str, drafter: str = "accelerated"
) -> Job:
    """Accept a request as a job; raise ApiError."""
    _check_model(engine, body.model)
    drafts = body.speculation is None or body.speculation.enabled
    return engine.admit(key, prefix, drafter if drafts else "plain", is_local(request.scope))


def _headers(job: Job) -> dict[str, str]:
    """Return the response headers of a job, after its schemas have been compiled."""
    return {"x-request-id": job.id, **unenforced_header(job.unenforced)}


@contextlib.contextmanager
def _cancelled_on_disconnect(request: Request, job: Job) -> Iterator[None]:
    """Cancel the job if its client disconnects within the block, for example during rendering of the prompt; streams
    detect disconnects themselves. If the block raises, end the job and raise the error as an ApiError.
    """

    async def cancel_on_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watch = asyncio.create_task(cancel_on_disconnect())
    try:
        yield
    except CancelledError:  # after job.cancel(), which also ends the job
        raise
    except Exception as error:
        job.end()
        raise client_error(error, "preparing a request") from error
    except BaseException:  # the server shuts down while the client waits
        job.cancel()
        raise
    finally:
        watch.cancel()


def _check_model(engine: Engine, name: str | None) -> None:
    """Raise ApiError unless `name` is a name of the served model or None."""
    names = [engine.settings.name, *engine.settings.aliases]
    if name is not None and name not in names:
        message = f"model must be {' or '.join(map(repr, names))}, got {shown(name)}"
        raise ApiError(404, message, "model_not_found", "model")
