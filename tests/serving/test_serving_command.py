"""The command `serve`: its options, errors and shutdown."""

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import http, tiny
from support.commandline import run
from support.serving import matrix_path
from support.speaking import ascii_llama, chat_tokenizer

from token_recycling.cli.commands.serve import _bound
from token_recycling.model import loading
from token_recycling.recycling.matrix_file import read_matrix_file
from token_recycling.serving.settings import DEFAULT_OFFERS, Isolation

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    ascii_llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "template.jinja").write_text(chat_tokenizer().chat_template)
    return folder


@pytest.mark.nightly
def test_serve_answers_and_saves_the_matrix_on_sigterm(folder, tmp_path):
    code = "from token_recycling.cli.app import app; app()"
    options = ["--port", "0", "--matrix", matrix_path(tmp_path), "--name", "small", "--drafter", "recycling:tree=4"]
    options += ["--chat-template", folder / "template.jinja", "--isolation", "shared"]
    (tmp_path / "keys").write_text("# who may\nann:one\n\n")
    (tmp_path / "keys").chmod(0o440)  # as with systemd's LoadCredential
    environment = {**ENVIRONMENT, "TOKEN_RECYCLING_API_KEYS": "bob:two"}
    environment["TOKEN_RECYCLING_API_KEY_FILE"] = str(tmp_path / "keys")
    command = [sys.executable, "-c", code, "serve", folder, *options]
    with (
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.kill)  # a failed assertion would wait for the server forever
        lines = iter(server.stderr.readline, "")
        assert f"chmod 600 {tmp_path / 'keys'}" in next(lines)
        said = [next(lines) for _ in range(4)]
        assert "isolation shared, set by --isolation" in said[0]
        assert "4 batch slots: memory fits 4 sequences of up to " in said[1]
        assert "tools are described in the prompt: the chat template shows no tools" in said[2]
        url = said[3].split(" at ")[1].split(";")[0]
        body = {"messages": [{"role": "user", "content": "import os"}], "model": "small", "max_tokens": 8}
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = http.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert list(lines) == []
    assert read_matrix_file(matrix_path(tmp_path))[0]["shares"].any()


OFFERED = {
    "defaults": ([], list(DEFAULT_OFFERS)),
    "the server's own drafter with its options": (
        ["--drafter", "suffix:factor=2"],
        ["suffix:factor=2", *DEFAULT_OFFERS],
    ),
    "an own drafter that needs files is left out": (["--drafter", "draft_model:model=MODEL"], list(DEFAULT_OFFERS)),
    "explicit offers": (["--offer", "published", "--offer", "plain"], ["published", "plain"]),
    "none": (["--offer", "none"], []),
}


@pytest.mark.parametrize("name", OFFERED)
def test_offered_drafters(served, tmp_path, name):
    options, specs = OFFERED[name]
    _, engine, _ = served(*(option.replace("MODEL", str(tmp_path)) for option in options))
    assert [one["spec"] for one in engine.pool.described()] == specs


def test_options_reach_the_server(served, folder, tmp_path, monkeypatch):
    loaded, load = [], loading.load
    monkeypatch.setattr(loading, "load", lambda *arguments: loaded.append(arguments) or load(*arguments))
    options = ["--allow-host", "one.example", "--allow-host", "two.example", "--grace", 3, "--reproducible"]
    options += ["--max-connections", 9, "--chat-template", folder / "template.jinja"]
    server, engine, _ = served(*options, "--name", "one", "--name", "two/three")
    assert loaded == [(str(tmp_path), None, None, None, None, True, None)]
    assert engine.settings.allow_hosts == ("one.example", "two.example")
    assert (engine.settings.reproducible, engine.settings.isolation) == (True, Isolation.per_request)
    assert engine.loaded.tokenizer.chat_template == chat_tokenizer().chat_template
    assert engine.pool.make("suffix").traits.isolates_requests
    assert (server.config.limit_concurrency, engine.settings.grace) == (9, 3)
    assert (engine.settings.name, engine.settings.aliases) == ("one", ("two/three",))


REFUSED = {
    "two unnamed keys": (["--api-key", "one", "--api-key", "two"], "default"),
    "two drafters": (["--drafter", "recycling", "--drafter", "suffix"], "--drafter"),
    "per-key without keys": (["--isolation", "per-key"], "API key"),
    "an unknown drafter": (["--drafter", "crystal"], "crystal"),
    "an unknown offered drafter": (["--offer", "marble"], "marble"),
    "a missing template": (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
    "a missing key file": (["--api-key-file", "nowhere.keys"], "nowhere.keys"),
    "the address of another machine": (["--host", "192.0.2.1"], "192.0.2.1"),
    "a missing matrix with per-request isolation": (
        ["--isolation", "per-request", "--matrix", "nowhere.matrix"],
        "nowhere.matrix",
    ),
    "a zero timeout": (["--timeout", "0"], "--timeout"),
    **{
        f"the name {name}": ([option, name], repr(name))
        for option, names in (
            ("--allow-host", ("*", "https://one.example", "one.example:80", "")),
            ("--allow-origin", ("one.example", "https://one.example/", "https://one.example/page", "")),
        )
        for name in names
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_options_are_refused_in_one_line(folder, name):
    options, word = REFUSED[name]
    result = run("serve", folder, "--port", 0, *options)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert word in result.stderr.splitlines()[-1]


def test_port_is_bound_before_it_listens():
    """Until the model is loaded, health checks are refused, not kept waiting; a bad address fails before slow work."""
    with contextlib.closing(_bound("127.0.0.1", 0)) as bound, socket.socket() as early, socket.socket() as late:
        address = bound.getsockname()
        assert early.connect_ex(address) == errno.ECONNREFUSED
        bound.listen()
        assert late.connect_ex(address) == 0
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {address[1]}"):
            _bound(*address)


@pytest.mark.parametrize("name", ["Dockerfile", "token-recycling.service"])
def test_deployment_files_use_existing_options(name):
    lines = (ROOT / "deploy" / name).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    options = set(re.findall(r"--[a-z][a-z-]+", text[re.search('token-recycling serve|"serve"', text).start() :]))
    known = run("serve", "--help").stdout
    assert options
    assert [option for option in options if option not in known] == []
