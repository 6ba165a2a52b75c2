"""Steps without CUDA: recorded and replayed, as captured ones are."""

import pytest
from support.recorded import RecordedGraphs


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("token_recycling.model.graphs.passes.Graphs", RecordedGraphs)
