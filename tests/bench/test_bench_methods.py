"""Methods by name, and their runners: each decodes like `generate` and counts its steps."""

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
from token_recycling.loop.request import NO_HINTS, TokenSequence
from token_recycling.model.info import UnsupportedModelError


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assistant")
    tiny.llama(seed=0, num_hidden_layers=1).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "spec", ["generate", "prompt_lookup_hf:n=4,ngram=3", "assisted:model={},n=3", "plain", "recycling:tree=8,k=8"]
)
def test_every_runner_decodes_like_generate(model, spec, assistant):
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
def test_steps_of_transformers_equal_its_forward_passes(counting, spec):
    """The counting model repeats itself after 16 tokens, so prompt lookup drafts 10 tokens a step from there."""
    passes = []
    counting.register_forward_hook(lambda *_: passes.append(1))
    found = decoded(spec, counting, torch.arange(16)[None], tokens=33)
    assert found.steps == len(passes)
    assert found.lengths == ([1] * 33 if spec == "generate" else [1, 11, 11, 10])


def test_outputs_of_a_batch_equal_single_decoding(model):
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


@pytest.mark.falls_back
def test_call_that_falls_back_to_generate_is_refused(model):
    arguments = BenchmarkConfig(model, None, 4).arguments([torch.tensor([1, 2])], 4)
    with pytest.raises(UnsupportedModelError, match=r"left to transformers: .*use_cache=True"):
        parse("plain").decode(model, Call({**arguments, "use_cache": False}))


def replay(method, model, prompt, text, hints=NO_HINTS):
    """Return the outcome of a method that replays a given text."""
    arguments = BenchmarkConfig(model, None, len(text)).arguments([torch.tensor(prompt)], len(text))
    return method.decode(model, Call(arguments, torch.tensor(text), hints))


def test_replay_follows_the_text_instead_of_the_model(counting):
    """Chains of 4 that count, after a first step without a draft. After 1 the text counts to 5 (4 accepted) and jumps
    to 9, then counts to 11 and jumps to 3 (2 accepted and 3): 9 tokens in 3 steps.
    """
    method, text = Drafted("recycling"), [1, 2, 3, 4, 5, 9, 10, 11, 3]
    method.drafter = learned(counting, "chain:4")
    found = replay(method, counting, [14, 15, 0], text)
    assert found.lengths == [1, 5, 3]
    assert found.tokens == [text]
    assert (found.steps, found.stats.tokens, found.stats.mat) == (3, 9, 3.0)
    # Drafts are cut at the end of the text: all of 4 + 2 nodes were accepted.
    assert (found.stats.drafted, found.stats.discarded) == (6, 0)
    assert found.stats.accepted == {(1, 0): 2, (2, 0): 2, (3, 0): 1, (4, 0): 1}


def test_replayed_conversation_reads_earlier_turns_once(counting):
    method = Drafted("recycling")
    hints = method.hints(counting, None, turns=2)
    assert replay(method, counting, [4, 9], [1, 8, 5], hints).stats.cached_tokens == 0
    assert replay(method, counting, [4, 9, 1, 8, 5, 2, 7], [3, 6], hints).stats.cached_tokens == 4


def test_replay_selects_tokens_node_by_node(counting):
    """On accelerators, choices for all nodes at once would be the model's own instead of the text."""
    sequence = TokenSequence(torch.tensor([1, 2]), StoppingCriteriaList([MaxLengthCriteria(4)]))
    selector = ReplaySelector(sequence, torch.tensor([7, 9]), LogitsProcessorList())
    assert (selector.greedy, selector.at_every_node) == (False, False)
    assert selector(torch.eye(16)[3]) == 7


def test_drafter_learns_from_the_models_logits_in_replay(counting):
    """The text increases by two, the model by one: 13 is learned after 12, and 14 is never drafted."""
    method = Drafted("published:tree=chain:1,k=1")
    assert replay(method, counting, [0], [2, 4, 6, 8, 10, 12, 14]).steps == 7
    assert method.drafter.matrix.candidates[[0, 2, 4], 0].tolist() == [1, 3, 5]
    assert replay(method, counting, [10], [12, 14]).lengths == [1, 1]
    assert replay(method, counting, [12], [13, 5]).lengths == [2]
    method.reset()
    assert replay(method, counting, [12], [13, 5]).lengths == [1, 1]


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
def test_error_names_the_problem_of_a_method(spec, words):
    with pytest.raises(ValueError, match=words):
        parse(spec)


# The oracle of SpecDec++, on an example

THREE = torch.tensor([[3]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A draft model that counts, except that it emits 0 after 5 and after 9."""
    model, where = tiny.counting_llama(), tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        model.lm_head.weight[0, 5] = model.lm_head.weight[0, 9] = 9.0
    model.save_pretrained(where)
    return str(where)


def test_oracle_drafts_up_to_the_first_disagreement(counting, folder):
    """The output is 4 5 | 6 7 8 9 | 10 ... 15 0 1 | end. After 5 and 9 the target's own token ends a step."""
    found = decoded(f"oracle:model={folder}", counting, THREE, tokens=15)
    assert found.tokens == [[*range(4, 16), 0, 1, 2]]
    assert found.lengths == [3, 4, 8]
    assert (found.stats.drafted, found.stats.discarded) == (2 + 3 + 7, 0)
    assert found.stats.verification_rate == pytest.approx(3 / 15)  # two disagreements, and the end of the output
    for depth in (1, 4, 8):
        fixed = decoded(f"draft_model:mode=sequence,model={folder},depth={depth}", counting, THREE, tokens=15).stats
        assert found.stats.verification_rate <= fixed.verification_rate, "no fixed length does better"


def test_oracle_replays_a_text_and_refuses_sampling(counting, folder):
    """The text jumps after 7, where the draft model would count on."""
    text = [4, 5, 6, 7, 12, 13, 14]
    found = replay(Oracle("", folder), counting, [3], text)
    assert (found.tokens, found.lengths) == ([text], [3, 2, 2])
    assert found.stats.discarded == 0
    with pytest.raises(ValueError, match="needs greedy decoding, got sampling"):
        decoded(f"oracle:model={folder}", counting, THREE, tokens=8, do_sample=True)
