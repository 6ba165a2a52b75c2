"""Clients of every kind, in threads: those who ask, those who leave, and those who send what nobody should.

Each exchange has an outcome; what may happen to an honest client while the server is being killed is an outcome too,
`lost`, and counts as a failure at any other time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import openai

from .expected import Plain, Wish
from .server import HOST, Server

_PATIENCE = 60.0
"""Seconds after which an answer counts as one that never came."""
_STOPS = (None, None, "\n", "self")


@dataclass
class Exchange:
    """One request, and what became of it."""

    kind: str
    outcome: str
    """good, tie, refused, left, ended, lost, or one of `FAILURES`."""
    seconds: float
    what: str = ""
    """Of a failure, what was expected and what came."""


@dataclass
class Clients:
    """All of them, and what happened."""

    server: Server
    plain: Plain
    disturbed: threading.Event
    """Set while the server is being ended: connections may break then."""
    most: int
    """Requests, in all."""
    exchanges: list[Exchange] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def work(self, seed: int) -> None:
        """Sends one request after another, until all are over."""
        draws = random.Random(seed)
        kinds, weights = zip(*KINDS.items(), strict=True)
        while not self.over.is_set() and len(self.exchanges) < self.most:
            kind = draws.choices(kinds, [weight for _, weight in weights])[0]
            began, before = time.monotonic(), self.server.life
            try:
                outcome, what = KINDS[kind][0](self, draws)
            except (openai.APIConnectionError, OSError, http.client.HTTPException) as error:
                outcome, what = "lost", f"{type(error).__name__}: {error}"
            except openai.APIStatusError as error:
                busy = error.status_code in (429, 503)
                outcome, what = "refused" if busy else "wrong", f"{error.status_code}: {error.message}"
            except EndedError as error:
                outcome, what = "ended", str(error)
            seconds = time.monotonic() - began
            disturbed = self.disturbed.is_set() or self.server.life != before
            if outcome in ("lost", "ended") and not disturbed:
                outcome = "broken"
            if seconds > _PATIENCE:
                outcome = "hung"
            self.exchanges.append(Exchange(kind, outcome, seconds, what if outcome in (*FAILURES, "tie") else ""))
            if outcome in ("lost", "refused"):
                time.sleep(0.2)

    def client(self, draws: random.Random) -> openai.OpenAI:
        """The official one, with the key of one user."""
        key = draws.choice(list(self.server.keys.values()))
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=2 * _PATIENCE)

    def wish(self, draws: random.Random, chat: bool = False, plain: bool = False) -> Wish:
        """Something to ask for."""
        stop = None if plain else draws.choice(_STOPS)
        return Wish(draws.choice(self.plain.prompts), draws.choice((1, 4, 12, 24)), None, stop, chat)

    def compared(self, wish: Wish, text: str) -> tuple[str, str]:
        expected = self.plain.text(wish)
        if text == expected:
            return "good", ""
        margin = self.plain.margin(wish, text)
        if margin is not None and margin < TIE:
            return "tie", f"{wish.prompt!r}: logits {margin:.1e} apart"
        return "wrong", f"{wish}: expected {expected!r}, got {text!r}"


FAILURES = ("wrong", "hung", "broken")
TIE = 1e-4
"""A difference of logits, of size 10 or so, that passes over other numbers of rows may turn round in float32."""


class EndedError(Exception):
    """A stream ended with an error event."""


def _arguments(wish: Wish) -> dict:
    found = {"max_tokens": wish.tokens, "temperature": 0 if wish.seed is None else 1}
    return found | ({} if wish.seed is None else {"seed": wish.seed}) | ({"stop": wish.stop} if wish.stop else {})


def completion(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """A greedy text, whole."""
    wish = clients.wish(draws)
    with clients.client(draws) as client:
        made = client.completions.create(model=clients.server.model, prompt=wish.prompt, **_arguments(wish))
    return clients.compared(wish, made.choices[0].text)


def seeded(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """A drawn text with a seed."""
    wish = Wish(draws.choice(clients.plain.prompts), 12, seed=draws.randrange(4))
    with clients.client(draws) as client:
        made = client.completions.create(model=clients.server.model, prompt=wish.prompt, **_arguments(wish))
    return clients.compared(wish, made.choices[0].text)


def several(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """Three prompts as tokens, two texts of each, with log-probabilities."""
    wishes = [clients.wish(draws, plain=True) for _ in range(3)]
    wishes = [Wish(wish.prompt, 6) for wish in wishes]
    ids = [clients.plain.ids(wish.prompt) for wish in wishes]
    with clients.client(draws) as client:
        made = client.completions.create(
            model=clients.server.model, prompt=ids, max_tokens=6, temperature=0, n=2, logprobs=2
        )
    for place, choice in enumerate(sorted(made.choices, key=lambda choice: choice.index)):
        outcome = clients.compared(wishes[place // 2], choice.text)
        if outcome[0] != "good":
            return outcome
    return "good", ""


def streamed(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """A greedy text as it comes."""
    wish = clients.wish(draws)
    with clients.client(draws) as client:
        made = client.completions.create(
            model=clients.server.model, prompt=wish.prompt, stream=True, **_arguments(wish)
        )
        try:
            text = "".join(event.choices[0].text for event in made)
        except openai.APIError as error:
            if isinstance(error, openai.APIConnectionError):
                raise
            raise EndedError(str(error)) from error
    return clients.compared(wish, text)


def chat(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """The answer to a message."""
    wish = clients.wish(draws, chat=True)
    messages = [{"role": "user", "content": wish.prompt}]
    with clients.client(draws) as client:
        made = client.chat.completions.create(model=clients.server.model, messages=messages, **_arguments(wish))
    return clients.compared(wish, made.choices[0].message.content or "")


def conversation(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """Several turns, each sent with all before it, by one key; some turns are left in the middle, some histories are
    edited. What is kept of a prompt is less than all of it.
    """
    before: list[tuple[str, str]] = []
    with clients.client(draws) as client:
        for _ in range(draws.randrange(3, 7)):
            wish = Wish(draws.choice(clients.plain.prompts), draws.choice((4, 12)), chat=True, before=tuple(before))
            messages = [{"role": role, "content": text} for role, text in (*before, ("user", wish.prompt))]
            ask = partial(client.chat.completions.create, model=clients.server.model, messages=messages)
            if draws.random() < 0.2:
                with contextlib.closing(ask(max_tokens=400, stream=True)) as stream:
                    next(iter(stream), None)
            made = ask(**_arguments(wish))
            outcome = clients.compared(wish, made.choices[0].message.content or "")
            cached = made.usage.prompt_tokens_details.cached_tokens
            if not 0 <= cached < made.usage.prompt_tokens:
                return "wrong", f"expected fewer than {made.usage.prompt_tokens} cached tokens, got {cached}"
            if outcome[0] != "good":
                return outcome
            answer = "so it is" if draws.random() < 0.2 else made.choices[0].message.content or ""
            before += [("user", wish.prompt), ("assistant", answer)]
            if draws.random() < 0.2:
                del before[: 2 * draws.randrange(len(before) // 2)]
    return "good", ""


def leaves(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """Goes away in the middle of a long answer."""
    with clients.client(draws) as client:
        made = client.completions.create(
            model=clients.server.model, prompt=draws.choice(clients.plain.prompts), max_tokens=400, stream=True
        )
        for number, _ in enumerate(made):
            if number >= draws.randrange(5):
                break
        made.close()
    return "left", ""


def malformed(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """Nothing of it may be answered with a text, nor as the server's fault."""
    body = draws.choice(
        (
            b"{",
            b"[]",
            b'{"prompt": 5}',
            b'{"prompt": "a", "max_tokens": -1}',
            b'{"prompt": "a", "temperature": "hot"}',
            b'{"prompt": "a", "best_of": 3}',
            b'{"prompt": "a", "unheard_of": 1}',
            b'{"prompt": "' + b"a" * 3_000_000 + b'"}',
            b"\xff\xfe\x00",
            b'{"prompt": [1, 999999999]}',
        )
    )
    key = draws.choice((*clients.server.keys.values(), "no-such-key"))
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection(HOST, clients.server.port, timeout=_PATIENCE)) as connection:
        try:
            connection.request("POST", "/v1/completions", body, headers)
        except (BrokenPipeError, ConnectionResetError):
            return "refused", ""  # a body that is too large is not read to its end
        answer = connection.getresponse()
        said = answer.read()
    refused = 400 <= answer.status < 500 or answer.status == 503
    if not refused or "error" not in json.loads(said):
        return "wrong", f"{body[:40]!r}: expected to be refused, got {answer.status}: {said[:200]!r}"
    return "good", ""


def slow(clients: Clients, draws: random.Random) -> tuple[str, str]:
    """Half a request, and then nothing: the server must end it."""
    whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection((HOST, clients.server.port), timeout=_PATIENCE) as connection:
        connection.sendall(whole[: draws.randrange(1, len(whole))])
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    return "good", ""


KINDS: dict[str, tuple[Callable[[Clients, random.Random], tuple[str, str]], float]] = {
    "completion": (completion, 8),
    "stream": (streamed, 6),
    "chat": (chat, 4),
    "conversation": (conversation, 3),
    "seeded": (seeded, 2),
    "several texts": (several, 2),
    "leaves": (leaves, 3),
    "malformed": (malformed, 3),
    "slow": (slow, 0.3),
}
"""What they do, and how often."""
