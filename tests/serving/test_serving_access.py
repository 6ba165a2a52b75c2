"""Accepted hosts and origins, API keys, and TLS."""

import inspect
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from starlette.middleware.cors import CORSMiddleware
from support import http, tiny
from support.serving import keys, serving

from token_recycling.serving.access import LocalNamesMiddleware
from token_recycling.serving.settings import Settings


@pytest.fixture(scope="module")
def server(model):
    with serving(model, tiny.tokenizer(), allow_hosts=("Proxy.example",)) as running:
        yield running


def status(server, path="/health", **headers):
    return http.get(f"{server.url}{path}", headers=headers).status_code


LOCAL = ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "LOCALHOST", "proxy.example:80"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example"]
FOREIGN += ["", "[::"]


def test_local_and_allowed_hosts_are_accepted(server):
    for name in LOCAL:
        assert status(server, host=name) == 200
        assert status(server, host="localhost", origin=f"http://{name}") == 200


@pytest.mark.parametrize("path", ["/health", "/", "/metrics", "/v1/models"])
def test_foreign_hosts_and_origins_are_refused(server, path):
    for name in FOREIGN:
        assert status(server, path, host=name) == 403
        assert status(server, path, origin=f"https://{name}") == 403
    assert status(server, path, origin="null") == 403


def test_each_key_opens_only_its_own_paths(model):
    """Keys come in the header of OpenAI's or of Anthropic's clients; with keys, any host name is accepted. Without one,
    the body is not read.
    """
    settings = {"keys": keys("a", "metrics"), "isolation": "per-key"}
    with serving(model, tiny.tokenizer(), **settings) as server:
        for name in ("completions", "chat/completions", "responses", "messages", "token_recycling/steps"):
            assert server.post(f"/v1/{name}", {}).status_code == 401
            malformed = {"content": b"{", "headers": {"content-type": "application/json"}}
            assert http.post(f"{server.url}/v1/{name}", **malformed).status_code == 401
        wanted = {"/v1/models": "secret-a", "/metrics": "secret-metrics", "/v1/token_recycling/about": "secret-a"}
        for path, right in wanted.items():
            for key in ("secret-a", "secret-metrics", "secret-b", "a"):
                of_a_proxy = {"authorization": "Basic cHJveHk=", "x-api-key": key}
                for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, of_a_proxy):
                    assert (status(server, path, host="evil.example", **header) == 200) == (key == right)
        assert status(server, host="evil.example") == 200


def test_host_is_not_checked_on_a_public_address():
    middleware = LocalNamesMiddleware(None)
    scope = {"type": "http", "headers": [(b"host", b"anything.example")]}
    assert middleware._foreign({**scope, "server": ("192.168.0.7", 8000)}) is None
    assert middleware._foreign({**scope, "server": ("::1", 8000)}) == "Host"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem", folder / "key.pem"


def test_tls_and_the_container_health_check(model, certificate):
    script = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
    assert f'"/usr/local/bin/{script.name}"' in script.with_name("Dockerfile").read_text()
    for tls in ({}, dict(zip(("tls_certificate", "tls_key"), certificate, strict=True))):
        with serving(model, tiny.tokenizer(), **tls) as running:
            address = f"127.0.0.1:{running.port}/health"
            if tls:
                context = ssl.create_default_context(cafile=certificate[0])
                assert httpx2.get(f"https://{address}", verify=context).json() == {"status": "ok"}
                with pytest.raises(httpx2.HTTPError):
                    http.get(f"http://{address}", timeout=5)
            for closing in (False, True):
                running.engine.closing = closing
                found = subprocess.run([sys.executable, script, str(running.port)], timeout=60, check=False)
                assert found.returncode == closing


def test_invalid_certificate_files_are_refused(certificate, tmp_path):
    with pytest.raises(ValueError, match="got only one"):
        Settings(tls_certificate=certificate[0])
    for wrong in ((certificate[1], certificate[0]), (certificate[0], tmp_path / "none"), (certificate[0],) * 2):
        with pytest.raises(ValueError, match="must be a certificate and its key"):
            Settings(tls_certificate=wrong[0], tls_key=wrong[1])


PAGE = "https://page.example"


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ()])
def test_cors_allows_only_configured_origins(model, origins):
    with serving(model, tiny.tokenizer(), allow_origins=origins) as server:
        wanted = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        asked = {**wanted, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}
        preflight = http.options(f"{server.url}/v1/chat/completions", headers=asked)
        if not origins:
            assert (preflight.status_code, "access-control-allow-origin" in preflight.headers) == (403, False)
            return
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
        if "allow_private_network" in inspect.signature(CORSMiddleware).parameters:  # see ollama/ollama#7000
            private = {**asked, "Access-Control-Request-Private-Network": "true"}
            preflight = http.options(f"{server.url}/v1/chat/completions", headers=private)
            assert preflight.headers["access-control-allow-private-network"] == "true"
        for path, body, status in (("completions", {"prompt": "a", "max_tokens": 1}, 200), ("completions", {}, 400)):
            answer = http.post(f"{server.url}/v1/{path}", json=body, headers={"Origin": PAGE}, timeout=30)
            assert answer.status_code == status
            allowed = "access-control-allow-origin"
            assert answer.headers[allowed] == preflight.headers[allowed]
        other = http.get(f"{server.url}/v1/models", headers={"Origin": "https://other.example"})
        assert other.status_code == (200 if "*" in origins else 403)
        rebound = http.get(f"{server.url}/v1/models", headers={"Origin": PAGE, "Host": "page.example"})
        assert rebound.status_code == 403
