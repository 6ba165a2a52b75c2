import pytest
from support import tiny


@pytest.fixture
def deep():
    """A llama with states to read between its six layers."""
    return tiny.llama(3, num_hidden_layers=6)
