"""Assistants with another tokenizer: drafts equal those with the target's tokenizer, and those without a cache."""

import pytest
import torch
from support import assistants, tiny
from support.cases import thinned
from support.releases import skip_without
from support.runs import drafts_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import token_recycling as tr
from token_recycling.drafters.assistant import Assistant, Translation
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.model.target import Target

WORDS = tiny.tokenizer()
PROMPT = WORDS("def add(a, b):\n    return", return_tensors="pt")["input_ids"]
SIZE = len(WORDS)


@pytest.fixture(scope="module")
def target():
    return tiny.llama(2, vocab_size=SIZE)


def small_tokenizer():
    """A tokenizer trained on other text, with fewer tokens of several letters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<start>"],
        show_progress=False,
    )
    made.train_from_iterator(["return add printing index of all"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<start>")


@pytest.mark.parametrize(
    "options",
    thinned(
        [
            {"nodes": 12, "theta_prob": 0.05},
            {"mode": "sequence", "depth": 3},
            {"mode": "tree", "nodes": 12, "theta_prob": 0.05},
        ],
        ids=lambda options: options.get("mode", "graph"),
    ),
)
def test_same_model_with_another_tokenizer_drafts_the_same(target, options):
    other, words = assistants.with_permuted_ids(tiny.related(target), WORDS)
    drafters = (
        DraftModel(tiny.related(target), **options),
        Assistant(other, tokenizer=WORDS, assistant_tokenizer=words, **options),
    )
    stats = tr.Stats()
    wanted, found = (drafts_of(target, drafter, PROMPT, max_new_tokens=40, stats=stats) for drafter in drafters)
    assert found == wanted
    assert min(stats.lengths) == 1
    assert max(stats.lengths) > 2


@torch.no_grad()
def test_drafts_equal_those_computed_without_a_cache(target):
    """With tokens that only one of the two vocabularies contains, over steps with rejections."""
    words = small_tokenizer()
    model = tiny.llama(3, vocab_size=len(words))
    translation, text = Translation(WORDS, words, Target(target)), PROMPT[0].tolist()
    assert 256 <= len(translation.shared) < min(SIZE, len(words))
    own = words(WORDS.decode(text), add_special_tokens=False)["input_ids"]
    drafter = Assistant(model, mode="sequence", depth=3, tokenizer=WORDS, assistant_tokenizer=words)
    lengths = set()
    for step in tr.stream(target, PROMPT, drafter, max_new_tokens=40):
        read, drafted = list(own), step.draft.tokens.tolist()[1:]
        for token in drafted:
            logits = model(torch.tensor([read])).logits[0, -1]
            best = max(translation.shared, key=lambda one: float(logits[translation.shared[one]]))
            assert token == best
            read.append(translation.shared[best])
        for token in step.tokens:
            spelt = words(WORDS.decode([token], skip_special_tokens=True), add_special_tokens=False)["input_ids"]
            own += [translation.shared[token]] if token in translation.shared else spelt
            lengths.add(len(spelt))
    assert max(lengths) > 1, "some tokens translate to several"


def test_nothing_is_drafted_without_translatable_tokens(target):
    """The prompt consists of special tokens only; later tokens are translated."""
    other, words = assistants.with_permuted_ids(target, WORDS)
    ids = torch.tensor([[WORDS.eos_token_id] * 3])
    drafter = Assistant(other, nodes=6, tokenizer=WORDS, assistant_tokenizer=words)
    steps = list(tr.stream(target, ids, drafter, max_new_tokens=16))
    assert len(steps[0].draft) == 1
    assert any(len(step.draft) > 1 for step in steps)
    assert [t for step in steps for t in step.tokens] == target.generate(ids, max_new_tokens=16)[0, 3:].tolist()


def test_prompt_begins_with_the_assistants_special_token_and_leading_spaces_are_kept():
    """The target's tokenizer strips a leading space."""
    words = small_tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", words.bos_token_id)]
    )
    translation = Translation(WORDS, words, Target(tiny.llama(vocab_size=SIZE)))
    assert translation.prompt(PROMPT[0])[0] == words.bos_token_id
    assert words.bos_token_id not in translation.one(4, 5)
    made = Tokenizer(models.WordLevel({"▁a": 0, "▁long": 1, "b": 2}, unk_token="b"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    theirs = PreTrainedTokenizerFast(tokenizer_object=made)
    assert theirs.decode([1]) == "long"
    translation = Translation(theirs, words, Target(tiny.llama(vocab_size=3)))
    assert words.decode(translation.one(0, 1)) == " long"


def assistant_on_the_targets_cache(folder):
    """Save the configuration of an assistant that reads the target's cache."""
    skip_without("gemma4_assistant", CONFIG_MAPPING)
    text = CONFIG_MAPPING["gemma4_text"](
        num_hidden_layers=2, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0
    )
    CONFIG_MAPPING["gemma4_assistant"](text_config=text).save_pretrained(folder)
    return {"model": str(folder)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda folder: {"assistant_tokenizer": WORDS}, "the target's tokenizer"),
        (lambda folder: {"tokenizer": WORDS}, "the assistant's tokenizer"),
        (lambda folder: {"tokenizer": WORDS, "assistant_tokenizer": assistants.word_tokenizer(SIZE)}, "shares none of"),
        (lambda folder: {"tokenizer": WORDS, "assistant_tokenizer": WORDS, "model": tiny.llama()}, "logits for all"),
        (lambda folder: {"model": "/missing"}, "/missing"),
        (lambda folder: {"model": str(folder)}, "no config.json"),
        (assistant_on_the_targets_cache, "gemma4_assistant"),
    ],
)
def test_unusable_assistants_are_refused(target, options, said, tmp_path):
    drafter = Assistant(**{"model": target, **options(tmp_path)})
    with pytest.raises(ValueError, match=said):
        tr.generate(target, PROMPT, drafter=drafter, max_new_tokens=4)


def test_tokenizers_in_the_model_folders_are_found(target, tmp_path):
    other, words = assistants.with_permuted_ids(tiny.related(target), WORDS)
    for name, model, tokenizer in (("target", target, WORDS), ("assistant", other, words)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    loaded, stats = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32), tr.Stats()
    drafter = tr.make_drafter(f"assistant:model={tmp_path / 'assistant'},nodes=8")
    tr.generate(loaded, PROMPT, drafter=drafter, max_new_tokens=30, stats=stats)
    assert stats.mat > 1.2
