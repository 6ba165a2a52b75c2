"""What the architectures' cases show, and docs/architectures.md made of it.

`measured` runs one case; the tests assert on it, and `make architectures` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from support import tiny
from support.architectures import SUPPORTED, VOCABULARY, Case, forget, model_of
from support.further_architectures import FURTHER, FURTHER_REFUSED, NOT_DECODER_ONLY, UNMEASURED
from support.oracle import TREES, Oracle
from support.recurrent_architectures import RECURRENT, RECURRENT_REFUSED
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import token_recycling as tr
from token_recycling.model.self_test import largest_difference, random_text
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.templates import chain

ALL = [*SUPPORTED, *RECURRENT, *FURTHER]
LENGTHS = (6, 26)
"""Texts before a tree: within all windows, and beyond them."""
PROMPTS = (5, 29, 40)
NEW = 24
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}
TOLERANCE, WITH_STATES = 1e-4, 3e-4
"""Between logits of a tree and of linear decoding, in float32; those of these models are of the size of 1. A state adds
up the rounding of all tokens before: in float64 there is no more than 1e-13.
"""


@dataclass(frozen=True)
class Result:
    """What a case showed."""

    support: tr.ModelInfo
    difference: float
    """The largest between logits of trees and of linear decoding."""
    identical: int
    """Texts that came out as from plain `generate`."""
    texts: int
    mat: float

    @property
    def same_trees(self) -> bool:
        return self.difference < (WITH_STATES if self.support.recurrent else TOLERANCE)

    @property
    def exact(self) -> bool:
        return self.same_trees and self.identical == self.texts


def attentions(case: Case) -> tuple[str, ...]:
    """Those that a case is measured with; of some only what transformers would choose."""
    found = ("sdpa", "eager")[not case.sdpa :]
    return found if case in SUPPORTED else found[:1]


def measured(case: Case, attention: str) -> Result:
    """Trees against linear decoding, and accelerated against plain `generate`, greedy and sampled with a seed."""
    if (str(case), attention) not in _MEASURED:
        model = model_of(case, attention)
        matches, stats = generated(model, _prompts(case, attention))
        difference = tree_difference(model, LENGTHS[1:] if _brief(case, attention) else LENGTHS)
        _MEASURED[str(case), attention] = Result(tr.check(model), difference, sum(matches), len(matches), stats.mat)
    return _MEASURED[str(case), attention]


_MEASURED: dict[tuple[str, str], Result] = {}


def claimed(case: Case, attention: str) -> Result:
    """What `measured` gives of a case that is exact, in a tenth of its time."""
    texts = 2 * len(_prompts(case, attention))
    return Result(tr.check(model_of(case, attention)), 0.0, texts, texts, 1.0)


def _brief(case: Case, attention: str) -> bool:
    """Eager attention differs from sdpa in few lines: where there are both, one length of text is enough for it."""
    return case not in SUPPORTED or (case.sdpa and attention == "eager")


def _prompts(case: Case, attention: str) -> tuple[int, ...]:
    return PROMPTS[1:2] if _brief(case, attention) else PROMPTS


def tree_difference(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS) -> float:
    """The largest difference of logits over several trees and lengths of text, where the library would draft."""
    target, worst = TreeModel(model), 0.0
    for shape in TREES.values():
        tree = shape if target.info.branches else chain(shape.depth)
        for length in lengths:
            if target.info.fits(length, len(tree)):
                text = random_text(target, length + 1, seed=length)
                worst = max(worst, largest_difference(target, text, tree)[0])
    return worst


def generated(model: PreTrainedModel, prompts: tuple[int, ...] = PROMPTS) -> tuple[list[bool], tr.Stats]:
    """Whether each text equals plain `generate`'s, and the statistics of all."""
    stats, matches = tr.Stats(), []
    for length in prompts:
        ids = tiny.prompt(length, length, VOCABULARY)
        for sampling in ({"do_sample": False}, SAMPLED):
            arguments = {"max_new_tokens": NEW, **sampling}
            forget(model)
            plain, _ = tiny.seeded(model.generate, ids, **arguments)
            forget(model)
            ours, _ = tiny.seeded(tr.generate, model, ids, drafter=Oracle(plain), stats=stats, **arguments)
            matches.append(torch.equal(ours, plain))
    return matches, stats


_HEAD = f"""# Architectures

Written by `make architectures`; a test fails when it is stale. Every family is a tiny random model in
float32. **trees**: logits of three trees against linear decoding, `exact` within {TOLERANCE:.0e}. **texts**: whole
texts identical to plain `generate`, greedy and sampled with a seed, of each family.

`token-recycling check MODEL` says the same of one model. A model of another family is tried on a short text before it
is accelerated, and refused if its tree differs. Models for pictures or sound are measured as they read text alone.

"""
_TABLE = """
| families | configuration | what trees need | attention | trees | texts |
|---|---|---|---|---|---|
"""
_RECURRENT = f"""
### With states over the text

Linear attention, state space models and short convolutions, alone or beside attention. Such a layer reads the nodes of
a draft one by one, each from a copy of its parent's state; the copies take the memory of a text's states times the
nodes (`token-recycling check MODEL` says how much). **trees**: `exact` means within {WITH_STATES:.0e} here. Such a
model cannot draft for another one, and calls with a static, quantised or offloaded cache go to transformers. So do
those of jamba, zamba, mamba and falcon_mamba behind a cache of several turns, which they read wrongly by themselves.

Each model with the attention that transformers chooses, trees after {LENGTHS[1]} tokens and a prompt of {PROMPTS[1]}.
"""
_FURTHER = """
### Further families

Measured in the same way.
"""
_NOTES = """
Layers with a window or chunks are kept at full length while a call is accelerated: such a cache works in plain
`generate` too, and takes the memory of full attention.

## Where no tree is drafted

Near these lengths of text, decoding goes on token by token. Batches and padded prompts of these models, of mpt, and of
those of which only paths are drafted, are left to transformers:

"""
_REFUSED = """
## Refused

| families | reason |
|---|---|
"""


def page(of: Callable[[Case, str], Result] = measured) -> str:
    """docs/architectures.md, of what each case with each attention showed."""
    results = {str(case): [of(case, name) for name in attentions(case)] for case in ALL}
    borders: dict[str, list[str]] = {}
    for case in ALL:
        found = results[str(case)][0].support
        if found.border is not None:
            borders.setdefault(found.notes[0], []).append(case.family)
    refusals = [*RECURRENT_REFUSED, *FURTHER_REFUSED]
    refused: dict[str, list[str]] = {}
    for case in refusals:
        model = model_of(case)
        reason = str(tr.check(model, self_test=True).reason).replace(type(model).__name__, "this model")
        refused.setdefault(reason, []).append(str(case))
    refused[str(tr.check(_t5()).reason)] = ["encoder-decoders"]
    exact = {case.family for case in ALL if all(result.exact for result in results[str(case)])}
    return "".join(
        [
            _HEAD,
            _count(exact),
            "\n## Supported\n",
            _table(SUPPORTED, results),
            _RECURRENT,
            _table(RECURRENT, results),
            _FURTHER,
            _table(FURTHER, results),
            _NOTES,
            *(f"- {', '.join(families)}: {note}\n" for note, families in borders.items()),
            _REFUSED,
            *(f"| {', '.join(families)} | {reason} |\n" for reason, families in refused.items()),
            "\nWithout a model here:\n\n",
            *_list(UNMEASURED),
            "\nNot decoder-only, though `AutoModelForCausalLM` knows them:\n\n",
            *_list(NOT_DECODER_ONLY),
        ]
    )


def _table(cases: list[Case], results: dict[str, list[Result]]) -> str:
    """A line for all families of one outcome."""
    families: dict[str, list[str]] = {}
    for case in cases:
        found = results[str(case)]
        exact = "exact" if all(result.same_trees for result in found) else "DIFFERENT"
        texts = f"{sum(result.identical for result in found)} of {sum(result.texts for result in found)}"
        outcome = f"{case.tested} | {found[0].support.how} | {', '.join(attentions(case))} | {exact} | {texts}"
        families.setdefault(outcome, []).append(case.family)
    return _TABLE + "".join(f"| {', '.join(names)} | {outcome} |\n" for outcome, names in families.items())


def _count(exact: set[str]) -> str:
    """How many of the families that transformers itself lists are exact."""
    others = {family for families in NOT_DECODER_ONLY.values() for family in families.split()}
    decoders = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - others
    version = ".".join(transformers.__version__.split(".")[:2])
    return (
        f"Of the {len(decoders)} decoder-only families that `AutoModelForCausalLM` of transformers {version} knows, "
        f"**{len(exact & decoders)} are exact**\nand {len(decoders - exact)} are refused or could not be built; "
        f"{len(others)} more that it knows are not decoder-only.\n"
    )


def _list(named: dict[str, str]) -> list[str]:
    return [f"- {what}: {', '.join(families.split())}\n" for what, families in named.items()]


def _t5() -> PreTrainedModel:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    (Path(__file__).parents[2] / "docs" / "architectures.md").write_text(page(), encoding="utf-8")
