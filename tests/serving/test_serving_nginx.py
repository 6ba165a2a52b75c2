"""Requests forwarded by a proxy on the same machine are isolated: simulated ones, and those of a real nginx.

By default nginx replaces Host with the address of the upstream server, so that remote clients look local.
"""

import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from support import http
from support.serving import keys, serving, wait_for

from token_recycling.serving.access import is_local

CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
"""
SERVER = """
server {
    listen 127.0.0.1:{port};
    location / { proxy_pass http://127.0.0.1:{behind}; proxy_buffering off; {more} }
}
"""
HEADERS = {
    "defaults of nginx": "",
    "host name": "proxy_set_header Host example.org;",
    "as documented by nginx": "proxy_http_version 1.1; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
}
ASKED = {"prompt": "import os\nfor index in range(10):\n", "max_tokens": 40, "temperature": 0}


@contextlib.contextmanager
def nginx(folder, behind, more="", server_block=None):
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (apt-get install nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "nginx.conf"
    block = (
        (server_block or SERVER.replace("{more}", more)).replace("{port}", str(port)).replace("{behind}", str(behind))
    )
    config.write_text(CONFIG.format(folder=folder) + block + "\n}\n")
    with subprocess.Popen(["nginx", "-c", config, "-p", folder], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 30)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def documented_config(behind):
    """deploy/nginx.conf, without TLS and with short deadlines."""
    text = (Path(__file__).parents[2] / "deploy" / "nginx.conf").read_text()
    text = "\n".join(line for line in text.splitlines() if "ssl_certificate" not in line)
    replaced = {"listen 443 ssl": "listen 127.0.0.1:{port}", "127.0.0.1:8000": f"127.0.0.1:{behind}"}
    replaced |= {
        "client_header_timeout 10s": "client_header_timeout 1s",
        "client_body_timeout 30s": "client_body_timeout 1s",
    }
    replaced |= {"addresses 64": "addresses 4"}
    for before, after in replaced.items():
        assert before in text
        text = text.replace(before, after)
    return text


HALVES = [
    b"POST /v1/completions HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
]


def test_the_documented_proxy_streams_and_drops_slow_clients(model, tokenizer, tmp_path):
    settings = {"keys": keys("a"), "isolation": "per-key"}
    with serving(model, tokenizer, **settings) as server:
        config = documented_config(server.port)
        with nginx(tmp_path, server.port, server_block=config) as url:
            headers = {"Authorization": "Bearer secret-a"}
            body = {**ASKED, "max_tokens": 400, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
                assert server.engine.running == 1, "parts arrive while the rest is generated"
            server.wait_until_idle()
            assert http.get(f"{url}/metrics", headers=headers).status_code == 403
            port = int(url.rsplit(":", 1)[1])
            for half in HALVES:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
                    slow.sendall(half)
                    while slow.recv(4096):
                        pass


def usage(url, **more):
    answer = http.post(f"{url}/v1/completions", json={**ASKED, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def assert_isolated(server, forwarded):
    """Assert that a proxied request, whose usage `forwarded()` returns, shares nothing with local requests."""
    first = forwarded()
    usage(server.url)
    learned = usage(server.url)
    assert learned["speculation"]["steps"] < first["speculation"]["steps"], "local requests share what is learned"
    assert learned["prompt_tokens_details"]["cached_tokens"] > 0
    again = forwarded()
    assert again["speculation"]["steps"] == first["speculation"]["steps"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("headers", HEADERS)
def test_requests_through_nginx_are_isolated(model, tokenizer, tmp_path, headers):
    with (
        serving(model, tokenizer, allow_hosts=("example.org",)) as server,
        nginx(tmp_path, server.port, HEADERS[headers]) as url,
    ):
        assert_isolated(server, lambda: usage(url))


@pytest.mark.parametrize(
    "line", ["1.0\r\nHost: 127.0.0.1", "1.1\r\nHost: example.org", "1.1\r\nHost: localhost\r\nX-Forwarded-For: ::1"]
)
def test_requests_with_headers_of_nginx_are_isolated(model, tokenizer, line):
    """nginx speaks HTTP/1.0 by default."""
    body = json.dumps(ASKED)
    head = f"POST /v1/completions HTTP/{line}\r\nContent-Type: application/json\r\nConnection: close"
    with serving(model, tokenizer, allow_hosts=("example.org",)) as server:

        def forwarded():
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
            return json.loads(answer[answer.index("{") :])["usage"]

        assert_isolated(server, forwarded)


def test_shared_isolation_includes_forwarded_requests(model, tokenizer, tmp_path):
    with serving(model, tokenizer, isolation="shared") as server, nginx(tmp_path, server.port, "") as url:
        first, again = usage(url), usage(url)
        assert again["speculation"]["steps"] < first["speculation"]["steps"]


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-forwarded-proto", "x-real-ip", "via"])
def test_proxy_headers_make_a_request_non_local(name):
    scope = {"headers": [(b"host", b"127.0.0.1:8000")], "http_version": "1.1"}
    assert is_local(scope)
    assert not is_local({**scope, "headers": [*scope["headers"], (name.encode(), b"x")]})
