import pytest
from support import tiny


@pytest.fixture
def deep():
    """A llama of six layers, so that there are states between layers."""
    return tiny.llama(3, num_hidden_layers=6)
