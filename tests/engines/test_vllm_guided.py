"""Requests of vLLM guided by a grammar, in a separate process: `nox -s vllm`.

The engine runs the shipped model, since a grammar needs a tokenizer.
"""

import re

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: nox -s vllm")

from support.vllm_engine import SHIPPED, counts, engine, runner_of
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.measured


PATTERN = r"(ab|ba)(cd|dc){12}"


def test_guided_requests_follow_their_grammar_and_are_not_learned():
    """Two guided requests in one batch with a free request."""
    llm = engine(SHIPPED, {"token_cost": 0}, skip_tokenizer_init=False)
    recycler, masked, learned = runner_of(llm).drafter.recycler, [], []
    observe = recycler.observe_logits

    def kept(contexts, logits, rows):
        masked.append(int(torch.isinf(logits).any(1).sum()))
        learned.append(int(torch.isinf(logits[rows]).any(1).sum()))
        observe(contexts, logits, rows)

    recycler.observe_logits = kept
    guided = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=PATTERN))
    asked = [guided, SamplingParams(temperature=0, max_tokens=40), guided]
    answers = llm.generate(["x = ", "def f", "y = "], asked, use_tqdm=False)
    for place in (0, 2):
        assert re.fullmatch(PATTERN, answers[place].outputs[0].text)
    assert sum(masked) > 20
    assert sum(learned) == 0
    assert recycler.matrix.lessons > 20
    assert counts(llm)["draft_tokens"] > 0
