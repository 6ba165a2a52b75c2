"""The settings of a server, validated on creation, and the default isolation of drafters between requests."""
# ruff: noqa: RUF009 - `option` makes fields

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal

from .._util.network import is_loopback
from .._util.options import check_declared, option
from .keys import METRICS, Key

_learning, _access, _limit = (partial(option, rich_help_panel=panel) for panel in ("Learning", "Access", "Limits"))
DEFAULT_OFFERS = ("recycling", "published", "suffix", "prompt_lookup", "lookahead")
"""Drafters that requests to /v1/token_recycling/steps may name by default."""


class Isolation(StrEnum):
    """Which requests share a drafter."""

    shared = "shared"
    """All requests."""
    per_key = "per-key"
    """The requests of one API key."""
    per_request = "per-request"
    """No sharing: every request starts with a copy of the base drafter, discarded afterwards."""


@dataclass(frozen=True)
class Settings:
    """The settings of a server. These fields are also the options of `token-recycling serve` and their help."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 picks a free one.", 0, max=65_535)
    name: str = option(
        "model",
        "Model name that clients send; may be repeated, and responses carry the first. Default: the hub name, or the "
        "name of the folder or file.",
    )
    aliases: tuple[str, ...] = ()
    """Additional names of the model."""
    drafter: str = "recycling"
    offers: tuple[str, ...] = option(
        DEFAULT_OFFERS,
        "Drafter to offer in the playground, untrained for every request; may be repeated; `none` offers none. "
        "Default: recycling, published, suffix, prompt_lookup, lookahead.",
        metavar="NAME[:OPTIONS]",
    )
    isolation: Isolation = _learning(
        None,
        "Which requests share a drafter; default: per-key with API keys, else shared on a loopback address, else "
        "per-request, as with --reproducible.",
    )
    matrix: Path | None = _learning(
        None,
        "Matrix file: loaded if it exists and saved with isolation shared; else the read-only initial matrix of each "
        "key or request.",
    )
    save_every: float = _learning(60.0, "Seconds between saves.", 0.001)
    reproducible: bool = _learning(
        False,
        "Give equal outputs for equal requests in 16 bits too: every request starts with a new drafter, nothing is "
        "cached.",
    )
    keys: tuple[Key, ...] = _access(
        (),
        "API key; may be repeated. A key without a name is named `default`.",
        metavar="[NAME:]KEY",
        envvar="TOKEN_RECYCLING_API_KEYS",
        show_envvar=True,
    )
    allow_hosts: tuple[str, ...] = _access(
        (),
        "Host name to accept in addition to those of this machine, without API keys; may be repeated.",
        metavar="NAME",
    )
    allow_origins: tuple[str, ...] = _access(
        (),
        "Origin of web pages that may use the server from a browser, such as https://example.com, or * for any; may be "
        "repeated.",
        metavar="ORIGIN",
    )
    tls_certificate: Path | None = _access(None, "PEM file of the certificate and its chain; enables HTTPS.")
    tls_key: Path | None = _access(None, "PEM file of the private key.")
    max_prompt_tokens: int | None = _limit(None, "Maximum prompt tokens; default: the model's context length.", 1)
    max_new_tokens: int | None = _limit(None, "Maximum output tokens; default: the model's context length.", 1)
    concurrency: int | None = _limit(
        None, "Maximum number of sequences decoded in one batch; default: 4 if they fit in memory, else fewer.", 1
    )
    cache: float | None = _limit(
        None, "Size of the prefix cache in megabytes; default: an eighth of free memory; 0 disables it.", 0
    )
    max_requests: int = _limit(32, "Maximum running plus queued requests; further requests get 503.", 1)
    max_requests_per_key: int | None = _limit(None, "The same limit per API key; further requests get 429.", 1)
    max_body: float = _limit(2.0, "Maximum size of a request body in megabytes.", 0.001)
    timeout: float | None = _limit(None, "Maximum seconds per request, queueing included.", 0.001)
    max_connections: int = _limit(512, "Maximum open connections; further ones get 503.", 1)
    grace: float = _limit(10.0, "Seconds to let in-flight requests finish at shutdown; new ones get 503.", 0)
    fast: Literal["auto", "on", "off"] = option(
        "auto",
        "Capture forward passes as CUDA graphs. auto: if possible; on: fail if impossible; off: never.",
    )
    log_format: Literal["text", "json"] = option(
        "text", "json: one line of JSON per response, generation, warning and error."
    )
    isolation_reason: str = field(init=False, default="set by --isolation")
    """The reason for the choice of `isolation`."""
    isolate_forwarded: bool = field(init=False, default=False)
    """Whether proxied requests are isolated although local requests share a drafter; set with the default isolation."""

    def __post_init__(self) -> None:
        check_declared(self)
        if self.isolation is None:
            isolation, reason = self._default_isolation()
            object.__setattr__(self, "isolation_reason", reason)
            object.__setattr__(self, "isolate_forwarded", isolation is Isolation.shared)
        else:
            isolation = Isolation(self.isolation)
        object.__setattr__(self, "isolation", isolation)
        users = [key for key in self.keys if key.name != METRICS]
        if self.isolation is Isolation.per_key and not users:
            raise ValueError("isolation per-key needs an API key, got none; add a key or choose another isolation")
        if self.reproducible and (across := ", ".join(self._across_requests())):
            raise ValueError(
                f"reproducible cannot be combined with {across}: requests would affect each other; omit one of them"
            )
        self._check_names()
        self._check_tls()

    def _default_isolation(self) -> tuple[Isolation, str]:
        """Return the default isolation and the reason for it."""
        if self.reproducible:
            return Isolation.per_request, "since equal requests must give equal outputs"
        if self.keys:
            return Isolation.per_key, "since API keys are configured"
        if is_loopback(self.host):
            reached = f"since {self.host} is reachable only from this machine, and no API keys are configured"
            return Isolation.shared, reached
        return Isolation.per_request, f"since other machines can reach {self.host}, and no API keys are configured"

    def _across_requests(self) -> Iterator[str]:
        """Yield the settings by which one request can change another's output."""
        if self.isolation is not Isolation.per_request:
            yield f"isolation {self.isolation.value}"
        if self.concurrency is not None and self.concurrency > 1:
            yield f"a concurrency of {self.concurrency}"
        if self.matrix is not None:
            yield "a matrix"
        if self.cache:
            yield f"a cache of {self.cache:g} MB"

    def _check_names(self) -> None:
        """Raise ValueError for hosts and origins that no request could name."""
        for host in self.allow_hosts:
            if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*", host):
                raise ValueError(f"an allowed host must be a name without scheme and port, got {host!r}")
        for origin in self.allow_origins:
            if not re.fullmatch(r"\*|null|[A-Za-z][\w+.-]*://[^/\s]+", origin):
                raise ValueError(f"an allowed origin must be * or SCHEME://HOST[:PORT] without a path, got {origin!r}")

    def _check_tls(self) -> None:
        """Raise ValueError for unusable TLS files."""
        certificate, key = self.tls_certificate, self.tls_key
        if certificate is None and key is None:
            return
        if certificate is None or key is None:
            raise ValueError("--tls-certificate and --tls-key must be given together, got only one")
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except OSError as error:
            why = error.strerror or str(error)
            raise ValueError(
                f"{certificate} and {key} must be a certificate and its key in PEM, without a password: {why}"
            ) from None
