"""`token-recycling serve`: an OpenAI-compatible server with an accelerated model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...model import loading
from ...serving.keys import parse_keys
from ...serving.settings import DEFAULT_OFFERS, Isolation, Settings
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
)

if TYPE_CHECKING:
    from ...serving.engine import Engine
    from ...serving.http_server import HttpServer

_DECLARED = {field.name: field.metadata for field in fields(Settings)}


def _option(setting: str, flag: str = "", **more: Any) -> Any:
    """Return the option for a field of `Settings`, which declares its help, its bounds and how it is shown."""
    return typer.Option(flag or f"--{setting.replace('_', '-')}", **_DECLARED[setting], **more)


def serve(
    model: Model,
    host: Annotated[str, _option("host")] = Settings.host,
    port: Annotated[int, _option("port")] = Settings.port,
    name: Annotated[list[str] | None, _option("name")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template instead of the model's.")
    ] = None,
    drafter: Drafting = Settings.drafter,
    offer: Annotated[list[str] | None, _option("offers", "--offer", autocompletion=completed_drafters)] = None,
    isolation: Annotated[Isolation | None, _option("isolation")] = None,
    matrix: Annotated[Path | None, _option("matrix")] = Settings.matrix,
    save_every: Annotated[float, _option("save_every")] = Settings.save_every,
    reproducible: Annotated[bool, _option("reproducible")] = Settings.reproducible,
    api_key: Annotated[list[str] | None, _option("keys", "--api-key")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Access",
            envvar="TOKEN_RECYCLING_API_KEY_FILE",
            show_envvar=True,
            help="File of API keys, one NAME:KEY per line.",
        ),
    ] = None,
    allow_host: Annotated[list[str] | None, _option("allow_hosts", "--allow-host")] = None,
    allow_origin: Annotated[list[str] | None, _option("allow_origins", "--allow-origin")] = None,
    tls_certificate: Annotated[Path | None, _option("tls_certificate")] = Settings.tls_certificate,
    tls_key: Annotated[Path | None, _option("tls_key")] = Settings.tls_key,
    max_prompt_tokens: Annotated[int | None, _option("max_prompt_tokens")] = Settings.max_prompt_tokens,
    max_new_tokens: Annotated[int | None, _option("max_new_tokens")] = Settings.max_new_tokens,
    concurrency: Annotated[int | None, _option("concurrency")] = Settings.concurrency,
    cache: Annotated[float | None, _option("cache")] = Settings.cache,
    max_requests: Annotated[int, _option("max_requests")] = Settings.max_requests,
    max_requests_per_key: Annotated[int | None, _option("max_requests_per_key")] = Settings.max_requests_per_key,
    max_body: Annotated[float, _option("max_body")] = Settings.max_body,
    timeout: Annotated[float | None, _option("timeout")] = Settings.timeout,
    max_connections: Annotated[int, _option("max_connections")] = Settings.max_connections,
    grace: Annotated[float, _option("grace")] = Settings.grace,
    fast: Annotated[Literal["auto", "on", "off"], _option("fast")] = Settings.fast,
    log_format: Annotated[Literal["text", "json"], _option("log_format")] = Settings.log_format,
    dtype: DType = None,
    device: Device = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
    prepack: Prepack = None,
) -> None:
    """Serve a model by the APIs of OpenAI (completions, chat, responses) and Anthropic (messages); Ctrl-C stops it."""
    loading.check_source(model)
    options = ModelOptions(model, dtype, device, device_map, threads, prepack, reproducible)
    settings = Settings(
        host=host,
        port=port,
        name=name[0] if name else loading.title(model),
        aliases=tuple(name[1:]) if name else (),
        drafter=drafter,
        offers=_offers(drafter, offer),
        isolation=isolation,  # type: ignore[arg-type]  # None: as the other settings suggest
        matrix=matrix,
        save_every=save_every,
        reproducible=reproducible,
        keys=parse_keys(api_key or [], api_key_file),
        allow_hosts=tuple(allow_host or ()),
        allow_origins=tuple(allow_origin or ()),
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        cache=cache,
        max_requests=max_requests,
        max_requests_per_key=max_requests_per_key,
        max_body=max_body,
        timeout=timeout,
        max_connections=max_connections,
        grace=grace,
        fast=fast,
        log_format=log_format,
    )
    template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
    with contextlib.closing(_bound(host, port)) as listener:
        from ...serving import check_installed

        check_installed()
        from ...serving.app import app_of
        from ...serving.engine import Engine
        from ...serving.http_server import HttpServer
        from ...serving.prompt import why_prompted_tools

        with running.loading_shown(model):
            loaded = options.load()
        running.note_dtype(dtype, loaded)
        if template is not None:
            loaded.tokenizer.chat_template = template
        engine = Engine(loaded, settings)
        scheme, shown_host = "http" if tls_certificate is None else "https", f"[{host}]" if ":" in host else host
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
