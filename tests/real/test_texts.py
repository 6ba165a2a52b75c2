"""Outputs of a real model with every drafter equal those of transformers' `generate`, token by token in float32."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from support import chi_square
from support.real_prompts import CONVERSATION, QUESTIONS

import token_recycling as tr

pytestmark = pytest.mark.real

NEW = 32
DRAFTERS = {
    "plain": "plain",
    "recycling": "recycling",
    "fixed": "recycling:tree=16",
    "published": "published",
    "suffix": "suffix",
    "prompt_lookup": "prompt_lookup",
    "lookahead": "lookahead",
    "rest": "rest:datastore={datastore},nodes=8",
    "layer_skip": "layer_skip",
    "fuse": "fuse:recycling(tree=16)+suffix,nodes=16",
}
JOBS = Path(__file__).parents[2] / "benchmarks" / "scenarios" / "jobs.jsonl"


@pytest.fixture(scope="session")
def drafters(datastore):
    """Every drafter keeps its learned state from question to question."""
    return {name: tr.make_drafter(spec.format(datastore=datastore)) for name, spec in DRAFTERS.items()}


@pytest.mark.parametrize("kind", QUESTIONS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_equal_those_of_generate(name, kind, real, ids, answer, drafters):
    for question in QUESTIONS[kind]:
        said = tr.generate(real.model, ids(question), drafter=drafters[name], max_new_tokens=NEW, do_sample=False)
        assert said.tolist() == answer(question).tolist(), question


@pytest.mark.parametrize("name", ["recycling", "fixed", "suffix"])
def test_tool_calls_within_a_schema_equal_those_of_generate(name, real, ids, drafters):
    """Drafters learn from call to call, so drafts reach deep into the grammar."""
    for job in map(json.loads, JOBS.read_text(encoding="utf-8").splitlines()):
        if job["category"] == "tool calls":

            def arguments(job=job):
                processor = tr.constrain(real.tokenizer, json_schema=job["json_schema"])
                return {"max_new_tokens": 64, "do_sample": False, "logits_processor": [processor]}

            prompt = ids(job["prompt"])
            said = tr.generate(real.model, prompt, drafter=drafters[name], **arguments())
            assert said.tolist() == real.model.generate(prompt, **arguments()).tolist(), job["id"]


@pytest.mark.parametrize("name", ["recycling", "fixed", "suffix"])
def test_batches_equal_those_of_generate(name, real, drafters):
    """Questions of different lengths, padded on the left."""
    chats = [[{"role": "user", "content": kind[0]}] for kind in QUESTIONS.values()]
    batch = real.tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    arguments = {**batch, "max_new_tokens": NEW, "do_sample": False}
    stats = tr.Stats()
    said = tr.generate(real.model, **arguments, drafter=drafters[name], stats=stats)
    assert said.tolist() == real.model.generate(**arguments).tolist()
    assert stats.drafted > 0


def test_sampled_outputs_have_the_exact_distribution(real, ids):
    """Every output of three tokens with top_k=3, sampled 480 times, against its exact probability."""
    prompt, sampling = ids("Name a colour."), {"do_sample": True, "top_k": 3, "temperature": 1.5}
    texts = torch.empty(1, 0, dtype=torch.long)
    exact = torch.ones(1, dtype=torch.double)
    for _ in range(3):
        shown = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        before = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
        mask = torch.ones_like(before)
        (scores,) = real.model.generate(before, attention_mask=mask, **sampling, **shown).scores
        probabilities, likely = scores.double().softmax(-1).topk(3)
        pairs = list(product(range(len(texts)), range(3)))
        texts = torch.stack([torch.cat([texts[row], likely[row, place : place + 1]]) for row, place in pairs])
        exact = torch.stack([exact[row] * probabilities[row, place] for row, place in pairs])
    assert real.model.generation_config.eos_token_id not in texts
    drafter, stats, seen = tr.make_drafter("recycling:tree=4"), tr.Stats(), Counter()
    torch.manual_seed(0)
    for _ in range(20):
        rows = prompt.expand(24, -1)
        arguments = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 3, **sampling}
        said = tr.generate(real.model, rows, **arguments, drafter=drafter, stats=stats)
        seen.update(tuple(text) for text in said[:, prompt.shape[1] :].tolist())
    assert stats.drafted > 0
    assert chi_square.fit(seen, texts, exact) > 1e-3


def test_conversation_equals_that_of_generate(real, ids):
    """Five turns, each of which reads the whole conversation, with one drafter that learns from turn to turn."""
    with tr.accelerated(real.model) as acceleration:
        found = _conversation(real, ids)
        assert acceleration.total.mat > 1
        assert acceleration.fallback is None
    assert found == _conversation(real, ids)


def _conversation(real, ids):
    turns = []
    for said in CONVERSATION:
        prompt = ids(*turns, said)
        text = real.model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
        turns += [said, real.tokenizer.decode(text, skip_special_tokens=True)]
    return turns[1::2]
