"""Base of all drafters with a draft model: one model reads each sequence and drafts ahead of it by a set of rules.

Cost per step: a forward pass of the draft model per drafting step, over the expanded nodes. Accepted nodes stay in its
cache; an accepted node that was not read on its own path is read in the next step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from ...model.prefixes import Prefixes
from ...model.target import Target
from ...trees.draft import Context, Draft, Step
from .._base import DrafterTraits, SequenceDrafter, check_at_least, check_auto_or_nodes
from .graph import Graph, Rules, Stop, grow
from .neural import NeuralDrafter
from .reader import Reader

Mode = Literal["sequence", "tree", "graph"]
_SAMPLED_NODES = 16
"""Nodes of a sampled draft: the same number on every machine, so that a seed gives the same output."""


@dataclass(kw_only=True)
class ModelDrafter(NeuralDrafter[Target]):
    """Drafts with the model of `place`, by the rules of `rules_for`."""

    reads_states: ClassVar[bool] = False
    """Whether `stop` needs the draft model's hidden states."""

    sampled: bool = False
    """Sample the draft when the output is sampled, instead of taking the most probable tokens."""

    def reader(self, target: Target, model: Target) -> Reader:
        """Create the reader of a sequence for the draft model."""
        return Reader(model, self.reads_states)

    def rules_for(self, target: Target, model: Target, prompt: torch.Tensor) -> Rules:
        """Choose the rules for a new sequence."""
        raise NotImplementedError(f"{type(self).__name__} must define rules_for()")

    def step_cost(self, target: Target, model: Target) -> float:
        """Return the cost of a forward pass of the draft model relative to the target's, until measured: by weights
        read.
        """
        return model.bytes_read / target.bytes_read

    def stop(self, sequence: ModelSequence) -> Stop | None:
        """Create the criterion that may end the next draft early."""
        return None

    def depth_for(self, context: Context, rules: Rules) -> int:
        """Return the maximum number of drafting steps for a sequence."""
        return rules.depth

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(on_host=True, samples=self.sampled, prefixes=True)

    def start(self, prompt: torch.Tensor, target: Target) -> ModelSequence:
        return ModelSequence(self, prompt, target)

    def describe(self) -> str:
        return f"{self.name}: {self.model_description()}"

    def model_description(self) -> str:
        """Return a description of the draft model."""
        return "a draft model"

    def draft_description(self, rules: Rules) -> str:
        """Return a description of the drafts."""
        raise NotImplementedError(f"{type(self).__name__} must define draft_description()")


class ModelSequence(SequenceDrafter):
    """One sequence read by the draft model, and the draft ahead of it."""

    drafter: ModelDrafter

    def __init__(self, drafter: ModelDrafter, prompt: torch.Tensor, target: Target) -> None:
        super().__init__(drafter)
        model = drafter.placed(target)
        self._target, self.pass_cost = target, drafter.step_cost(target, model)
        self._rules = drafter.rules_for(target, model, prompt)
        self.reader = drafter.reader(target, model)
        self.counts: Counter[str] = Counter()
        """Counts for the next `statistics`."""
        self._graph: Graph | None = None
        self._drafted, self._refused = False, False
        """Whether the draft model has ever been run, and whether its first pass of a step did not pay."""

    def use_prefixes(self, prefixes: Prefixes) -> None:
        self.reader.prefixes = prefixes.of(self.reader.model)

    def draft(self, context: Context) -> Draft:
        reader, rules, drafter, budget = self.reader, self._rules, self.drafter, context.budget
        sequence, warp = context.tokens, context.warp if drafter.sampled else None
        depth = min(drafter.depth_for(context, rules), context.remaining - 1, reader.reach(sequence))
        rules = replace(rules, depth=depth, nodes=min(rules.nodes, budget.nodes))
        # Whether the loop can use a sampled draft must depend on the number of nodes, not on the sampled tokens.
        if depth < 1 or (warp and not self._target.info.fits(len(sequence) - 1, rules.nodes + 1)):
            return Draft.chain(context.root)
        graph = grow(
            reader, sequence, rules, budget, self._target.vocab_size, warp, drafter.stop(self), context.generator
        )
        if not graph.steps:
            self._refused = True
            return Draft.chain(context.root)
        self._graph, self._drafted, draft = graph, True, graph.unrolled(rules.nodes)
        self.counts.update(
            draft_forwards=graph.steps,
            drafted_by_model=len(graph) - 1,
            merged_nodes=len(graph.merged),
            verified_copies=len(graph.copied),
        )
        return draft

    def observe(self, step: Step) -> None:
        """Keep the accepted nodes that were read in the draft model's cache."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        # The last token is the next root, which is read again with the next step.
        path = graph.follow(step.tokens[:-1])
        self.counts["steps_with_merge_accepted"] += any(crossed for _, crossed in path)
        cached = []
        for node, _ in path:
            if node not in graph.read:  # a leaf or a merged node: its continuation was not read on this path
                break
            cached.append(graph.read[node])
        self.reader.keep(cached)

    def statistics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def describe(self) -> str:
        drafter = self.drafter
        if self._refused and not self._drafted:
            return f"{drafter.describe()}, nothing drafted, since a drafting step costs as much as it may save"
        how = "sampled drafts for sampled outputs" if drafter.sampled else "deterministic drafts"
        return f"{drafter.describe()}, {drafter.draft_description(self._rules)}, {how}"


@dataclass(kw_only=True)
class CausalDrafter(ModelDrafter):
    """Drafts a sequence, a tree or a graph by the draft model's probabilities."""

    mode: Mode = "tree"
    """sequence: one branch of fixed length; tree: up to k children per node, if they are probable enough; graph: a tree
    whose recurring parts are drafted once.
    """
    depth: int = 10
    """Maximum number of drafting steps; the length of a sequence."""
    k: int = 4
    """Maximum number of children of a node, in a tree or graph."""
    theta_prob: float = 0.4
    """Prune a node whose probability is below this, in a tree or graph."""
    theta_sib: float = 0.1
    """Prune a node whose probability is below this fraction of its best sibling's."""
    tau: int = 1
    """Graph mode: merge two paths that end in the same `tau` tokens."""
    nodes: int | Literal["auto"] = "auto"
    """Maximum number of nodes verified, the most probable ones; auto: stop when another node costs more than it saves
    (not for sequences or sampled drafts).
    """

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        check_at_least(1, self, "depth", "k", "tau")
        for name in ("theta_prob", "theta_sib"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        check_auto_or_nodes(self, "nodes")

    @property
    def traits(self) -> DrafterTraits:
        nodes: int | Literal["auto"] | None = self.nodes
        if self.mode == "sequence":
            nodes = None
        elif self.sampled and nodes == "auto":  # measured times must not decide how many numbers are sampled
            nodes = _SAMPLED_NODES
        return replace(super().traits, nodes=nodes)

    def rules_for(self, target: Target, model: Target, prompt: torch.Tensor) -> Rules:
        if self.mode == "sequence":
            return Rules(self.depth if self.nodes == "auto" else min(self.depth, int(self.nodes)), 1, self.depth)
        tau = self.tau if self.mode == "graph" else 0
        return Rules(self.depth, self.k, sys.maxsize, self.theta_prob, self.theta_sib, tau)

    def draft_description(self, rules: Rules) -> str:
        steps = f"{self.mode} of {rules.depth} steps"
        if self.mode == "sequence":
            return steps
        size = self.traits.nodes
        nodes = "as many nodes as pay" if size == "auto" else f"{size} nodes at most"
        pruned = f"k = {rules.k}, theta_prob = {rules.theta_prob}, theta_sib = {rules.theta_sib}"
        return f"{steps} and {nodes}, {pruned}" + (f", tau = {rules.tau}" if rules.tau else "")
