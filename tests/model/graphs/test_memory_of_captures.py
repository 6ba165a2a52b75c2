"""If memory does not suffice for a capture, the pass runs eagerly and capturing stops."""

import logging
from collections import OrderedDict

import pytest
import torch

from token_recycling.model.graphs.capture import Graphs


class SimulatedGraphs(Graphs):
    """Graphs of a simulated card; the third capture runs out of memory."""

    def __init__(self):
        self.device, self.stopped, self.captures = torch.device("cuda"), False, 0
        self._kept = OrderedDict()

    def _capture(self, function):
        self.captures += 1
        if self.captures == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Replayed(), function()


class Replayed:
    def replay(self):
        pass


@pytest.fixture
def emptied(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    return calls


def test_out_of_memory_during_a_capture_falls_back_to_eager_passes(emptied, caplog):
    graphs = SimulatedGraphs()
    with caplog.at_level(logging.WARNING, "token_recycling"):
        results = [graphs.run(key, lambda key=key: f"pass {key}") for key in (1, 2, 3, 1, 4)]
    assert results == ["pass 1", "pass 2", "pass 3", "pass 1", "pass 4"]
    assert graphs.captures == 3
    assert graphs.stopped
    assert 1 not in graphs, "earlier captures free their memory"
    assert emptied == [1]
    assert sum("not enough memory" in record.message for record in caplog.records) == 1
