"""Where a text ends, which limits hold, and that processors and criteria are called as `generate` calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import tiny
from support.drafters import learned
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import token_recycling as tr
from token_recycling.model.tree_model import TreeModel


def same(model: LlamaForCausalLM, drafter: str | tr.Drafter, seeds: range, **arguments: Any) -> None:
    """Plain and accelerated `generate` agree on prompts of several lengths, and all tokens are ours."""
    drafter = tr.make_drafter(drafter)
    for seed in seeds:
        ids = tiny.prompt(seed, 1 + 3 * seed, model.config.vocab_size)
        wanted = model.generate(ids, **arguments)
        stats = tr.Stats()
        assert torch.equal(tr.generate(model, ids, drafter=drafter, stats=stats, **arguments), wanted)
        assert stats.tokens == wanted.shape[1] - ids.shape[1]


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("tree", ["paper", "chain:4"])
def test_few_tokens_are_not_overshot(counting: LlamaForCausalLM, tree: str, tokens: int) -> None:
    stats = tr.Stats()
    ours = tr.generate(
        counting, torch.tensor([[3]]), drafter=learned(counting, tree), stats=stats, max_new_tokens=tokens
    )
    assert ours[0].tolist() == list(range(3, 4 + tokens))
    assert (stats.steps, stats.tokens) == (1, tokens)


def test_the_end_of_sequence_is_trimmed_before_cache_and_matrix(counting: LlamaForCausalLM) -> None:
    """The draft goes on past the end, 5; nothing after it is kept, and what the model says after it is not learned."""
    drafter = learned(counting, "chain:8")
    drafter.matrix.candidates[6:] = 0
    drafter.matrix.candidates[5] = 6
    before = drafter.matrix.candidates.clone()
    cache = TreeModel(counting).new_cache()
    (step,) = tr.stream(counting, torch.tensor([0]), drafter, max_new_tokens=20, eos_token_id=5, past_key_values=cache)
    assert step.tokens == [1, 2, 3, 4, 5]
    assert (step.finished, step.beyond) == (True, 5)
    assert cache.get_seq_length() == 5
    assert torch.equal(drafter.matrix.candidates[5:], before[5:])
    wanted = counting.generate(torch.tensor([[0]]), max_new_tokens=20, eos_token_id=5)
    assert wanted[0].tolist() == [0, *step.tokens]


@pytest.mark.parametrize("eos", [7, [3, 9, 40], list(range(0, 64, 4))])
@pytest.mark.parametrize("tree", ["paper", "static:8"])
def test_ends_of_sequence_equal_generate(model: LlamaForCausalLM, eos: Any, tree: str) -> None:
    same(model, tr.make_drafter("published", tree=tree), range(12), max_new_tokens=30, eos_token_id=eos, pad_token_id=0)


def test_the_models_own_end_of_sequence_holds_in_a_stream(counting: LlamaForCausalLM) -> None:
    counting.generation_config.eos_token_id = 4
    emitted = [token for step in tr.stream(counting, torch.tensor([0]), max_new_tokens=8) for token in step.tokens]
    assert emitted == [1, 2, 3, 4]
    steps = tr.stream(counting, torch.tensor([0]), max_new_tokens=8, eos_token_id=[])
    assert [token for step in steps for token in step.tokens] == list(range(1, 9))


@pytest.mark.parametrize("stop", ["a", "e", ["  ", "x"], "re"])
def test_stop_strings_equal_generate(tokenizer, stop: str | list[str]) -> None:
    model = tiny.llama(4, vocab_size=300)
    same(model, "recycling", range(6), max_new_tokens=30, stop_strings=stop, tokenizer=tokenizer)


def test_no_time_gives_one_token(counting: LlamaForCausalLM) -> None:
    drafter = learned(counting, "chain:8")
    ours = tr.generate(counting, torch.tensor([[0]]), drafter=drafter, max_new_tokens=20, max_time=1e-9)
    assert ours[0].tolist() == [0, 1]


class Recorder(StoppingCriteria):
    """Remembers what it was shown, and stops at a token; one answer a row, or a lone one as some criteria give."""

    def __init__(self, end: int, lone: bool = False) -> None:
        self.end, self.lone, self.seen = end, lone, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids[0].tolist())
        stop = input_ids[:, -1] == self.end
        return bool(stop.all()) if self.lone else stop


@pytest.mark.parametrize("lone", [False, True])
def test_criteria_are_evaluated_once_a_token(counting: LlamaForCausalLM, lone: bool) -> None:
    recorder = Recorder(end=6, lone=lone)
    ours = tr.generate(
        counting,
        torch.tensor([[1, 2]]),
        drafter=learned(counting, "chain:3"),
        max_new_tokens=20,
        stopping_criteria=StoppingCriteriaList([recorder]),
    )
    assert ours[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert recorder.seen == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]


class Noting(LogitsProcessor):
    """Remembers the texts it was called with, and forbids the token after the newest."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (input_ids[0, -1] + 1) % scores.shape[1]] = float("-inf")
        return scores


def test_processors_see_the_path_of_each_token(counting: LlamaForCausalLM) -> None:
    """With the next token forbidden the model counts by two, which the candidates of rank 1 foresee."""
    noting, stats = Noting(), tr.Stats()
    ours = tr.generate(
        counting,
        torch.tensor([[0]]),
        drafter=learned(counting, "0 1 11 111"),
        stats=stats,
        max_new_tokens=8,
        logits_processor=LogitsProcessorList([noting]),
    )
    assert ours[0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 0]
    assert stats.steps == 2
    assert noting.seen == [ours[0, :length].tolist() for length in range(1, 9)]


@pytest.mark.parametrize(
    "processing",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [5, 9], [11]]},
        {"min_new_tokens": 12, "eos_token_id": list(range(0, 64, 3)), "pad_token_id": 0},
        {"suppress_tokens": list(range(20)), "repetition_penalty": 1.1},
        {"begin_suppress_tokens": list(range(40))},
        {"sequence_bias": {(4,): 3.0, (5, 6): 4.0}},
        {"encoder_repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 2},
        {"forced_eos_token_id": 9},
        {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 7, "pad_token_id": 0},
        {"guidance_scale": 1.7, "negative_prompt_ids": tiny.prompt(9, 4)},
        {"watermarking_config": WatermarkingConfig(bias=2.0)},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
    ],
    ids=lambda processing: next(iter(processing)),
)
def test_processors_equal_generate(model: LlamaForCausalLM, processing: dict[str, Any]) -> None:
    drafter = tr.make_drafter("published", tree="paper")
    same(model, drafter, range(8), max_new_tokens=24, **processing)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("max_new_tokens", [24, 25])
def test_the_limit_of_positions_is_never_overrun(attention: str, max_new_tokens: int) -> None:
    """A GPT-2 of 32 positions fails on the 33rd; up to it every tree is cut to fit."""
    torch.manual_seed(0)
    model = tiny.gpt2()
    model.config.n_positions = 32
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:32])
    model.eval().set_attn_implementation(attention)
    drafter = tr.make_drafter("published", tree="paper")
    for seed in range(4):
        ids = tiny.prompt(seed, 8, 80)
        wanted = model.generate(ids, max_new_tokens=max_new_tokens)
        length, emitted = 8, []
        for step in tr.stream(model, ids, drafter, max_new_tokens=max_new_tokens):
            assert length - 1 + step.draft.tree.depth < 32
            emitted += step.tokens
            length += len(step.tokens)
        assert emitted == wanted[0, 8:].tolist()


def test_a_llama_goes_on_past_its_positions_without_drafts() -> None:
    model = tiny.llama(max_position_embeddings=20)
    ids = tiny.prompt(0, 10)
    text, sizes = ids[0].tolist(), {}
    for step in tr.stream(model, ids, "published", tree="paper", max_new_tokens=30):
        sizes[len(text)] = len(step.draft.tree)
        text += step.tokens
    assert text == model.generate(ids, max_new_tokens=30)[0].tolist()
    assert sizes[10] == 81
    assert {size for length, size in sizes.items() if length >= 20} == {1}


def test_steps_show_what_the_model_said(model: LlamaForCausalLM) -> None:
    ids = tiny.prompt(0, 12)
    text = ids
    for step in tr.stream(model, ids, tree="paper", max_new_tokens=20):
        assert int(step.draft.tokens[0]) == int(text[0, -1])
        assert len(step.accepted) == len(step.tokens)
        with torch.no_grad():
            wanted = model(input_ids=text).logits[0, -1]
        torch.testing.assert_close(step.logits[0], wanted, atol=1e-4, rtol=1e-4)
        text = torch.cat([text, torch.tensor([step.tokens])], dim=1)
    assert step.finished


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, dtype=torch.long), "length 1 or more"),
        (torch.zeros(2, 3, dtype=torch.long), r"got \(2, 3\)"),
        (torch.zeros(3), "float32"),
        (torch.tensor([1, 64]), "from 0 to 63, got 1 to 64"),
        (torch.tensor([-1, 3]), "from 0 to 63, got -1 to 3"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_at_once(
    model: LlamaForCausalLM, ids: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tr.stream(model, ids)


def test_a_stream_of_no_tokens_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="max_new_tokens of 1 or more, got 0"):
        tr.stream(model, tiny.prompt(0, 3), max_new_tokens=0)


# The prompt's own pass


@contextmanager
def passes(model: LlamaForCausalLM) -> Iterator[list[int]]:
    """Within it, the rows of each forward pass."""
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def test_every_pass_emits_tokens(counting: LlamaForCausalLM) -> None:
    """The prompt's too, which verifies the first draft."""
    ids = torch.arange(9)[None]
    for drafter, wanted in (("plain", [9, 1, 1]), (learned(counting, "chain:2"), [11])):
        with passes(counting) as rows:
            text = tr.generate(counting, ids, drafter=drafter, max_new_tokens=3)
        assert text[0, 9:].tolist() == [9, 10, 11]
        assert rows == wanted


def test_of_a_long_prompt_the_end_is_read_with_the_draft() -> None:
    model, ids = tiny.llama(max_position_embeddings=2048), tiny.prompt(0, 700).repeat(1, 2)
    wanted, stats = model.generate(ids, max_new_tokens=12), tr.Stats()
    with passes(model) as rows:
        assert torch.equal(tr.generate(model, ids, drafter="suffix", stats=stats, max_new_tokens=12), wanted)
    assert sum(rows[:2]) == 1399 + 12
    assert rows[1] == 512
    assert len(rows) == stats.steps + 1


class Printer:
    """Takes what a streamer is given: the prompt, then the tokens of each step."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        """Nothing more comes."""


def test_a_first_token_that_is_waited_for_brings_no_draft() -> None:
    """It comes from the pass that `generate` makes, before anything was started for the text."""
    model, started = tiny.llama(max_position_embeddings=256), []

    class Counted(type(tr.make_drafter("suffix"))):  # type: ignore[misc]
        def start(self, *args: Any) -> Any:
            started.append(printer.given[1:])
            return super().start(*args)

    ids = tiny.prompt(0, 20).repeat(1, 2)
    wanted, printer = model.generate(ids, max_new_tokens=12), Printer()
    with passes(model) as rows:
        assert torch.equal(tr.generate(model, ids, drafter=Counted(), streamer=printer, max_new_tokens=12), wanted)
    assert rows[0] == 40
    assert max(rows[1:]) > 1
    assert started == [[[int(wanted[0, 40])]]]
    with passes(model) as rows:
        assert next(tr.stream(model, ids, "suffix")).tokens == [int(wanted[0, 40])]
    assert rows == [40]
    with passes(model) as rows:
        next(tr.stream(model, ids[:, :30], "prompt_lookup"))
    assert rows[0] >= 30


def test_a_step_is_learned_from_when_its_tokens_are_out(counting: LlamaForCausalLM) -> None:
    drafter = tr.make_drafter("recycling", tree=4)
    steps = tr.stream(counting, torch.tensor([3, 4]), drafter, max_new_tokens=9)
    next(steps)
    assert not drafter.matrix.filled.any()
    next(steps)
    assert drafter.matrix.filled.any()
    learned_before = drafter.matrix.filled.sum()
    steps.close()
    assert drafter.matrix.filled.sum() > learned_before, "a text that is left teaches what it has shown"
