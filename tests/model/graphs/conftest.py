"""Steps without CUDA are recorded and replayed like captured ones."""

import pytest
import torch
from support.recorded import RecordedGraphs

from token_recycling.hf import call


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("token_recycling.model.graphs.passes.Graphs", RecordedGraphs)


@pytest.fixture
def card_of_torch(monkeypatch):
    """Exempt the simulated card and recorded attention from the search for foreign code."""
    monkeypatch.setattr("token_recycling.model.foreign.search.code_around", lambda model: [])
    monkeypatch.setattr("token_recycling.model.foreign.search.replaced_in_libraries", tuple)
    seeded = call.seeded_generators  # torch has no generators for the simulated device
    monkeypatch.setattr(call, "seeded_generators", lambda count, device, own: seeded(count, torch.device("cpu"), own))
