"""Device of the tests in this folder: a card if there is one, else the CPU, which only checks that the tests run."""

from pathlib import Path

import pytest
import torch
from support.architectures import SUPPORTED
from support.recurrent_architectures import RECURRENT

HERE = Path(__file__).parent
FEW = ("llama", "gpt2", "mixtral", "qwen3_5_text")
"""Families tested without a card; other tests cover all families on the CPU."""


def _device(config):
    given = config.getoption("device")
    if given == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a CUDA device, got none; --device cpu checks that the tests run")
    return torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = [*SUPPORTED, *RECURRENT]
        if _device(metafunc.config).type == "cpu":
            cases = [case for case in cases if str(case) in FEW]
        metafunc.parametrize("case", cases, ids=str)


def pytest_collection_modifyitems(config, items):
    """Without a card keep only the first and the last case of each test."""
    if _device(config).type != "cpu":
        return
    by_test = {}
    for item in items:
        if HERE in item.path.parents:
            by_test.setdefault((item.path, item.originalname), []).append(item)
    left_out = {id(item) for cases in by_test.values() for item in cases[1:-1]}
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture(scope="session")
def device(pytestconfig):
    return _device(pytestconfig)


@pytest.fixture(autouse=True)
def exact_convolutions(device):
    """Compute float32 convolutions on a card in float32, as matrix products are."""
    if device.type == "cpu":
        yield
        return
    own = torch.backends.cudnn
    with own.flags(own.enabled, own.benchmark, own.benchmark_limit, own.deterministic, allow_tf32=False):
        yield


@pytest.fixture
def placed(model, device):
    """A random llama on the device, with padding token 0."""
    model.generation_config.pad_token_id = 0
    return model.to(device)
