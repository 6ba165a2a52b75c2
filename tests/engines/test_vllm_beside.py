"""Beside an EAGLE head of random weights, on vLLM's CPU build: `make test-vllm` runs this, in a process of its own.

The head's layer says nothing and its projection hands on the newest token's embedding, which says much about the next
token of these models: so it is right now and then.
"""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from safetensors.torch import save_file
from support.vllm_engine import VOCABULARY, counts, engine, greedy, llama, prompts, runner_of, say, wanted
from vllm import SamplingParams

BESIDE = "token_recycling.engines.vllm_beside.BesideHeads"
SPECULATION = {"method": "eagle", "num_speculative_tokens": 8, "disable_padded_drafter_batch": True}
HEAD_TOKENS = 3


def save_head(folder, target):
    """An EAGLE head of one layer for a target, in the files of vLLM's `EagleLlamaForCausalLM`."""
    folder.mkdir()
    head = llama(seed=5, context=0.01, num_hidden_layers=1)
    held = {name.removeprefix("model."): value for name, value in head.state_dict().items()}
    weights = {name: held[name] for name in held if "layers." in name and "input_layernorm" not in name}
    width = target.config.hidden_size
    weights["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    weights["embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, folder / "model.safetensors")
    config = {**head.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def model():
    return llama(seed=3)


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("beside")
    model.save_pretrained(path / "model")
    save_head(path / "head", model)
    return engine(
        path / "model",
        {"token_cost": 0, "head_tokens": HEAD_TOKENS},
        speculative_config={**SPECULATION, "model": str(path / "head")},
        worker_extension_cls=BESIDE,
        max_num_batched_tokens=64,
        max_num_seqs=16,
    )


@pytest.fixture
def seen(llm, monkeypatch):
    """Every step's chains, and drafts of both."""
    from token_recycling.engines.vllm_beside import Beside

    steps, join = [], Beside.join

    def joined(self, chains, by_heads):
        drafts = join(self, chains, by_heads)
        steps.append((chains, by_heads.tolist(), drafts))
        return drafts

    monkeypatch.setattr(Beside, "join", joined)
    return steps


def test_texts_are_those_of_transformers_with_drafts_of_both(llm, model, seen):
    asked = prompts(24)
    lengths = [30 + 13 * place % 50 for place in range(24)]
    before = counts(llm)["accepted_tokens"]
    said = say(llm, asked, [greedy(length) for length in lengths])
    for prompt, length, text in zip(asked, lengths, said, strict=True):
        assert text == wanted(model, prompt, length)
    assert counts(llm)["accepted_tokens"] - before > 100
    taken = [bool(chain) for chains, _, _ in seen for chain in chains]
    assert 0.05 < sum(taken) / len(taken) < 0.95, "both have drafted"
    for chains, by_heads, drafts in seen:
        assert drafts == [chain or heads for chain, heads in zip(chains, by_heads, strict=True)]
        assert all(len(heads) in (0, HEAD_TOKENS) for heads in by_heads)


def test_a_text_that_is_known_is_copied_and_heads_make_no_passes(llm, model, seen):
    (prompt,) = prompts(1, 40, 40)
    first = say(llm, [prompt], greedy(120))
    del seen[:]
    assert say(llm, [prompt], greedy(120)) == first == [wanted(model, prompt, 120)]
    assert len(seen) < 120 / 4
    assert sum(len(chains[0]) == 8 and not by_heads[0] for chains, by_heads, _ in seen) > 120 / 9 / 2


def test_sampled_requests_are_drafted_for_by_both_and_greedy_ones_beside_them_stay_greedy(llm, model, seen):
    asked = prompts(8, 20, 20)
    sampled = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, detokenize=False)
    said = say(llm, asked, [sampled if place % 2 else greedy(40) for place in range(8)])
    for place in range(0, 8, 2):
        assert said[place] == wanted(model, asked[place], 40)


def test_two_tokens_have_the_distribution_of_the_model(llm, model):
    """The second is drafted, by whoever is surer."""
    from scipy.stats import chisquare

    (prompt,), number = prompts(1, 7, 7), 1_500
    parameters = SamplingParams(temperature=0.9, max_tokens=2, ignore_eos=True, detokenize=False)
    said = say(llm, [prompt] * number, parameters)
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1] / 0.9).softmax(-1).double()
        rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        both = first[:, None] * (model(rows).logits[:, -1] / 0.9).softmax(-1).double()
    seen = torch.zeros(VOCABULARY, VOCABULARY)
    for one, two in said:
        seen[one, two] += 1
    usual = both * number >= 5
    found, expected = seen[usual].double(), both[usual] * number
    found, expected = (torch.cat([part, torch.tensor([number - part.sum()])]) for part in (found, expected))
    assert chisquare(found.numpy(), expected.numpy() * (found.sum() / expected.sum()).item()).pvalue > 1e-3


def test_logits_are_learned_from(llm):
    assert runner_of(llm).token_recycling.recycler.lessons > 100


def config(**changes):
    """As much of vLLM's configuration as is asked for."""
    speculative = {
        "use_eagle": lambda: True,
        "parallel_drafting": False,
        "disable_padded_drafter_batch": True,
        "draft_sample_method": "greedy",
        "method": "eagle",
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**speculative, **changes}),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_eagle": lambda: False, "method": "suffix"}, "expected the method eagle, eagle3 or mtp.*got 'suffix'"),
        ({"disable_padded_drafter_batch": False}, "set disable_padded_drafter_batch to true"),
        ({"draft_sample_method": "probabilistic"}, "expected draft_sample_method='greedy', got 'probabilistic'"),
    ],
)
def test_configurations_whose_drafts_cannot_be_replaced_are_refused(llm, changes, message):
    from token_recycling.engines.vllm_beside import _check

    with pytest.raises(ValueError, match=message):
        _check(config(**changes))
