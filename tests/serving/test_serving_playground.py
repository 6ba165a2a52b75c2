"""The playground without a browser: files, headers, configuration, and the drafters that a request may choose."""

from pathlib import Path

import pytest
from support import http, tiny
from support.serving import keys, serving

from token_recycling.serving import playground
from token_recycling.serving.settings import DEFAULT_OFFERS

FILES = {path.name: path for path in Path(playground.__file__).parent.iterdir() if path.suffix in playground._KINDS}


@pytest.fixture(scope="module")
def server(model):
    with serving(model, tiny.tokenizer(), offers=("recycling:tree=4", "published")) as running:
        yield running


def test_only_playground_files_are_served_with_strict_headers(server):
    for name in ("", *FILES):
        answer = http.get(f"{server.url}/{name and 'playground/'}{name}")
        assert answer.status_code == 200
        file = FILES[name or "index.html"]
        assert answer.text == file.read_text(encoding="utf-8")
        assert answer.headers["content-type"].startswith(playground._KINDS[file.suffix])
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    for name in ("__init__.py", "nothing.js", "..%2Fapp.py", "%2Fetc%2Fpasswd"):
        answer = http.get(f"{server.url}/playground/{name}")
        assert (answer.status_code, "error" in answer.json()) == (404, True)


def test_about_requires_a_key(server, model):
    about = http.get(f"{server.url}/v1/token_recycling/about").json()
    assert about["max_new_tokens"] == model.config.max_position_embeddings
    assert (about["chat"], about["isolation"], about["drafter_name"]) == (False, "shared", "recycling")
    assert [one["spec"] for one in about["drafters"]] == ["recycling:tree=4", "published"]
    with serving(model, tiny.tokenizer(), keys=keys("ann"), max_new_tokens=7) as running:
        assert http.get(running.url).status_code == 200
        assert http.get(f"{running.url}/v1/token_recycling/about").status_code == 401
        headers = {"Authorization": "Bearer secret-ann"}
        about = http.get(f"{running.url}/v1/token_recycling/about", headers=headers).json()
    assert about["max_new_tokens"] == 7
    assert [one["spec"] for one in about["drafters"]] == list(DEFAULT_OFFERS)


# Drafters chosen by a request


def drafted(server, **body):
    """Return the number of nodes drafted at each step."""
    events = server.steps(prompt="for index in", max_tokens=40, temperature=0, **body)
    return [len(data["draft"]["tokens"]) - 1 for name, data in events if name == "step"]


def test_offered_drafters_start_untrained(server):
    """So does the server's own drafter as `untrained`."""
    for drafter in ("recycling:tree=4", "untrained"):
        first = drafted(server, drafter=drafter)
        drafted(server)
        assert drafted(server, drafter=drafter) == first != drafted(server)
        assert first[0] == 0 or max(first) <= 8
    for nodes in (1, 3):
        assert max(drafted(server, speculation={"nodes": nodes})) == nodes


REFUSED = ["suffix", "recycling", "recycling:tree=4,k=3", "recycling:tree=/etc/passwd", "published:k=9", ""]


@pytest.mark.parametrize("drafter", REFUSED)
def test_drafters_that_are_not_offered_are_refused(server, drafter):
    answer = server.post("/v1/token_recycling/steps", {"prompt": "a", "max_tokens": 2, "drafter": drafter})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "invalid_drafter" if drafter else "invalid_value",
        "drafter",
    )
    assert not drafter or "accelerated, untrained, plain, recycling:tree=4, published" in error["message"]
    server.wait_until_idle()
