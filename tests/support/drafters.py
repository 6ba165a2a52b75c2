"""Drafters for tests: a small example of every installed drafter (a new one with required options needs an entry in
`EXAMPLES`), one that drafts at random, and one trained on the counting llama.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support import assistants
from support.cases import thinned
from transformers import PreTrainedModel

import token_recycling as tr
from token_recycling import Context, Draft, Drafter, Step, Template
from token_recycling.drafters._registry import drafter_class
from token_recycling.drafters.assistant import Assistant
from token_recycling.drafters.dflash import DFlash
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.drafters.eagle import Eagle
from token_recycling.drafters.eagle.formats import save_head
from token_recycling.drafters.fuse import Fuse
from token_recycling.drafters.layer_skip import LayerSkip
from token_recycling.drafters.medusa import Medusa, MedusaHeads, save_heads
from token_recycling.drafters.mtp import Mtp
from token_recycling.drafters.rest import Rest, build
from token_recycling.drafters.specdec_pp import AcceptanceHead, SpecDecPP
from token_recycling.model.hidden import decoder_layers, output_width
from token_recycling.model.target import Target
from token_recycling.training.continuations import Continuations
from token_recycling.training.declaration import EagleTraining
from token_recycling.training.eagle import new_head
from token_recycling.trees.templates import chain

EVERY_RUN = ("recycling", "published", "draft_model", "medusa", "fuse")
NAMES = thinned(tr.drafter_names(), kept=EVERY_RUN.__contains__)
"""All drafters as test parameters; those not in `EVERY_RUN` exercise the same code and run nightly."""


def example(name: str, model: PreTrainedModel, folder: Path) -> Drafter:
    """Return a drafter of that name for `model`; its files are written to the empty `folder`."""
    made = drafter_class(name)
    return EXAMPLES[name](model, folder) if name in EXAMPLES else made()


def _eagle(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return an EAGLE drafter with an untrained head of version 1."""
    save_head(folder, new_head(model, Continuations([], []), EagleTraining(version=1)), model)
    return Eagle(folder, tree=6, k=4)


def _layer_skip(model: PreTrainedModel, folder: Path) -> Drafter:
    return LayerSkip(layers=[len(decoder_layers(model)[1]) - 1])


def _medusa(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return a Medusa drafter with two untrained heads."""
    save_heads(folder, MedusaHeads(2, output_width(model)), model, [[0.5, 0.2], [0.3, 0.1]])
    return Medusa(folder, tree=6, k=4)


def _mtp(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return an MTP drafter with two untrained layers."""
    if not hasattr(model.get_decoder(), "layers"):
        pytest.skip("transformers makes no MTP layers for families whose decoder has no `layers`")
    return Mtp(assistants.mtp(model), tree=5, k=3, depth=3)


def _rest(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return a REST drafter with a datastore of the model's own outputs for random prompts."""
    draws = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (8, 4), generator=draws).to(model.device)
    new = min(32, model.config.max_position_embeddings - 4)
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False)
    build(texts.tolist(), folder / "datastore")
    return Rest(folder / "datastore")


def _specdec_pp(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return a drafter in which a model drafts for itself, with a head that predicts about two acceptances in three."""
    head = AcceptanceHead(output_width(model), depth=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.output.weight.copy_(torch.randn(1, head.width, generator=generator))
        head.output.bias.fill_(1.0)
    return SpecDecPP(model, head)


def _assistant(model: PreTrainedModel, folder: Path) -> Drafter:
    """Return a drafter in which a model drafts for itself, with words as tokens."""
    words = assistants.word_tokenizer(model.get_input_embeddings().weight.shape[0])
    return Assistant(model, nodes=12, tokenizer=words, assistant_tokenizer=words)


EXAMPLES: dict[str, Callable[[PreTrainedModel, Path], Drafter]] = {
    "draft_model": lambda model, folder: DraftModel(model),  # a model drafts for itself
    "assistant": _assistant,
    "dflash": lambda model, folder: DFlash(assistants.dflash(model), tree=6, k=4),
    "eagle": _eagle,
    "fuse": lambda model, folder: Fuse("recycling(tree=16)+suffix", nodes=16),
    "layer_skip": _layer_skip,
    "medusa": _medusa,
    "mtp": _mtp,
    "rest": _rest,
    "specdec_pp": _specdec_pp,
}


@dataclass
class Garbage(Drafter):
    """Draft random tokens on the given trees, in turn."""

    shapes: list[Template] = field(default_factory=lambda: [chain(2)])
    seed: int = 0
    vocab_size: int = 64
    scale: float = 1.0
    loud: bool = False
    note: str | None = None

    def start(self, prompt: torch.Tensor, target: object) -> Garbage:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.steps: list[Step] = []
        return self

    def draft(self, context: Context) -> Draft:
        tree = self.shapes[len(self.steps) % len(self.shapes)]
        tokens = torch.randint(0, self.vocab_size, (len(tree),), generator=self._generator)
        tokens[0] = context.tokens[-1]
        return Draft(tokens, tree.parents)

    def observe(self, step: Step) -> None:
        self.steps.append(step)


def learned(model: PreTrainedModel, tree: str, k: int = 8) -> tr.Drafter:
    """Return a drafter that has learned the counting llama's choice after every token."""
    drafter = tr.make_drafter("published", tree=tree, k=k)
    matrix = drafter.prepare(Target(model))
    matrix.candidates.copy_((torch.arange(16)[:, None] + 1 + torch.arange(k)) % 16)
    return drafter
