"""`make demo` does every job, and the benchmark of a server under load deals prompts to clients."""

import pytest
import typer

from benchmarks import demo, load
from benchmarks.real_model import NoRealModelError


def test_without_a_network_the_tiny_model_does_every_job(monkeypatch, capsys):
    def fail():
        raise NoRealModelError("no network")

    monkeypatch.setattr(demo, "fetched", fail)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    demo.main()
    said = capsys.readouterr().out
    assert "not available (no network)" in said
    for job in demo.JOBS:
        assert f"{job.title}, cold" in said
        assert f"{job.title}, warm" in said
    assert said.splitlines()[-1] == "identical: yes"


def test_no_prompt_is_sent_twice_to_one_server():
    found = load.prompts_of([1, 4, 16], 100)
    places = [place for own in found.values() for place in own]
    assert len(set(places)) == len(places)
    assert [len(own) for own in found.values()] == [4, 4, 16]
    with pytest.raises(typer.BadParameter, match="24"):
        load.prompts_of([1, 4, 16], 23)
