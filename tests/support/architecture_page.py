"""Results of the architecture cases, and docs/architectures.md generated from them.

`measured` runs one case; tests assert on its result, and `nox -s tables` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from support import tiny
from support.architectures import SUPPORTED, VOCABULARY, Case, forget, model_of
from support.further_architectures import ENCODERS, FURTHER, FURTHER_REFUSED, NOT_DECODER_ONLY, UNMEASURED
from support.oracle import TREES, Oracle
from support.recurrent_architectures import RECURRENT, RECURRENT_REFUSED
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import token_recycling as tr
from token_recycling.model.self_test import largest_difference, random_tokens
from token_recycling.model.target import Target
from token_recycling.trees.templates import chain

ALL = [*SUPPORTED, *RECURRENT, *FURTHER]
LENGTHS = (6, 26)
"""Lengths of the text before a tree: within all windows, and beyond them."""
PROMPTS = (5, 29)
NEW = 24
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}
TOLERANCE, WITH_STATES = 1e-4, 3e-4
"""Maximum difference between logits (of magnitude 1) of a tree and of linear decoding in float32. Recurrent states
accumulate the rounding errors of all earlier tokens; in float64 the difference is at most 1e-13.
"""


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    support: tr.ModelInfo
    difference: float
    """Largest difference between logits of trees and of linear decoding."""
    identical: int
    """Number of outputs identical to those of plain `generate`."""
    texts: int
    mat: float

    @property
    def same_trees(self) -> bool:
        return self.difference < (WITH_STATES if self.support.recurrent else TOLERANCE)

    @property
    def exact(self) -> bool:
        return self.same_trees and self.identical == self.texts


def attentions(case: Case) -> tuple[str, ...]:
    """Return the implementations that a case is measured with; for further families only transformers' default."""
    found = ("sdpa", "eager")[not case.sdpa :]
    return found if case in SUPPORTED else found[:1]


def measured(case: Case, attention: str) -> Result:
    """Compare trees with linear decoding and accelerated with plain `generate`, greedy and sampled with a seed."""
    if (str(case), attention) not in _MEASURED:
        model = model_of(case, attention)
        matches, stats = generated(model, _prompts(case, attention))
        difference = tree_difference(model, LENGTHS[1:] if _brief(case, attention) else LENGTHS)
        _MEASURED[str(case), attention] = Result(tr.check(model), difference, sum(matches), len(matches), stats.mat)
    return _MEASURED[str(case), attention]


_MEASURED: dict[tuple[str, str], Result] = {}


def claimed(case: Case, attention: str) -> Result:
    """Return the result of `measured` for an exact case, in a tenth of the time."""
    texts = 2 * len(_prompts(case, attention))
    return Result(tr.check(model_of(case, attention)), 0.0, texts, texts, 1.0)


def _brief(case: Case, attention: str) -> bool:
    """Return whether one length suffices: for further families, and for eager attention of families that have sdpa."""
    return case not in SUPPORTED or (case.sdpa and attention == "eager")


def _prompts(case: Case, attention: str) -> tuple[int, ...]:
    return PROMPTS[1:] if _brief(case, attention) else PROMPTS


def tree_difference(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Return the largest difference of logits over several trees and lengths at which the library would draft."""
    target, worst = Target(model), 0.0
    for shape in TREES.values():
        tree = shape if target.info.branches else chain(shape.depth)
        for length in lengths:
            if target.info.fits(length, len(tree)):
                text = random_tokens(target, length + 1, seed=length)
                worst = max(worst, largest_difference(target, text, tree.parents)[0])
    return worst


def generated(model: PreTrainedModel, prompts: tuple[int, ...] = PROMPTS) -> tuple[list[bool], tr.Stats]:
    """Return whether each output equals that of plain `generate`, and the overall statistics."""
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

Generated by `nox -s tables`; a test fails if this page is stale. Each family is tested with a tiny random model in
float32. All families below are exact: logits of three draft trees equal those of linear decoding within
{TOLERANCE:.0e}, and all outputs, greedy and sampled with a seed, are identical to `generate`'s. To check one model, run
`token-recycling check MODEL`. Attention is `sdpa`, and `eager` where a family has no other; the first table has both.
Families that are not listed must pass a self-test before acceleration. Multimodal models are tested on text.

"""
_TABLE = """
| families | configuration | draft trees need |
|---|---|---|
"""
_RECURRENT = f"""
### Recurrent and hybrid models

Recurrent layers process the nodes of a draft one at a time, each from a copy of its parent's state, with a tolerance of
{WITH_STATES:.0e}. Memory grows by one copy of the sequence's states per node. These models cannot be draft models.
Calls with a static, quantized or offloaded cache fall back to transformers.
"""
_FURTHER = """
### Further families
"""
_NOTES = """
During an accelerated call, layers with a sliding window drop slots in blocks; with a prefix cache they keep all, since
a later prompt may branch off at any token and then needs the window before it.

## Length limits

At these lengths decoding proceeds token by token. Batches and padded prompts fall back to transformers for these
models, for mpt, and for models marked "paths only":

"""
_REFUSED = """
## Refused

| families | reason |
|---|---|
"""


def page(of: Callable[[Case, str], Result] = measured) -> str:
    """Return docs/architectures.md from the results of all cases with all attention implementations."""
    results = {str(case): [of(case, name) for name in attentions(case)] for case in ALL}
    thresholds: dict[str, list[str]] = {}
    for case in ALL:
        found = results[str(case)][0].support
        if found.length_threshold is not None:
            thresholds.setdefault(found.notes[0], []).append(case.family)
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
            *(f"- {', '.join(families)}: {note}\n" for note, families in thresholds.items()),
            _REFUSED,
            *(f"| {', '.join(families)} | {reason} |\n" for reason, families in refused.items()),
            "\nWithout a model here:\n\n",
            *_list(UNMEASURED),
        ]
    )


def _table(cases: list[Case], results: dict[str, list[Result]]) -> str:
    """Return a table with one row for all families with the same outcome."""
    families: dict[str, list[str]] = {}
    for case in cases:
        found = results[str(case)]
        tested = case.tested if all(result.exact for result in found) else f"**not exact** {case.tested}"
        outcome = f"{tested} | {found[0].support.how}"
        families.setdefault(outcome, []).append(case.family)
    return _TABLE + "".join(f"| {', '.join(names)} | {outcome} |\n" for outcome, names in families.items())


def _count(exact: set[str]) -> str:
    """Return a sentence on how many of the families that transformers lists are exact."""
    others = {family for families in NOT_DECODER_ONLY.values() for family in families.split()} | {*ENCODERS.split()}
    decoders = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - others
    version = ".".join(transformers.__version__.split(".")[:2])
    return (
        f"Of the {len(decoders)} causal language models in `AutoModelForCausalLM` of transformers {version}, "
        f"**{len(exact & decoders)} are exact**\nand {len(decoders - exact)} are unsupported (listed below). "
        f"{len(ENCODERS.split())} encoders used with `is_decoder=True` are exact too, but not counted.\n"
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
