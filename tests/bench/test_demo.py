"""`make demo` runs every job."""

from benchmarks import demo
from benchmarks.real_model import NoRealModelError


def test_tiny_model_runs_every_job_without_a_network(monkeypatch, capsys):
    def fail():
        raise NoRealModelError("no network")

    monkeypatch.setattr(demo, "fetched", fail)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    demo.main()
    said = capsys.readouterr().out
    assert "not available (no network)" in said
    for job in demo.JOBS:
        assert f"{job.title}, cold" in said
        assert f"{job.title}, warm" in said
    assert said.splitlines()[-1] == "identical: yes"
