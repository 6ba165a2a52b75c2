"""`min_p` and `logit_bias` beside drafts, without an engine: what is let through, and rows of drafted positions."""

from types import SimpleNamespace

import pytest
import torch

from token_recycling.engines.vllm_sampling import PROPOSER, add_biases, mask_min_p, register


def test_biases_reach_every_drafted_row_of_their_request_and_no_other():
    logits = torch.zeros(6, 4)
    add_biases(logits, {0: {1: 2.0, 3: -torch.inf}, 1: {0: 9.0}, 2: {2: 0.5}}, [2, 0, 1, 3])
    wanted = torch.zeros(6, 4)
    wanted[:2, 1], wanted[:2, 3], wanted[2, 2] = 2.0, -torch.inf, 0.5
    assert torch.equal(logits, wanted)


def test_min_p_is_a_share_of_the_likeliest_after_the_temperature():
    torch.manual_seed(0)
    logits, min_p = torch.randn(4, 50) * 3, torch.tensor([0.1, 0.0, 1.0, 0.3])
    temperature, masked = torch.tensor([0.7, 1.0, 1.5, 2.0]), logits.clone()
    mask_min_p(masked, min_p, temperature)
    shares = (logits / temperature[:, None]).softmax(-1)
    kept = shares >= min_p[:, None] * shares.amax(-1, keepdim=True)
    assert torch.equal(masked, logits.masked_fill(~kept, -torch.inf))
    assert kept.sum(-1).tolist()[1:3] == [50, 1]


def test_a_greedy_row_keeps_its_likeliest_token():
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    mask_min_p(logits, torch.tensor([0.5, 0.0]), torch.zeros(2))
    assert logits.argmax(-1).tolist() == [1, 1]
    assert torch.isfinite(logits[1]).all()


def test_only_with_this_drafter_are_requests_let_through(monkeypatch):
    params = pytest.importorskip("vllm.sampling_params", reason="vLLM has an environment of its own: make test-vllm")
    errors = pytest.importorskip("vllm.exceptions")
    monkeypatch.setattr(params.SamplingParams, "_validate_spec_decode", params.SamplingParams._validate_spec_decode)
    register()
    register()
    ours = SimpleNamespace(method="custom_class", model=PROPOSER)
    for given in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        asked = params.SamplingParams(**given)
        asked._validate_spec_decode(ours)
        asked._validate_spec_decode(None)
        for others in (
            SimpleNamespace(method="suffix", model=None),
            SimpleNamespace(method="custom_class", model="a.B"),
        ):
            with pytest.raises(errors.VLLMValidationError, match="not yet supported with speculative decoding"):
                asked._validate_spec_decode(others)


def test_in_a_vllm_that_is_not_known_they_stay_refused(monkeypatch):
    params = pytest.importorskip("vllm.sampling_params", reason="vLLM has an environment of its own: make test-vllm")

    def refuse(self, config, more):
        raise ValueError

    monkeypatch.setattr(params.SamplingParams, "_validate_spec_decode", refuse)
    register()
    assert params.SamplingParams._validate_spec_decode is refuse
