"""Requests that a proxy on the same machine forwards, with a real nginx: they are isolated, and have no free options.

By default nginx replaces Host by the address of the server behind it, so that clients of the internet look local.
"""

import contextlib
import shutil
import socket
import subprocess

import httpx2
import pytest
from support.serving import serving, wait_for

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
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{behind}; proxy_buffering off; {more} }}
    }}
}}
"""
WAYS = {
    "as nginx does by default": "",
    "with a name": "proxy_set_header Host example.org;",
    "as its documentation says": "proxy_http_version 1.1; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
}
ASKED = {"prompt": "import os\nfor index in range(10):\n", "max_tokens": 40, "temperature": 0}


@contextlib.contextmanager
def nginx(folder, behind, more):
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (apt-get install nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, behind=behind, more=more))
    with subprocess.Popen(["nginx", "-c", config, "-p", folder], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 30)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def usage(url, **more):
    answer = httpx2.post(f"{url}/v1/completions", json={**ASKED, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


@pytest.mark.parametrize("way", WAYS)
def test_what_nginx_forwards_is_isolated_and_has_no_free_options(model, tokenizer, tmp_path, way):
    settings = {"free_options": True, "allow_hosts": ("example.org",)}
    with serving(model, tokenizer, **settings) as server, nginx(tmp_path, server.port, WAYS[way]) as url:
        first = usage(url)
        usage(server.url)
        learned = usage(server.url)
        assert learned["speculation"]["steps"] < first["speculation"]["steps"], "local requests share what is learned"
        assert learned["prompt_tokens_details"]["cached_tokens"] > 0
        again = usage(url)
        assert again["speculation"]["steps"] == first["speculation"]["steps"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 0
        body = {"prompt": "a", "max_tokens": 2, "drafter": "recycling:tree=4"}
        for address, status, free in ((server.url, 200, True), (url, 400, False)):
            assert httpx2.post(f"{address}/v1/token_recycling/steps", json=body, timeout=60).status_code == status
            offered = httpx2.get(f"{address}/v1/token_recycling/about", timeout=60).json()["drafters"]
            assert any(one["options"] for one in offered) == free


def test_an_operator_may_share_all_the_same(model, tokenizer, tmp_path):
    with serving(model, tokenizer, isolate_forwarded=False) as server, nginx(tmp_path, server.port, "") as url:
        first, again = usage(url), usage(url)
        assert again["speculation"]["steps"] < first["speculation"]["steps"]


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-forwarded-proto", "x-real-ip", "via"])
def test_headers_of_proxies_make_a_request_non_local(name):
    scope = {"headers": [(b"host", b"127.0.0.1:8000")], "http_version": "1.1"}
    assert is_local(scope)
    assert not is_local({**scope, "headers": [*scope["headers"], (name.encode(), b"x")]})
