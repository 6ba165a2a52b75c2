"""Grammars of other libraries: the output is that of `generate` with the same processor; drafts follow the grammar."""

import json
import re
import sys
from collections import Counter

import pytest
import torch
import transformers
from scipy.stats import chi2_contingency

import token_recycling as tr

PROMPT = 'person = json.loads("""'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "occupation": {"enum": ["carpenter", "programmer", "printer"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "relatives": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "occupation", "age", "relatives"],
    "additionalProperties": False,
}
LINES = r"(self\.[a-z]{2,6} = [0-9]+\n        ){3,9}"
"""Assignments in a class, as the shipped model writes them."""


def from_xgrammar(model, tokenizer):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    return LogitsProcessor(xgrammar.GrammarCompiler(known).compile_json_schema(SCHEMA, any_whitespace=False))


def from_constrain(model, tokenizer):
    return tr.constrain(model, json_schema=SCHEMA)


def from_outlines(backend, *modules):
    def made(model, tokenizer):
        outlines = pytest.importorskip("outlines")
        for module in (backend, *modules):
            pytest.importorskip(module)
        from outlines.backends import get_json_schema_logits_processor

        wrapped = outlines.from_transformers(model, tokenizer)
        return get_json_schema_logits_processor(backend, wrapped, json.dumps(SCHEMA))

    return made


def from_lm_format_enforcer(model, tokenizer):
    pytest.importorskip("lmformatenforcer")
    # Its newest release imports a module that transformers 5 has removed.
    sys.modules.setdefault("transformers.tokenization_utils", transformers.tokenization_utils_base)
    from lmformatenforcer import JsonSchemaParser
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn
    from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

    return PrefixConstrainedLogitsProcessor(
        build_transformers_prefix_allowed_tokens_fn(tokenizer, JsonSchemaParser(SCHEMA)), 1
    )


LIBRARIES = {
    "xgrammar": from_xgrammar,
    "constrain": from_constrain,
    "outlines on xgrammar": from_outlines("xgrammar"),
    "outlines on llguidance": from_outlines("llguidance"),
    "outlines-core": from_outlines("outlines_core"),
    "lm-format-enforcer": from_lm_format_enforcer,
}


def assert_same_output(model, tokenizer, processor, **how):
    """Return the output of `generate`, which ours must equal, and our statistics."""
    inputs, stats = tokenizer(PROMPT, return_tensors="pt"), tr.Stats()
    how = {"max_new_tokens": 60, "do_sample": False, **how}
    texts = []
    for call in (model.generate, lambda **given: tr.generate(model, stats=stats, **given)):
        torch.manual_seed(3)
        texts.append(call(**inputs, **how, logits_processor=[processor(model, tokenizer)]))
    assert torch.equal(*texts)
    return tokenizer.decode(texts[0][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), stats


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_output_equals_that_of_generate_in_few_steps(library, sample, shipped):
    said, stats = assert_same_output(*shipped, LIBRARIES[library], do_sample=sample)
    assert said.strip().startswith("{")
    assert stats.mat > (1.5 if sample else 2)


def test_batch_with_two_grammars(shipped):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    model, tokenizer = shipped
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(known)
    grammars = [compiler.compile_json_schema(SCHEMA, any_whitespace=False), compiler.compile_regex(LINES)]
    ids = tokenizer(PROMPT + " " * 9, return_tensors="pt")["input_ids"][:, :7].repeat(2, 1)
    how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": model.generation_config.eos_token_id or 0}
    how["attention_mask"] = torch.ones_like(ids)
    plain = model.generate(ids, **how, logits_processor=[LogitsProcessor(grammars)])
    stats = tr.Stats()
    assert torch.equal(tr.generate(model, ids, **how, stats=stats, logits_processor=[LogitsProcessor(grammars)]), plain)
    assert stats.mat > 1.5


def test_forms_of_constrain(shipped):
    model, tokenizer = shipped
    said, stats = assert_same_output(*shipped, lambda *_: tr.constrain(tokenizer, regex=LINES))
    assert re.match(r"self\.[a-z]{2,6} = [0-9]+\n", said)
    assert stats.mat > 1.5
    said, _ = assert_same_output(*shipped, lambda *_: tr.constrain(tokenizer, grammar='root ::= "yes" | "no, never"'))
    assert said in ("yes", "no, never")
    with pytest.raises(ValueError, match="got none"):
        tr.constrain(tokenizer)
    with pytest.raises(ValueError, match="regex"):
        tr.constrain(tokenizer, regex="(")
    inputs = tokenizer([PROMPT] * 2, return_tensors="pt")
    with pytest.raises(ValueError, match="constrain"):
        model.generate(**inputs, max_new_tokens=4, logits_processor=[tr.constrain(model, regex=LINES)])


def test_forced_bytes_may_be_part_of_a_character(shipped):
    model, tokenizer = shipped
    text = assert_same_output(model, tokenizer, lambda *_: tr.constrain(tokenizer, regex="(☃|☄|☺){4}"))[0]
    assert re.fullmatch("[☃☄☺]{4}", text)


def test_sampled_tokens_have_the_distribution_of_generate(shipped):
    model, tokenizer = shipped
    ids = tokenizer("x = ", return_tensors="pt")["input_ids"]
    form = r"(yes|no|maybe) [0-3]"
    how = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    counts = []
    for call in (model.generate, lambda *one, **given: tr.generate(model, *one, **given)):
        torch.manual_seed(len(counts))
        texts = [call(ids, **how, logits_processor=[tr.constrain(model, regex=form)]) for _ in range(300)]
        counts.append(Counter(tuple(text[0, ids.shape[1] :].tolist()) for text in texts))
    often = [text for text, number in (counts[0] + counts[1]).items() if number >= 10]
    assert len(often) >= 3
    assert chi2_contingency([[seen[text] for text in often] for seen in counts]).pvalue > 0.01
