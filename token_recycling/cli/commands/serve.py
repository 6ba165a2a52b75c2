"""`token-recycling serve`: an OpenAI-compatible server with an accelerated model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...model import loading
from ...serving.keys import parse_keys
from ...serving.settings import DEFAULT_OFFERS, Isolation, Settings, default_isolation
from .. import console, running
from ..options import (
    Device,
    DeviceMap,
    Drafting,
    DType,
    Model,
    ModelOptions,
    Prepack,
    Threads,
    completed_drafters,
    takes,
)

if TYPE_CHECKING:
    from ...serving.engine import Engine
    from ...serving.http_server import HttpServer

_KEYS, _KEY_FILE = "TOKEN_RECYCLING_API_KEYS", "TOKEN_RECYCLING_API_KEY_FILE"
_learning, _access = (partial(typer.Option, rich_help_panel=panel) for panel in ("Learning", "Access"))


@takes(Settings)
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Model name that clients send; may be repeated, and responses carry the first. Default: the hub name, "
            "or that of the folder or file."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template instead of the model's.")
    ] = None,
    drafter: Drafting = "recycling",
    offer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTIONS]",
            autocompletion=completed_drafters,
            help="Drafter that the playground may use instead, new for every request; may be repeated; `none` offers "
            "none. Default: recycling, published, suffix, prompt_lookup, lookahead.",
        ),
    ] = None,
    isolation: Annotated[
        Isolation | None,
        _learning(
            help="Which requests share a drafter; default per-key with API keys, else shared on a loopback address, "
            "else per-request, as with --reproducible."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _access(
            metavar="[NAME:]KEY",
            envvar=_KEYS,
            show_envvar=True,
            help="API key; may be repeated. Without a name its name is `default`.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _access(envvar=_KEY_FILE, show_envvar=True, help="File of API keys, one NAME:KEY per line."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        _access(
            metavar="NAME",
            help="Host name to accept in addition to those of this machine, without API keys; may be repeated.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        _access(
            metavar="ORIGIN",
            help="Origin of web pages that may use the server from a browser, such as https://example.com, or * for "
            "any; may be repeated.",
        ),
    ] = None,
    tls_certificate: Annotated[Path | None, _access(help="File of the certificate and its chain, PEM: HTTPS.")] = None,
    tls_key: Annotated[Path | None, _access(help="File of its private key, PEM.")] = None,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: one line of JSON per response, generation, warning and error."),
    ] = "text",
    dtype: DType = None,
    device: Device = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    prepack: Prepack = None,
    **settings: Any,
) -> None:
    """Serve a model by the APIs of OpenAI (completions, chat, responses) and Anthropic (messages); Ctrl-C stops it."""
    loading.check_source(model)
    options = ModelOptions(model, dtype, device, device_map, threads, prepack, settings["reproducible"])
    keys = parse_keys(api_key or [], api_key_file)
    learning, why = (
        (isolation, "as asked") if isolation else default_isolation(host, bool(keys), settings["reproducible"])
    )
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    with contextlib.closing(_bound(host, port)) as listener:
        from ...serving import check_installed

        check_installed()
        from ...serving.app import app_of
        from ...serving.engine import Engine
        from ...serving.http_server import HttpServer, tls_options
        from ...serving.metrics import log_json_lines
        from ...serving.tools import why_prompted_tools

        uvicorns = tls_options(tls_certificate, tls_key)
        chosen = Settings(
            name=name[0] if name else loading.title(model),
            aliases=tuple(name[1:]) if name else (),
            drafter=drafter,
            offers=_offers(drafter, offer),
            isolation=learning,
            isolate_forwarded=isolation is None,
            keys=keys,
            allow_hosts=tuple(allow_host or ()),
            allow_origins=tuple(allow_origin or ()),
            **settings,
        )
        with running.loading_shown(model):
            loaded = options.load()
        running.note_dtype(dtype, loaded)
        if template is not None:
            loaded.tokenizer.chat_template = template
        engine = Engine(loaded, chosen)
        address = f"http{'s' if uvicorns else ''}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        console.note(f"isolation {learning.value}, {why}")
        with console.working("completing a warm-up request, so that no client waits for one-time costs"):
            asyncio.run(engine.warm_up())
        console.note(str(engine.slots))
        if loaded.tokenizer.chat_template and (reason := why_prompted_tools(loaded)):
            console.note(f"tools are described in the prompt: {reason}")
        serving = f"serving {chosen.name} at {address}/v1; playground at {address}; Ctrl-C ends"
        if log_format == "json":
            log_json_lines()
            uvicorns["log_config"] = None
        _run(HttpServer(app_of(engine), partial(console.note, serving), **uvicorns), engine, listener)


def _offers(drafter: str, offer: list[str] | None) -> tuple[str, ...]:
    """Return the drafters that requests may choose: those of `--offer`, else the default ones, and the server's own
    with its options if it is among them.
    """
    if offer is not None:
        return tuple(spec for spec in offer if spec != "none")
    own = (drafter,) if drafter.partition(":")[0] in DEFAULT_OFFERS else ()
    return tuple(dict.fromkeys((*own, *DEFAULT_OFFERS)))


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket, made before anything slow; raises ValueError. It does not listen: until the model is
    loaded, clients and health checks are refused rather than kept waiting.
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
    """Serve until SIGINT or SIGTERM, after either of which the exit status is 0."""
    # uvicorn raises the signal again after its shutdown; before it starts, a SIGTERM ends the process at once.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(engine):
        server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)
