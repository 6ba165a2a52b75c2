"""How a model is served, checked when it is stated, and whose texts a drafter may learn from by default."""
# ruff: noqa: RUF009 - `option` makes fields

from __future__ import annotations

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
"""Drafters that requests for steps may name where the operator lists none."""


class Isolation(StrEnum):
    """Who shares a drafter."""

    shared = "shared"
    """All requests."""
    per_key = "per-key"
    """The requests of one API key."""
    per_request = "per-request"
    """None: every request begins with a copy of the base, which is dropped afterwards."""


@dataclass(frozen=True)
class Settings:
    """How a model is served. The options of `token-recycling serve` and its help are these fields."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes a free one.", 0, max=65_535)
    name: str = option(
        "model",
        "Model name that clients send; may be repeated, and responses carry the first. Default: the hub name, or that "
        "of the folder or file.",
    )
    aliases: tuple[str, ...] = ()
    """Further names for the model."""
    drafter: str = "recycling"
    offers: tuple[str, ...] = option(
        DEFAULT_OFFERS,
        "Drafter that the playground may use instead, new for every request; may be repeated; `none` offers none. "
        "Default: recycling, published, suffix, prompt_lookup, lookahead.",
        metavar="NAME[:OPTIONS]",
    )
    isolation: Isolation = _learning(
        None,
        "Which requests share a drafter; default per-key with API keys, else shared on a loopback address, else "
        "per-request, as with --reproducible.",
    )
    matrix: Path | None = _learning(
        None,
        "Matrix file, loaded if it exists and saved with isolation shared; otherwise read-only, the start of each "
        "key's or request's own.",
    )
    save_every: float = _learning(60.0, "Seconds between saves.", 0.001)
    reproducible: bool = _learning(
        False,
        "Give equal requests equal outputs in 16 bits too: every request starts with a new drafter, and nothing is "
        "cached.",
    )
    keys: tuple[Key, ...] = _access(
        (),
        "API key; may be repeated. Without a name its name is `default`.",
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
    tls_certificate: Path | None = _access(None, "File of the certificate and its chain, PEM: HTTPS.")
    tls_key: Path | None = _access(None, "File of its private key, PEM.")
    max_prompt_tokens: int | None = _limit(None, "Maximum prompt tokens; default the model's context.", 1)
    max_new_tokens: int | None = _limit(None, "Maximum output tokens; default the model's context.", 1)
    concurrency: int | None = _limit(
        None, "Maximum number of sequences decoded in one batch; default 4 where they fit in memory, else fewer.", 1
    )
    cache: float | None = _limit(
        None, "Size of the prefix cache in megabytes; default an eighth of free memory, 0 disables it.", 0
    )
    max_requests: int = _limit(32, "Maximum running plus queued requests; further ones get 503.", 1)
    max_requests_per_key: int | None = _limit(None, "The same per API key; further ones get 429.", 1)
    max_body: float = _limit(2.0, "Maximum size of a request body in megabytes.", 0.001)
    timeout: float | None = _limit(None, "Maximum seconds per request, queueing included.", 0.001)
    max_connections: int = _limit(512, "Maximum open connections; further ones get 503.", 1)
    grace: float = _limit(10.0, "Seconds to let in-flight requests finish at shutdown; new ones get 503.", 0)
    fast: Literal["auto", "on", "off"] = option(
        "auto",
        "Capture forward passes as CUDA graphs: auto where possible on CUDA, on or an error, off never.",
    )
    log_format: Literal["text", "json"] = option(
        "text", "json: one line of JSON per response, generation, warning and error."
    )
    isolation_reason: str = field(init=False, default="set by --isolation")
    """Why the requests are isolated as they are."""
    isolate_forwarded: bool = field(init=False, default=False)
    """Whether a request that a proxy forwarded is isolated where those of this machine are shared: by default."""

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
                f"reproducible cannot be combined with {across}, by which one request changes another; omit one of them"
            )
        self._check_tls()

    def _default_isolation(self) -> tuple[Isolation, str]:
        """Return the isolation where none is stated, and the reason for it."""
        if self.reproducible:
            return Isolation.per_request, "since equal requests are to give equal texts"
        if self.keys:
            return Isolation.per_key, "since API keys are configured"
        if is_loopback(self.host):
            reached = f"since {self.host} is reached from this machine alone, and no API keys are configured"
            return Isolation.shared, reached
        return Isolation.per_request, f"since {self.host} is reached from elsewhere, and no API keys are configured"

    def _across_requests(self) -> Iterator[str]:
        """Yield the settings by which one request can change another's text."""
        if self.isolation is not Isolation.per_request:
            yield f"isolation {self.isolation.value}"
        if self.concurrency is not None and self.concurrency > 1:
            yield f"a concurrency of {self.concurrency}"
        if self.matrix is not None:
            yield "a matrix"
        if self.cache:
            yield f"a cache of {self.cache:g} MB"

    def _check_tls(self) -> None:
        """Raise ValueError for files of TLS that cannot be used."""
        certificate, key = self.tls_certificate, self.tls_key
        if certificate is None and key is None:
            return
        if certificate is None or key is None:
            raise ValueError("--tls-certificate and --tls-key are needed together, got one of them")
        import ssl

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except OSError as error:
            why = error.strerror or str(error)
            raise ValueError(
                f"{certificate} and {key} must be a certificate and its key in PEM, without a password: {why}"
            ) from None
