"""The benchmark of a server under load: its page, and how prompts are dealt to clients."""

import pytest
import typer

from benchmarks import load


def test_the_page_has_throughput_and_latency_relative_to_the_other_server():
    rows = [
        {"round": 0, "dtype": "float32", "server": name, "clients": 4, "tokens": 100, "texts": {"0": digest}, **times}
        for name, digest, times in (
            ("one at a time", "a", {"seconds": 10.0, "latency": 2.0}),
            ("batched", "b", {"seconds": 5.0, "latency": 1.0}),
            ("batched", "a", {"seconds": 20.0, "latency": 9.0}),
            ("transformers serve", "a", {"seconds": 10.0, "latency": 4.0}),
        )
    ]
    lines = {line.split("|")[1].strip(): line for line in load.markdown(rows, 128, 2).splitlines() if line[:1] == "|"}
    assert "2.00 (0.25)" in lines["batched"]
    assert "1 of 2" in lines["batched"]
    assert "1.00 (0.50)" in lines["one at a time"]


def test_no_prompt_is_sent_twice_to_one_server():
    found = load.prompts_of([1, 4, 16], 100)
    places = [place for own in found.values() for place in own]
    assert len(set(places)) == len(places)
    assert [len(own) for own in found.values()] == [4, 4, 16]
    with pytest.raises(typer.BadParameter, match="24"):
        load.prompts_of([1, 4, 16], 23)
