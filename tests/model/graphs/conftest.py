"""Steps without CUDA: recorded and replayed, as captured ones are."""

import pytest
import torch
from support.recorded import RecordedGraphs

from token_recycling.hf import call


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("token_recycling.model.graphs.passes.Graphs", RecordedGraphs)


@pytest.fixture
def card_of_torch(monkeypatch):
    """A card that is played, and attention that is watched on it, are no code that may change a forward pass."""
    monkeypatch.setattr("token_recycling.model.foreign.search.code_around", lambda model: [])
    monkeypatch.setattr("token_recycling.model.foreign.search.replaced_in_libraries", tuple)
    seeded = call.seeded_generators  # torch has none for a device like this
    monkeypatch.setattr(call, "seeded_generators", lambda count, device, own: seeded(count, torch.device("cpu"), own))
