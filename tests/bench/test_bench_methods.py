"""Methods by name, and their runners: each decodes what `generate` does, and counts its steps."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.benching import decoded
from support.drafters import learned
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from token_recycling.bench.methods import Call, Drafted, Oracle, ReplaySelector, parse
from token_recycling.bench.prompts import BenchmarkConfig
from token_recycling.loop.request import TokenSequence
from token_recycling.model.info import UnsupportedModelError


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assistant")
    tiny.llama(seed=0, num_hidden_layers=1).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "spec", ["generate", "prompt_lookup_hf:n=4,ngram=3", "assisted:model={},n=3", "plain", "recycling:tree=8,k=8"]
)
def test_every_runner_decodes_as_generate_does(model, spec, assistant):
    prompt = tiny.prompt(3, 6).repeat(1, 3)
    wanted = model.generate(prompt, max_new_tokens=30, do_sample=False)[0, 18:].tolist()
    found = decoded(spec.format(assistant), model, prompt)
    assert found.tokens == [wanted]
    assert sum(found.lengths or ()) == 30
    assert found.steps == len(found.lengths or ())
    assert found.prefill_seconds > 0
    assert found.seconds > 0
    assert found.total_seconds >= found.prefill_seconds + found.seconds


@pytest.mark.parametrize("spec", ["generate", "prompt_lookup_hf"])
def test_steps_of_transformers_are_its_forward_passes(counting, spec):
    """The counting model repeats itself after 16 tokens, so that prompt lookup drafts 10 tokens a step from there."""
    passes = []
    counting.register_forward_hook(lambda *_: passes.append(1))
    found = decoded(spec, counting, torch.arange(16)[None], tokens=33)
    assert found.steps == len(passes)
    assert found.lengths == ([1] * 33 if spec == "generate" else [1, 11, 11, 10])


def test_a_batch_is_decoded_text_by_text(model):
    prompts = [tiny.prompt(1, 5), tiny.prompt(2, 9), tiny.prompt(3, 7)]
    wanted = [model.generate(one, max_new_tokens=12, do_sample=False)[0, one.shape[1] :].tolist() for one in prompts]
    for spec in ("generate", "recycling:tree=3"):
        found = decoded(spec, model, *prompts, tokens=12)
        assert found.tokens == wanted
        assert [one.tolist() for one in found.prompts] == [one[0].tolist() for one in prompts]
        assert found.lengths is None
    assert decoded("generate", model, *prompts, tokens=12).steps == 36


def test_tokens_end_with_the_end_of_sequence(counting):
    counting.generation_config.eos_token_id = 7
    counting.generation_config.pad_token_id = 0
    for spec in ("generate", "plain", "prompt_lookup_hf"):
        assert decoded(spec, counting, torch.tensor([[3]])).tokens == [[4, 5, 6, 7]]
    batch = decoded("generate", counting, torch.tensor([[3]]), torch.tensor([[5]]))
    assert batch.tokens == [[4, 5, 6, 7], [6, 7]]
    assert batch.steps == 6


def test_a_call_left_to_transformers_is_no_measurement_of_ours(model):
    arguments = BenchmarkConfig(model, None, 4).arguments([torch.tensor([1, 2])], 4)
    with pytest.raises(UnsupportedModelError, match=r"left to transformers: .*use_cache=True"):
        parse("plain").decode(model, Call({**arguments, "use_cache": False}))


def replayed(method, model, prompt, text):
    """What a method makes of a given text."""
    arguments = BenchmarkConfig(model, None, len(text)).arguments([torch.tensor(prompt)], len(text))
    return method.decode(model, Call(arguments, torch.tensor(text)))


def test_replay_follows_the_text_whatever_the_model_says(counting):
    """Chains of 4 that count. After 0 the text counts to 5 (4 accepted and 5), jumps to 9 (nothing accepted), counts to
    11 and jumps to 3 (2 accepted and 3): 9 tokens in 3 steps.
    """
    method, text = Drafted("recycling"), [1, 2, 3, 4, 5, 9, 10, 11, 3]
    method.drafter = learned(counting, "chain:4")
    found = replayed(method, counting, [14, 15, 0], text)
    assert found.lengths == [5, 1, 3]
    assert found.tokens == [text]
    assert (found.steps, found.stats.tokens, found.stats.mat) == (3, 9, 3.0)
    # Drafts are cut where the text ends: of 4 + 3 + 2 nodes 4 + 0 + 2 were right.
    assert (found.stats.drafted, found.stats.discarded) == (9, 3)
    assert found.stats.accepted == {(1, 0): 2, (2, 0): 2, (3, 0): 1, (4, 0): 1}


def test_no_choice_is_made_for_all_nodes_at_once(counting):
    """As on accelerators, where the model's own choices would take the place of the text."""
    sequence = TokenSequence(torch.tensor([1, 2]), StoppingCriteriaList([MaxLengthCriteria(4)]))
    selector = ReplaySelector(sequence, torch.tensor([7, 9]), LogitsProcessorList())
    assert (selector.greedy, selector.at_every_node) == (False, False)
    assert selector(torch.eye(16)[3]) == 7


def test_in_replay_a_drafter_learns_from_the_models_logits(counting):
    """The text jumps by two, the model counts: what is learned after 12 is 13, and 14 is never drafted."""
    method = Drafted("published:tree=chain:1,k=1")
    assert replayed(method, counting, [0], [2, 4, 6, 8, 10, 12, 14]).steps == 7
    assert method.drafter.matrix.candidates[[0, 2, 4], 0].tolist() == [1, 3, 5]
    assert replayed(method, counting, [10], [12, 14]).lengths == [1, 1]
    assert replayed(method, counting, [12], [13, 5]).lengths == [2]
    method.reset()
    assert replayed(method, counting, [12], [13, 5]).lengths == [1, 1]


def test_prompt_lookup_is_replayed_by_its_drafter():
    assert parse("generate").replayed is None
    assert parse("prompt_lookup_hf:n=4").replayed == "prompt_lookup:num_tokens=4,max_matching_ngram_size=2"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "must be one of generate, prompt_lookup_hf, assisted, oracle, .*plain.*'nothing'"),
        ("recycling:size=3", "recycling has no option 'size'"),
        ("published:update=never", "never"),
        ("generate:n=3", "generate has no option 'n'"),
        ("prompt_lookup_hf:num_tokens", "NAME=VALUE .*'num_tokens'"),
        ("suffix:num_tokens", "NAME=VALUE .*'num_tokens'"),
        ("prompt_lookup_hf:n=none", "n must be an integer >= 1"),
        ("prompt_lookup_hf:n=0", "n must be an integer >= 1"),
        ("assisted", "assisted:model=FOLDER"),
        ("assisted:model=a,speed=3", "assisted has no option 'speed'"),
        ("oracle", "oracle:model=FOLDER"),
        ("oracle:model=x,n=3", "oracle has no option 'n'"),
        ("forced:prompt_lookup_hf", "needs a drafter.*'forced:prompt_lookup_hf'"),
    ],
)
def test_what_is_wrong_with_a_method_is_said(spec, words):
    with pytest.raises(ValueError, match=words):
        parse(spec)


# The oracle of SpecDec++, by a worked example

THREE = torch.tensor([[3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A draft model of the counting one that says 0 after 5 and after 9."""
    model, where = tiny.counting_llama(), tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        model.lm_head.weight[0, 5] = model.lm_head.weight[0, 9] = 9.0
    model.save_pretrained(where)
    return str(where)


def test_the_oracle_drafts_up_to_the_first_disagreement(counting, folder):
    """The text is 4 5 | 6 7 8 9 | 10 ... 15 0 1 | end. After 5 and 9 the target's own token ends a step: 3, 4 and 8."""
    found = decoded(f"oracle:model={folder}", counting, THREE, tokens=15)
    assert found.tokens == [[*range(4, 16), 0, 1, 2]]
    assert found.lengths == [3, 4, 8]
    assert (found.stats.drafted, found.stats.discarded) == (2 + 3 + 7, 0)
    assert found.stats.verification_rate == pytest.approx(3 / 15)  # two disagreements, and the end of the text
    for depth in (1, 4, 8):
        fixed = decoded(f"draft_model:mode=sequence,model={folder},depth={depth}", counting, THREE, tokens=15).stats
        assert found.stats.verification_rate <= fixed.verification_rate, "no fixed length does better"


def test_the_oracle_replays_a_text_and_knows_no_future_of_drawn_ones(counting, folder):
    """The text jumps after 7, where the draft model would count on."""
    text = [4, 5, 6, 7, 12, 13, 14]
    found = replayed(Oracle("", folder), counting, [3], text)
    assert (found.tokens, found.lengths) == ([text], [3, 2, 2])
    assert found.stats.discarded == 0
    with pytest.raises(ValueError, match="needs greedy decoding, got sampling"):
        decoded(f"oracle:model={folder}", counting, THREE, tokens=8, do_sample=True)
