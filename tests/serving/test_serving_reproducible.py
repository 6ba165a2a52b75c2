"""A reproducible server: output and drafts of a request depend on the request alone."""

import pytest
from support.serving import serving
from support.speaking import ascii_llama, chat_tokenizer

from token_recycling.serving.settings import Isolation, Settings

ASKED = [
    {"prompt": "for index in", "temperature": 0},
    {"prompt": "import os\nimport sys\nimport", "temperature": 0},
    {"prompt": "for index in", "temperature": 0.8, "seed": 3},
    {"prompt": "return return", "temperature": 0.8, "seed": 4, "n": 2},
]
SETTINGS = {"reproducible": True, "isolation": "per-request"}


@pytest.fixture(scope="module")
def bfloat16_model():
    return ascii_llama().bfloat16()


def answers(server, order):
    """Send the requests in this order; return outputs and draft counts by request number."""
    found = {}
    for number in order:
        whole = server.complete(**ASKED[number], max_tokens=24)
        usage = whole.usage.model_extra["speculation"]
        counts = {name: usage[name] for name in ("steps", "drafted_tokens", "accepted_tokens")}
        found[number] = [choice.text for choice in whole.choices], counts
        server.complete(prompt=f"import {number}", temperature=1, max_tokens=12)
    return found


def test_answers_do_not_depend_on_other_requests_or_runs(bfloat16_model):
    with serving(bfloat16_model, chat_tokenizer(), **SETTINGS) as server:
        first = answers(server, range(len(ASKED)))
        assert answers(server, reversed(range(len(ASKED)))) == first
        assert not server.engine.prefixes.nbytes
    with serving(ascii_llama().bfloat16(), chat_tokenizer(), **SETTINGS) as server:
        assert answers(server, (2, 0, 3, 1)) == first


def test_drafts_depend_on_earlier_requests_by_default(bfloat16_model):
    with serving(bfloat16_model, chat_tokenizer(), isolation="shared") as server:
        assert answers(server, range(len(ASKED))) != answers(server, range(len(ASKED)))


@pytest.mark.parametrize("drafter", ["accelerated", "suffix", "recycling:k=4"])
def test_drafters_chosen_by_a_request_are_reproducible(bfloat16_model, drafter):
    with serving(bfloat16_model, chat_tokenizer(), **SETTINGS, offers=("suffix", "recycling:k=4")) as server:
        first, again = (server.steps(prompt="import os", drafter=drafter, max_tokens=16) for _ in range(2))
        trees = [[{**data, "seconds": None} for name, data in events if name == "step"] for events in (first, again)]
        assert trees[0] == trees[1]
        assert trees[0]


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"isolation": Isolation.shared}, "isolation shared"),
        ({"concurrency": 4}, "a concurrency of 4"),
        ({"matrix": "learned.matrix"}, "a matrix"),
        ({"concurrency": 2, "cache": 5.0}, "a concurrency of 2, a cache of 5 MB"),
    ],
)
def test_settings_that_share_state_between_requests_are_refused(settings, got):
    with pytest.raises(ValueError, match=f"reproducible cannot be combined with {got}"):
        Settings(**{**SETTINGS, **settings})
    assert Settings(**SETTINGS, cache=0.0, concurrency=1).reproducible, "which share nothing"


def test_drafter_that_reads_the_clock_is_refused(bfloat16_model):
    with (
        pytest.raises(ValueError, match=r"reproducible=True needs .*layer_skip"),
        serving(bfloat16_model, chat_tokenizer(), **SETTINGS, drafter="layer_skip"),
    ):
        pass
