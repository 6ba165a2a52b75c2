"""Learned matrices outlive the server: they are saved at intervals and at shutdown."""

import threading

import numpy as np
import pytest
from support import tiny
from support.serving import matrix_path, serving, wait_for
from support.speaking import ascii_llama

from token_recycling.recycling.matrix_file import fingerprint, read_matrix_file

ASKED = {"prompt": "import os", "max_tokens": 20}


def rows(path):
    return int(read_matrix_file(path)[0]["shares"].any(axis=1).sum())


def test_changed_matrix_is_saved_at_intervals(tmp_path):
    """With a concurrency of 1, a save follows a request."""
    settings = {"matrix": matrix_path(tmp_path), "save_every": 0.05, "concurrency": 1}
    with serving(ascii_llama(), tiny.tokenizer(), **settings) as server:
        server.post("/v1/completions", ASKED)
        wait_for(matrix_path(tmp_path).exists)
        saves = 'token_recycling_matrix_saves_total{outcome="good"}'
        wait_for(lambda: server.metrics().get(saves) == 1)
        server.wait_until_idle()
        written = matrix_path(tmp_path).stat().st_mtime_ns
        server.post("/v1/completions", {**ASKED, "prompt": "for index"})
        wait_for(lambda: server.metrics()[saves] == 2)
        assert matrix_path(tmp_path).stat().st_mtime_ns > written
    assert rows(matrix_path(tmp_path)) > 5


def test_matrix_is_saved_at_shutdown_and_loaded_at_start(tmp_path):
    model, tokenizer = ascii_llama(), tiny.tokenizer()
    settings = {"matrix": matrix_path(tmp_path), "save_every": 1000}
    with serving(model, tokenizer, **settings) as server:
        cold = server.post("/v1/completions", {**ASKED, "temperature": 0}).json()
        assert not matrix_path(tmp_path).exists()
    with serving(model, tokenizer, **settings) as server:
        warm = server.post("/v1/completions", {**ASKED, "temperature": 0}).json()
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["speculation"]["steps"] < cold["usage"]["speculation"]["steps"]
    assert read_matrix_file(matrix_path(tmp_path))[1]["tokenizer"] == fingerprint(tokenizer)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_matrix_saved_at_shutdown_is_complete(tmp_path, concurrency):
    """Sequences still learn from the step in which they are cancelled."""
    settings = {"matrix": matrix_path(tmp_path), "concurrency": concurrency, "save_every": 0.02, "grace": 0}
    with serving(ascii_llama(), tiny.tokenizer(), **settings) as server:
        asking = [
            threading.Thread(target=server.post, args=("/v1/completions", {**ASKED, "prompt": word, "max_tokens": 300}))
            for word in ("import os", "for index", "print(")
        ]
        for one in asking:
            one.start()
        wait_for(lambda: server.engine.running == 3)
        wait_for(matrix_path(tmp_path).exists, 60)
    for one in asking:
        one.join()
    server.engine.pool.acquire("").matrix.save(tmp_path / "now")
    kept, now = (read_matrix_file(path)[0] for path in (matrix_path(tmp_path), tmp_path / "now"))
    assert all(np.array_equal(kept[name], now[name]) for name in now)
