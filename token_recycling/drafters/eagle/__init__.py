"""EAGLE: a small head continues from the target's hidden states (Li et al., 2401.15077, 2406.16858 and 2503.01840).

The head reads every token with the target's hidden state before it, and drafts by reading its own tokens and states. It
comes from the authors of EAGLE-1, -2 and -3, from SpecForge or from speculators (`formats`), or from `token-recycling
train eagle`. The tree is EAGLE-1's fixed tree, or EAGLE-2's: the most probable nodes of a layer are expanded, and the
most probable of all nodes are verified. Without a given size, drafting and verification stop where they do not pay on
this machine. Drafts are deterministic, so sampled outputs are exact.

Cost per step: a pass of the head over the tokens accepted last, and one over each expanded layer of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...model.attention import stand_in
from ...model.compat import attention_name
from ...model.hidden import output_layer, output_width
from ...model.target import Target
from ...trees.draft import Budget, Context, Draft
from ...trees.templates import Template, parse_paths, template_from
from .._base import DrafterTraits, check_at_least
from .._shared.graph import Rules, grow
from .._shared.neural import placed_copy
from .._shared.saved import TrainedPartError, check_model
from .._shared.states import StatesDrafter, StatesSequence
from .formats import load_head
from .reader import HeadReader, PlacedHead

_STATIC = "static"
_EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
"""The tree of EAGLE-1: 25 nodes in 5 layers (mc_sim_7b_63 of its program)."""


@dataclass
class Eagle(StatesDrafter[PlacedHead]):
    """Drafts with an EAGLE head: a tree grown by the head's probabilities, or a fixed one."""

    head: str | Path
    """Folder of a head for this target: from `token-recycling train eagle`, or a head of EAGLE-1, -2 or -3."""
    tree: str | int = "auto"
    """auto: as many nodes as pay at each step, the head's passes included; a number of nodes, 59 in EAGLE-2's program;
    static: EAGLE-1's 25 nodes; or rank paths, chain:N, or a file of paths.
    """
    k: int = 10
    """Maximum number of candidates per node, and of nodes expanded per layer."""
    depth: int = 8
    """Maximum number of layers."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "k", "depth")
        self.template = parse_paths(_EAGLE_1) if self.tree == _STATIC else template_from(self.tree)
        self.check_template(self.depth, f"depth={self.depth} layers")
        self._saved = load_head(self.head)

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(states=self._saved.head.shape.states_of, on_host=True, nodes=self.nodes)

    def start(self, prompt: torch.Tensor, target: Target) -> EagleSequence:
        return EagleSequence(self, HeadReader(self.placed(target), len(prompt)), target)

    def check(self, target: Target) -> None:
        """Raise TrainedPartError unless the head fits the target."""
        saved, model = self._saved, target.model
        shape = saved.head.shape
        if saved.facts:
            check_model(self.head, saved.facts, model)
        for name, theirs, ours in (
            ("hidden size", shape.target_hidden, output_width(model)),
            ("vocabulary", shape.layer.vocab_size, target.vocab_size),
        ):
            if theirs != ours:
                raise TrainedPartError(
                    f"{self.head}: {name} of the head must be {ours}, as in the model, got {theirs}; "
                    "use the head trained for this model, or train one"
                )
        layers = target.config.num_hidden_layers
        if layers in (shape.states or ()):  # in transformers, hidden state number `layers` is normalized
            raise TrainedPartError(
                f"{self.head}: reads the output of the last layer, number {layers - 1}, before the final norm, which "
                "is unsupported; use another head, or train one"
            )
        ours = model.get_input_embeddings().weight.shape[1]
        if saved.embedding is None and ours != shape.width:
            raise TrainedPartError(
                f"{self.head}: embed_tokens is missing: the head's states of width {shape.width} do not fit the "
                f"model's embeddings of width {ours}"
            )

    def place(self, target: Target) -> PlacedHead:
        self.check(target)
        own, embedding = self._saved.embedding, target.model.get_input_embeddings()
        theirs = embedding.weight
        if own is not None and (
            own.shape != theirs.shape or not torch.equal(own.to(target.dtype), theirs.to(own.device))
        ):
            embedding = torch.nn.Embedding.from_pretrained(own.to(target.device, target.dtype))
        head, output = placed_copy(self._saved.head, target.device, target.dtype), output_layer(target.model)
        stand_in(head.shape.layer, attention_name(head.shape.layer), grouped=True)
        return PlacedHead(head, embedding, output, target.vocab_size, target.device, target.dtype)

    def describe(self) -> str:
        return f"eagle: head of {self.head} (EAGLE-{self._saved.head.shape.version}), tree {self.tree_description()}"


class EagleSequence(StatesSequence):
    """The head's predictions for one sequence."""

    drafter: Eagle

    def __init__(self, drafter: Eagle, reader: HeadReader, target: Target) -> None:
        super().__init__(drafter, reader)
        self._reader, self._target = reader, target

    def draft(self, context: Context) -> Draft:
        depth = min(self.drafter.depth, context.remaining - 1)
        if depth < 1 or not self._reader.knows:
            return Draft.chain(context.root)
        if self.drafter.template is not None:
            return self._filled(context.tokens, self.drafter.template.cut(context.remaining - 1))
        return self._grown(context.tokens, depth, context.budget)

    def _grown(self, sequence: torch.Tensor, depth: int, budget: Budget) -> Draft:
        k = min(self.drafter.k, self._target.vocab_size)
        rules = Rules(depth, k, budget.nodes, frontier=k)
        graph = grow(self._reader, sequence, rules, budget, self._target.vocab_size)
        self._counts["draft_forwards"] += graph.steps
        return graph.unrolled(budget.nodes)

    def _filled(self, sequence: torch.Tensor, template: Template) -> Draft:
        children, above = template.children, template.parents.tolist()
        ranks = template.ranks.tolist()
        logits = self._reader.read(sequence)
        tokens, shares = [int(sequence[-1])] * len(template), np.ones(len(template), np.float32)
        number = {0: 0}
        followed = [0]
        while followed:
            probabilities, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(template.breadth)
            for node, chances, candidates in zip(followed, probabilities.tolist(), ids.tolist(), strict=True):
                for child in children[node]:
                    tokens[child], shares[child] = candidates[ranks[child]], chances[ranks[child]]
            self._counts["draft_forwards"] += 1
            followed = [child for node in followed for child in children[node] if children[child]]
            if followed:
                parents = [number[above[node]] for node in followed]
                number |= {node: len(number) + place for place, node in enumerate(followed)}
                logits = self._reader.read_layer(parents, [tokens[node] for node in followed])
        return Draft(tokens, template.parents, shares)
