"""`token-recycling serve`: start an OpenAI-compatible server with an accelerated model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from ...model import loading
from ...serving.keys import parse_keys
from ...serving.settings import DEFAULT_OFFERS, Isolation, Settings
from .. import console, running
from ..options import Drafting, ModelOptions, completed_drafters, declared

if TYPE_CHECKING:
    from ...serving.engine import Engine
    from ...serving.http_server import HttpServer

_DECLARED = {field.name: field for field in fields(Settings) if "help" in field.metadata}
_OF_SEVERAL = ("name", "offers", "isolation", "keys", "allow_hosts", "allow_origins")
"""Settings whose command-line form differs: lists, or options without a default."""


ServerOptions = make_dataclass(
    "ServerOptions",
    [
        (name, Annotated[kind, declared(_DECLARED[name])], _DECLARED[name].default)
        for name, kind in get_type_hints(Settings).items()
        if name in _DECLARED and name not in _OF_SEVERAL
    ],
    frozen=True,
)
"""The fields of `Settings` that become options unchanged."""


def serve(
    model: ModelOptions,
    server: ServerOptions,  # type: ignore[valid-type]
    name: Annotated[list[str] | None, declared(_DECLARED["name"])] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template that replaces the model's.")
    ] = None,
    drafter: Drafting = Settings.drafter,
    offer: Annotated[
        list[str] | None, declared(_DECLARED["offers"], "--offer", autocompletion=completed_drafters)
    ] = None,
    isolation: Annotated[Isolation | None, declared(_DECLARED["isolation"])] = None,
    api_key: Annotated[list[str] | None, declared(_DECLARED["keys"], "--api-key")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Access",
            envvar="TOKEN_RECYCLING_API_KEY_FILE",
            show_envvar=True,
            help="File of API keys, one NAME:KEY per line.",
        ),
    ] = None,
    allow_host: Annotated[list[str] | None, declared(_DECLARED["allow_hosts"], "--allow-host")] = None,
    allow_origin: Annotated[list[str] | None, declared(_DECLARED["allow_origins"], "--allow-origin")] = None,
) -> None:
    """Serve a model over the APIs of OpenAI (completions, chat, responses) and Anthropic (messages); Ctrl-C stops."""
    loading.check_source(model.model)
    settings = Settings(
        **vars(server),
        name=name[0] if name else loading.title(model.model),
        aliases=tuple(name[1:]) if name else (),
        drafter=drafter,
        offers=_offers(drafter, offer),
        isolation=isolation,  # type: ignore[arg-type]  # None: as the other settings suggest
        keys=parse_keys(api_key or [], api_key_file),
        allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
    )
    host = settings.host
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8-sig")
    with contextlib.closing(_bound(host, settings.port)) as listener:
        from ...serving import check_installed

        check_installed()
        from ...serving.app import app_of
        from ...serving.engine import Engine
        from ...serving.http_server import HttpServer
        from ...serving.prompt import why_prompted_tools

        with running.loading_progress(model.model):
            loaded = model.load(settings.reproducible)
        running.note_dtype(model.dtype, loaded)
        if template is not None:
            loaded.tokenizer.chat_template = template
        engine = Engine(loaded, settings)
        scheme, shown_host = (
            "http" if settings.tls_certificate is None else "https",
            f"[{host}]" if ":" in host else host,
        )
        address = f"{scheme}://{shown_host}:{listener.getsockname()[1]}"
        console.note(f"isolation {settings.isolation.value}, {settings.isolation_reason}")
        with console.working("completing a warm-up request, so that no client waits for one-time costs"):
            asyncio.run(engine.warm_up())
        console.note(str(engine.slots))
        if loaded.tokenizer.chat_template and (reason := why_prompted_tools(loaded)):
            console.note(f"tools are described in the prompt: {reason}")
        serving = f"serving {settings.name} at {address}/v1; playground at {address}; Ctrl-C ends"
        _run(HttpServer(app_of(engine), partial(console.note, serving)), engine, listener)


def _offers(drafter: str, offer: list[str] | None) -> tuple[str, ...]:
    """Return the drafters that requests may select: those of `--offer`, else the default ones, in which the server's
    own drafter keeps its options.
    """
    if offer is not None:
        return tuple(spec for spec in offer if spec != "none")
    own = (drafter,) if drafter.partition(":")[0] in DEFAULT_OFFERS else ()
    return tuple(dict.fromkeys((*own, *DEFAULT_OFFERS)))


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket, created before any slow work; raises ValueError. The socket does not listen yet: until the
    model is loaded, clients and health checks are refused instead of kept waiting.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # as `socket.create_server` does
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        return listener
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def _run(server: HttpServer, engine: Engine, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; the exit status after either is 0."""
    # uvicorn raises the signal again after its shutdown. Before uvicorn starts, SIGTERM ends the process immediately.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(engine):
        server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)
