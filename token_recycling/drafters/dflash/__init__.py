"""DFlash: an assistant that denoises a block of tokens in one pass (`DFlashTokenCandidateGenerator` of transformers).

The assistant reads hidden states of some of the target's layers. From a block of the newest token and masks it predicts
all positions at once, independently of each other. In addition to transformers' chain of best tokens there is a tree,
grown best first: the candidates of a position are children of every candidate of the preceding one. Drafts are
deterministic, so sampled outputs are exact.

Cost per step: one pass of the assistant over a block, and the target's output layer on it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..._util.topk import top_candidates
from ...model.compat import DFlashTokenCandidateGenerator, needed
from ...model.hidden import output_layer, shallow_copy
from ...model.target import Target
from ...trees.draft import Context, Draft
from ...trees.templates import template_from
from .._base import DrafterTraits, check_at_least
from .._shared.neural import placed_copy
from .._shared.pairing import config_of, loaded
from .._shared.states import PendingStates, StatesDrafter, StatesSequence, appending, best_product, product_draft
from .formats import AutoAssistant, AutoAssistantConfig

_EXPECTED = "a DFlash assistant"
_NEEDED = ("block_size", "mask_token_id", "target_layer_ids", "hidden_size")


@dataclass
class DFlash(StatesDrafter[PreTrainedModel]):
    """Drafts a block at once with a DFlash assistant trained for the target."""

    model: str | PreTrainedModel
    """The assistant: a local folder or a hub name; in Python also a model."""
    tree: str | int = "auto"
    """auto: at each step as many nodes as pay, by the assistant's probabilities; a number of nodes; or chain:N, rank
    paths, or a file of them.
    """
    k: int = 8
    """Candidates per position."""

    def __post_init__(self) -> None:
        needed(DFlashTokenCandidateGenerator, "the drafter dflash")
        check_at_least(1, self, "k")
        self.config = _config_of(self.model)
        """The assistant's configuration."""
        self.template = template_from(self.tree)
        positions = self.config.block_size - 1
        self.check_template(positions, f"{positions} layers, one a place of a block,")

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(states=self.states_of, nodes=self.nodes)

    def states_of(self, layers: int) -> list[int]:
        """Return the indices of the states after the layers named in the assistant's configuration."""
        return [number + 1 for number in self.config.target_layer_ids]

    def start(self, prompt: torch.Tensor, target: Target) -> DFlashSequence:
        return DFlashSequence(self, prompt, target)

    def place(self, target: Target) -> PreTrainedModel:
        self.check(target)
        if isinstance(self.model, str):
            return loaded(self.model, target, AutoAssistant, _EXPECTED)
        if (self.model.device, self.model.dtype) == (target.device, target.dtype):
            return self.model.eval()
        return placed_copy(self.model, target.device, target.dtype)

    def check(self, target: Target) -> None:
        """Raise ValueError unless the assistant fits the target."""
        config, ours, embedded = self.config, target.config, target.model.get_input_embeddings().weight
        fits = {
            f"of width {config.hidden_size}": config.hidden_size == ours.hidden_size == embedded.shape[1],
            f"with a layer {max(config.target_layer_ids)}": max(config.target_layer_ids) < ours.num_hidden_layers,
            f"with a token {config.mask_token_id}, the mask": config.mask_token_id < len(embedded),
        }
        for what, true in fits.items():
            if not true:
                raise ValueError(
                    f"{self._name} needs a target {what}, got {type(target.model).__name__} of width "
                    f"{ours.hidden_size}, {ours.num_hidden_layers} layers and {len(embedded)} tokens; use the "
                    "assistant trained for this target"
                )

    @property
    def _name(self) -> str:
        return self.model if isinstance(self.model, str) else type(self.model).__name__

    def describe(self) -> str:
        return f"dflash: {self._name}, blocks of {self.config.block_size}, tree {self.tree_description()}"


def _config_of(model: str | PreTrainedModel) -> Any:
    config = config_of(model, _EXPECTED, AutoAssistantConfig)
    missing = [name for name in _NEEDED if getattr(config, name, None) is None]
    if missing and hasattr(config, "dflash_config"):
        raise ValueError(f"{type(model).__name__} is a model of the authors' code; give its folder or hub name instead")
    if missing:
        raise ValueError(
            f"model type {config.model_type!r} is not {_EXPECTED}: its configuration lacks "
            f"{', '.join(missing)}; for a model that drafts token by token use draft_model"
        )
    return config


def _without_norm(embedding: torch.nn.Module) -> torch.nn.Module:
    """Return a target's embedding without its norm: transformers would remove the norm from the target itself, for all
    threads.
    """
    if not hasattr(embedding, "embed_norm"):
        return embedding
    other = shallow_copy(embedding)
    other.embed_norm = torch.nn.Identity()
    return other


class DFlashSequence(StatesSequence):
    """Predictions of the assistant for one sequence."""

    drafter: DFlash

    def __init__(self, drafter: DFlash, prompt: torch.Tensor, target: Target) -> None:
        super().__init__(drafter, PendingStates(len(prompt)))
        self._generator = DFlashTokenCandidateGenerator(
            drafter.placed(target),
            _without_norm(target.model.get_input_embeddings()),
            output_layer(target.model),
            GenerationConfig(max_length=sys.maxsize),
        )
        self._generator.cache = appending(self._generator.cache)

    def draft(self, context: Context) -> Draft:
        drafter, positions = self.drafter, min(context.remaining, self.drafter.config.block_size) - 1
        if not self._pending.waits or positions < 1 or not context.budget.pays([1.0]):
            return Draft.chain(context.root)
        logits = self._read(context.tokens)[:positions]
        candidates, probabilities = top_candidates(logits, min(drafter.k, logits.shape[-1]))
        self._counts["draft_forwards"] += 1
        if drafter.template is None:
            tree = best_product(probabilities.tolist(), context.budget.nodes)
        else:
            tree = drafter.template.cut(positions)
        return product_draft(tree, context.root, candidates, probabilities)

    def _read(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return logits (positions, vocabulary) of a block after `sequence` (length,); new tokens are read in the same
        pass.
        """
        states, begin = self._pending.taken(), self._pending.begin
        numbers = self.drafter.states_of(0)
        by_layer = dict(zip(numbers, states[None].chunk(len(numbers), dim=-1), strict=True))
        tokens = sequence[None, begin:]
        positions = torch.arange(begin, len(sequence), device=sequence.device)[None]
        _, logits = self._generator.get_candidates(
            tokens,
            {"position_ids": positions, "attention_mask": None},
            SimpleNamespace(hidden_states=by_layer),
            is_first_iteration=False,
            n_last_matches=len(states) - 1,
        )
        return logits[0]
