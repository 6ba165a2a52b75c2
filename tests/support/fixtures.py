"""Fixtures of all tests, loaded only in processes that run tests."""

import itertools
import logging
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support import tiny
from support.commandline import CONTEXT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from token_recycling.model.loading import load

SHIPPED = Path(__file__).parents[2] / "models" / "target"
CACHES = itertools.count()

# The same examples on every machine and in every run.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """An empty cache folder, so that no test reads or writes the user's measurements. The first write creates it:
    pytest is slow at numbering and removing thousands of folders.
    """
    folder = tmp_path_factory.getbasetemp() / f"cache{next(CACHES)}"
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def fixed_costs(request, monkeypatch):
    """Fix the costs to those of one fictional machine, so that draft sizes do not depend on this machine's load."""
    if request.node.get_closest_marker("measured") is None:
        from support.runs import fix_costs, freeze_overhead  # numba, which vLLM's tests must import after their engine

        fix_costs(monkeypatch, (1, 64), (1.0, 2.0))
        freeze_overhead(monkeypatch)


@pytest.fixture(autouse=True)
def accelerated(request):
    """Fail a test in which transformers decodes a call, since the test would compare `generate` with itself. The marker
    `falls_back` allows such calls. A call that cannot be examined may hide our own fault: it also needs the marker
    `failing_objects`, for tests whose objects fail there on purpose.
    """
    records: list[logging.LogRecord] = []
    noting, logger = logging.Handler(logging.WARNING), logging.getLogger("token_recycling")
    noting.emit = records.append
    logger.addHandler(noting)
    yield
    logger.removeHandler(noting)
    reasons = [record.getMessage() for record in records if record.msg.startswith("not accelerated")]
    if request.node.get_closest_marker("falls_back") is None:
        assert not reasons
    if request.node.get_closest_marker("failing_objects") is None:
        assert not [reason for reason in reasons if "cannot be examined" in reason]


@pytest.fixture
def nothing_compiled():
    """Reset torch's compiler and its counters before the test, and the compiler after it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def switching_often():
    """Make threads switch every few operations."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def model():
    """A random llama with 64 tokens, new for each test."""
    return tiny.llama()


@pytest.fixture
def counting():
    """A llama with 16 tokens that counts."""
    return tiny.counting_llama()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def shipped():
    """The target model that ships with the project, in float32, and its tokenizer."""
    assert (SHIPPED / "model.safetensors").exists(), f"no model in {SHIPPED}, which is part of the repository"
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(SHIPPED)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Folder of a llama whose tokens are bytes, so that multi-byte characters arrive in parts."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab = {byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=256,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def loaded(tiny_model_dir):
    """Model and tokenizer from `tiny_model_dir`."""
    return load(tiny_model_dir)
