"""The server under strain: what counts as a failure, and that it is noticed."""

import random
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.soak import clock
from benchmarks.soak.clients import KINDS, Clients, completion, conversation
from benchmarks.soak.expected import TEMPLATE, Plain, Wish
from benchmarks.soak.faults import Faults
from benchmarks.soak.planted import Seen
from benchmarks.soak.report import Found, write
from benchmarks.soak.server import HOST, Sample, Server
from token_recycling.model.loading import load

MODEL = Path(__file__).parents[2] / "models" / "draft"


@pytest.fixture(scope="module")
def plain():
    return Plain(str(MODEL), MODEL.parent / "prompts")


@pytest.fixture
def clients(plain, tmp_path):
    """Of a server that was never started."""
    return Clients(Server("none", tmp_path, {"ann": "a-key-of-some-length"}, []), plain, threading.Event(), most=1)


def found(clients, *wrong, seen=()):
    faults = Faults(clients.server, clients.disturbed, mounted=False)
    faults.wrong.extend(wrong)
    samples = [Sample(float(at), 0, 500.0, 12, 9) for at in range(12)]
    return Found("soak", 1.0, clients.exchanges, samples, faults, seen, 0.1)


@pytest.mark.parametrize("disturbed", [False, True])
def test_an_answer_may_be_lost_only_while_the_server_is_ended(clients, disturbed, monkeypatch):
    monkeypatch.setattr("benchmarks.soak.clients.KINDS", {"completion": (completion, 1)})
    if disturbed:
        clients.disturbed.set()
    clients.work(seed=0)
    assert [one.outcome for one in clients.exchanges] == ["lost" if disturbed else "broken"]
    assert len(found(clients).failures) == (not disturbed)


def test_a_text_that_is_not_the_plain_one_is_wrong(clients):
    wish = Wish(clients.plain.prompts[0], 6)
    text = clients.plain.text(wish)
    assert clients.compared(wish, text)[0] == "good"
    assert clients.compared(wish, text + " ")[0] == "wrong"
    assert clients.compared(wish, "something else")[0] == "wrong"


def test_a_text_that_leaves_the_plain_one_at_a_tie_is_none_of_ours(clients):
    """Two tokens after which are 2e-6 apart in float32, of the shipped draft model."""
    wish = Wish("        Stop as soon as the path to this node is known.", 24, stop="self")
    text = clients.plain.text(wish)
    assert " is not supported" in text
    outcome, what = clients.compared(wish, text.replace(" is not supported", " is not None"))
    assert outcome == "tie"
    assert what.endswith(" apart")


def test_conversations_are_compared_turn_by_turn(plain):
    """Against a server that keeps prefixes; one that answers something else is found."""
    from support.serving import keys, serving

    loaded = load(str(MODEL))
    loaded.tokenizer.chat_template = TEMPLATE
    with serving(loaded.model, loaded.tokenizer, keys=keys("ann")) as server:
        known = SimpleNamespace(url=server.url, model="tiny", keys={"ann": "secret-ann"})
        asking = Clients(known, plain, threading.Event(), most=1)
        for seed in range(2):
            assert conversation(asking, random.Random(seed))[0] in ("good", "tie")
        assert len(server.service.prefixes) > 50
        loaded.tokenizer.chat_template = TEMPLATE.replace("assistant: ", "assistant says: ")
        assert conversation(asking, random.Random(0))[0] == "wrong"


def test_what_is_malformed_must_be_refused(clients, monkeypatch):
    with socket.create_server((HOST, clients.server.port)) as listener:

        def answers():
            taken, _ = listener.accept()
            with taken:
                taken.recv(1 << 16)
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=answers, daemon=True).start()
        monkeypatch.setattr("benchmarks.soak.clients.KINDS", {"malformed": KINDS["malformed"]})
        clients.work(seed=3)
    assert [one.outcome for one in clients.exchanges] == ["wrong"]


def test_a_damaged_matrix_and_a_secret_that_was_seen_are_failures(clients, tmp_path):
    faults = found(clients).faults
    clients.server.matrix.write_bytes(b"nothing of the kind")
    faults.check_matrices()
    assert len(faults.wrong) == 1
    alike, different = (Seen("bob", 4, equal, (2.0, 2.0), 1.0, 0.5) for equal in (True, False))
    assert found(clients, seen=(alike, alike, different)).failures == []
    assert found(clients, seen=(alike, different, different)).failures == ["bob saw what another key asked for"]
    assert found(clients, seen=(alike, alike, alike)).failures == ["the control saw no secret"]
    write(found(clients, "something else", seen=(alike, alike, different)), tmp_path / "page.md")
    assert "- something else" in (tmp_path / "page.md").read_text()


def test_the_clock_jumps_and_the_machines_own_does_not(monkeypatch):
    monkeypatch.setattr(clock, "_EVERY", 0.0)
    jumps = {round(clock.jumping() - time.time(), -2) for _ in range(5)}
    assert len(jumps) == 5
