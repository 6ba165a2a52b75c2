"""Whether one key can learn what another asked for: secrets are planted through one, and looked for through another.

Two servers are alike but for the secrets, of which only one was ever asked. The other key sends the beginning of every
secret to both, in turn, and compares what it can see: the text, how many tokens every step gave, what was drafted, how
many tokens of the prompt were kept of earlier texts, how long the first token and the steps took. The key that planted
them does the same, as a control: it must see a difference, or nothing could have been found.
"""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scipy.stats import mannwhitneyu

from .server import Server

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "glade", "heath", "islet", "jetty", "knoll", "larch")
_PROBES = 24
_ROUNDS = 6


@dataclass
class Seen:
    """What one key saw of secrets that were planted, beside a server where they were not."""

    key: str
    probes: int
    equal: bool
    """Whether all texts, steps and drafts were the same, and as much of each prompt was kept."""
    mat: tuple[float, float]
    """Tokens a step with the secrets and without them."""
    seconds: float
    """The median time of a step with the secrets, in times of that without."""
    chance: float
    """That times of one distribution differ as much (Mann-Whitney)."""
    first: float = 1.0
    """The median time up to the first token with the secrets, in times of that without."""


def looked_for(planted: Server, other: Server) -> list[Seen]:
    """Plants secrets in one of two running servers. What its keys see: another one before that, of texts that are never
    planted, which shows how far two servers differ anyway; then of the secrets that one, and the one that planted them.
    """
    owner, stranger = list(planted.keys)[:2]
    draws = random.Random(7)
    never, secrets = ([" ".join(draws.choices(_WORDS, k=12)) for _ in range(_PROBES)] for _ in range(2))
    before = _seen(stranger, planted, other, never)
    for secret in secrets:
        for _ in range(2):
            _steps(planted, owner, secret)
    return [before, *(_seen(key, planted, other, secrets) for key in (stranger, owner))]


def _seen(key: str, planted: Server, other: Server, texts: list[str]) -> Seen:
    beginnings = [" ".join(text.split()[:6]) for text in texts]
    sides: tuple[list[Any], list[Any]] = [], []
    for turn in range(_ROUNDS):
        for place, beginning in enumerate(beginnings):
            for side in (0, 1) if (turn + place) % 2 else (1, 0):
                sides[side].append(_steps((planted, other)[side], key, beginning))
    steps = [[text for text, _ in side] for side in sides]
    usages = [[usage for _, usage in side] for side in sides]
    times = [[seconds for text in side for seconds in _seconds(text)] for side in steps]
    seen = [[[(step["tokens"], step["draft"]) for step in text] for text in side] for side in steps]
    kept = [[usage["prompt_tokens_details"] for usage in side] for side in usages]
    counts = [sum(len(step["tokens"]) for text in side for step in text) / sum(map(len, side)) for side in steps]
    firsts = [[usage["speculation"]["prefill_seconds"] for usage in side] for side in usages]
    middle = [sorted(side)[len(side) // 2] for side in (*times, *firsts)]
    chance, equal = float(mannwhitneyu(*times).pvalue), (seen[0], kept[0]) == (seen[1], kept[1])
    ratios = middle[0] / middle[1], middle[2] / middle[3]
    return Seen(key, len(sides[0]), equal, (counts[0], counts[1]), ratios[0], chance, ratios[1])


def _seconds(text: list[dict]) -> list[float]:
    """What every step took after the first, which has the prompt's."""
    at = [step["seconds"] for step in text]
    return [after - before for before, after in pairwise(at)]


def _steps(server: Server, key: str, prompt: str) -> tuple[list[dict], dict]:
    """The steps of a greedy text, and its usage."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.keys[key]}"}
    request = urllib.request.Request(f"{server.url}/v1/token_recycling/steps", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [event.split("\n", 1) for event in answer.read().decode().split("\n\n") if event]
    read = [(name, json.loads(data.removeprefix("data: "))) for name, data in events]
    return [data for name, data in read if name == "event: step"], read[-1][1]["usage"]
