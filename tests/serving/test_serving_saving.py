"""What was learned outlives the server: it is saved at intervals and at its end."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import numpy as np
import pytest
from support import tiny
from support.commandline import run
from support.serving import matrix_path, serving, wait_for
from support.speaking import chatty, speaking_llama

from token_recycling.recycling.matrix_file import fingerprint, read_matrix_file
from token_recycling.serving.errors import ApiError

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "import os", "max_tokens": 20}
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def rows(path):
    return int(read_matrix_file(path)[0]["shares"].any(axis=1).sum())


def test_it_is_saved_at_intervals_if_it_changed(tmp_path):
    """With one text at a time after each; with more also while they are generated, as often as they take."""
    settings = {"matrix": matrix_path(tmp_path), "save_every": 0.05, "concurrency": 1}
    with serving(speaking_llama(), tiny.tokenizer(), **settings) as server:
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


def test_it_is_saved_at_the_end_and_loaded_at_the_beginning(tmp_path):
    model, tokenizer = speaking_llama(), tiny.tokenizer()
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
def test_all_that_was_learned_before_the_end_is_saved(tmp_path, concurrency):
    """Texts learn once more from the step in which they are ended."""
    settings = {"matrix": matrix_path(tmp_path), "concurrency": concurrency, "save_every": 0.02, "grace": 0}
    with serving(speaking_llama(), tiny.tokenizer(), **settings) as server:
        asking = [
            threading.Thread(target=server.post, args=("/v1/completions", {**ASKED, "prompt": word, "max_tokens": 300}))
            for word in ("import os", "for index", "print(")
        ]
        for one in asking:
            one.start()
        wait_for(lambda: server.service.running == 3)
        wait_for(matrix_path(tmp_path).exists, 60)
    for one in asking:
        one.join()
    with server.service.pool.acquire("") as drafter:
        drafter.matrix.save(tmp_path / "now")
    kept, now = (read_matrix_file(path)[0] for path in (matrix_path(tmp_path), tmp_path / "now"))
    assert all(np.array_equal(kept[name], now[name]) for name in now)


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    speaking_llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "template.jinja").write_text(chatty(tiny.tokenizer()).chat_template)
    return folder


@pytest.mark.nightly
def test_the_command_serves_and_saves_when_it_is_told_to_end(folder, tmp_path):
    code = "from token_recycling.cli.app import app; app()"
    options = ["--port", "0", "--matrix", matrix_path(tmp_path), "--name", "small", "--drafter", "recycling:tree=4"]
    options += ["--chat-template", folder / "template.jinja", "--api-key-file", tmp_path / "keys"]
    (tmp_path / "keys").write_text("# who may\nann:one\n\n")
    (tmp_path / "keys").chmod(0o440)  # as LoadCredential of systemd has it
    environment = {**ENVIRONMENT, "TOKEN_RECYCLING_API_KEYS": "bob:two"}
    command = [sys.executable, "-c", code, "serve", folder, *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        lines = iter(server.stderr.readline, "")
        assert f"chmod 600 {tmp_path / 'keys'}" in next(lines)
        said = [next(lines) for _ in range(4)]
        assert "isolation per-key, since API keys are configured" in said[0]
        assert "4 batch slots: memory fits 4 sequences of up to " in said[1]
        assert "tools are described in the prompt: the chat template shows none" in said[2]
        url = said[3].split(" at ")[1].split(";")[0]
        body = {"messages": [{"role": "user", "content": "import os"}], "model": "small", "max_tokens": 8}
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx2.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert list(lines) == []
    kept = matrix_path(tmp_path).with_name("learned.matrix.keys")
    assert sorted(file.name for file in kept.iterdir()) == ["ann", "bob"]
    assert rows(kept / "ann") > 5


def test_a_key_without_a_name_and_several_names_of_the_model(served):
    _, service, _ = served("--api-key", "secret", "--name", "one", "--name", "two/three")
    assert [key.name for key in service.settings.keys] == ["default"]
    for name in ("one", "two/three", None):
        service.check_model(name)
    with pytest.raises(ApiError, match="two/three"):
        service.check_model("four")


REFUSED = {
    "two keys without names": (["--api-key", "one", "--api-key", "two"], "default"),
    "two drafters": (["--drafter", "recycling", "--drafter", "suffix"], "--drafter"),
    "per-key without keys": (["--isolation", "per-key"], "API key"),
    "an unknown drafter": (["--drafter", "crystal"], "crystal"),
    "an unknown drafter to offer": (["--offer", "marble"], "marble"),
    "no such template": (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
    "no such file of keys": (["--api-key-file", "nowhere.keys"], "nowhere.keys"),
    "an address of another machine": (["--host", "192.0.2.1"], "192.0.2.1"),
    "nothing to begin with": (["--isolation", "per-request", "--matrix", "nowhere.matrix"], "nowhere.matrix"),
    "a timeout of nothing": (["--timeout", "0"], "--timeout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_options_are_refused_in_one_line(folder, name):
    options, word = REFUSED[name]
    result = run("serve", folder, "--port", 0, *options)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert word in result.stderr.splitlines()[-1]


def test_a_port_that_is_taken(folder):
    with serving(speaking_llama(), tiny.tokenizer()) as server:
        result = run("serve", folder, "--port", server.url.rsplit(":", 1)[1])
    assert result.exit_code == 2
    assert "cannot listen on" in result.stderr
