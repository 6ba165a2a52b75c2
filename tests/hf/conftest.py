import pytest
from support import tiny
from support.batches import EOS


@pytest.fixture
def ending():
    """A random llama that ends some sequences early."""
    model = tiny.llama(seed=3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, 0
    return model
