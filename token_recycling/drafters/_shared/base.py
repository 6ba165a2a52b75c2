"""Base of all drafters with a draft model: one model reads each sequence and drafts ahead of it by one set of rules.

Cost per step: a forward pass of the draft model per drafting step, over the nodes that are followed. Accepted nodes
stay in its cache; an accepted node that was not read on its own path is read with the next step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch

from ...costs.costs import Costs, Overhead
from ...model.tree_model import TreeModel
from ...trees.draft import Context, Draft, Step
from .._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least, check_auto_or_nodes
from .expand import Graph, Rules, Stop, grow, verified
from .reader import Reader

_PROBED = 16
"""While drafting is disabled, one of this many sequences measures the overhead again."""
Mode = Literal["sequence", "tree", "graph"]
_SAMPLED_NODES = 16
"""Nodes of a sampled draft: the same number on every machine, so that a seed gives the same output."""


@dataclass(kw_only=True)
class ModelDrafter(Drafter):
    """Drafts with the model of `drafting_model`, by the rules of `rules_for`."""

    reads_states: ClassVar[bool] = False
    """Whether `stop` needs the draft model's hidden states."""

    sampled: bool = False
    """Sample the draft where the output is sampled, instead of taking the most probable tokens."""

    def drafting_model(self, target: TreeModel) -> TreeModel:
        """Return the model that drafts for this target; raises ValueError if none can."""
        raise NotImplementedError(f"{type(self).__name__} must define drafting_model()")

    def fit(self, target: TreeModel) -> None:
        self.drafting_model(target)

    def reader(self, target: TreeModel, model: TreeModel) -> Reader:
        """Create the reader of a sequence for the draft model."""
        return Reader(model, self.reads_states)

    def rules_for(self, target: TreeModel, model: TreeModel, prompt: torch.Tensor, costs: Costs) -> Rules | None:
        """Choose the rules for a new sequence; None to draft nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define rules_for()")

    def stop(self, sequence: ModelSequence) -> Stop | None:
        """Create the criterion that may end the next draft early."""
        return None

    def depth_for(self, context: Context, rules: Rules) -> int:
        """Return the maximum number of drafting steps for a sequence."""
        return rules.depth

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(samples=self.sampled)

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> ModelSequence:
        return ModelSequence(self, prompt, target, costs)

    def describe(self) -> str:
        return f"{self.name}: {self.what()}"

    def what(self) -> str:
        """Return a description of the draft model."""
        return "a draft model"

    def shape(self, rules: Rules) -> str:
        """Return a description of the drafts."""
        raise NotImplementedError(f"{type(self).__name__} must define shape()")


class ModelSequence(SequenceDrafter):
    """One sequence as the draft model reads it, and the draft ahead of it."""

    drafter: ModelDrafter

    def __init__(self, drafter: ModelDrafter, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> None:
        super().__init__(drafter)
        model = drafter.drafting_model(target)
        self._target, self._costs = target, costs
        self._rules = drafter.rules_for(target, model, prompt, costs)
        self.reader = drafter.reader(target, model)
        self.counts: Counter[str] = Counter()
        """Counts for the next `statistics`."""
        self._graph: Graph | None = None
        if self._rules is not None:
            self.reader.prefill(prompt)

    def draft(self, context: Context) -> Draft:
        reader, rules, drafter = self.reader, self._rules, self.drafter
        self._graph = None
        if rules is None:
            return Draft.chain(context.root)
        sequence, warp = context.tokens, context.warp if drafter.sampled else None
        depth = min(drafter.depth_for(context, rules), context.remaining - 1, reader.reach(sequence))
        if rules.times is not None and rules.overhead.step >= 1:
            return Draft.chain(context.root)
        # Whether the loop can use a sampled draft must not depend on what is sampled, but on the number of nodes.
        if depth < 1 or (warp and not self._target.info.fits(len(sequence) - 1, rules.nodes + 1)):
            return Draft.chain(context.root)
        rules, began = replace(rules, depth=depth), time.perf_counter()
        if rules.times is not None:
            rules = replace(rules, times=self._costs.by_nodes)
        graph = self._graph = grow(
            reader, sequence, rules, self._target.vocab_size, warp, drafter.stop(self), context.generator
        )
        if rules.times is not None and graph.steps:
            seconds = (time.perf_counter() - began) / graph.steps
            self._costs.count(rules.overhead, 1, seconds)
        draft = verified(graph, rules)
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
        kept = []
        for node, _ in path:
            if node not in graph.read:  # a leaf or a merged node: its continuation was not read on this path
                break
            kept.append(graph.read[node])
        self.reader.keep(kept)

    def statistics(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def describe(self) -> str:
        drafter, rules = self.drafter, self._rules
        if rules is None:
            return f"{drafter.describe()}, nothing drafted, since a drafting step costs what it may save"
        how = "sampled drafts for sampled texts" if drafter.sampled else "deterministic drafts"
        return f"{drafter.describe()}, {drafter.shape(rules)}, {how}"


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
    """Maximum number of nodes verified, the most probable ones; auto: stop when another node would cost more than it
    saves (not for sequences or sampled drafts)."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        check_at_least(1, self, "depth", "k", "tau")
        for name in ("theta_prob", "theta_sib"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        check_auto_or_nodes(self, "nodes")
        self._overheads: dict[int, Overhead] = {}
        """Overhead of a drafting step, by the number of sequences."""
        self._disabled = 0
        """Sequences started while drafting was disabled."""

    def step_cost(self, target: TreeModel, model: TreeModel) -> float:
        """Return the cost of a forward pass of the draft model relative to the target's, until one was timed: by
        weights read.
        """
        return model.info.bytes_read / target.info.bytes_read

    def rules_for(self, target: TreeModel, model: TreeModel, prompt: torch.Tensor, costs: Costs) -> Rules | None:
        """Return None where a drafting step costs as much as the token that it may save."""
        if self.mode == "sequence":
            return Rules(self.depth if self.nodes == "auto" else min(self.depth, int(self.nodes)), 1, self.depth)
        tau = self.tau if self.mode == "graph" else 0
        rules = Rules(self.depth, self.k, _SAMPLED_NODES, self.theta_prob, self.theta_sib, tau)
        if self.nodes != "auto":
            return replace(rules, nodes=int(self.nodes))
        if self.sampled:  # measured times must not decide how many numbers are sampled
            return rules
        overhead = self._overhead_for(costs.sequences, self.step_cost(target, model))
        nodes = len(costs.by_nodes) - 1
        return (
            replace(rules, nodes=nodes, times=costs.by_nodes, overhead=overhead)
            if nodes and overhead.step < 1
            else None
        )

    def _overhead_for(self, batch: int, cost: float) -> Overhead:
        """Return the overhead of a drafting step for that many sequences, which are verified together, but drafted for
        one after another. Where drafting is disabled nothing is measured, so now and then a sequence probes: it starts
        with the overhead estimated from the weights.
        """
        overhead = self._overheads.setdefault(batch, Overhead(batch * cost))
        if overhead.step >= 1:
            self._disabled += 1
            if self._disabled % _PROBED == 0:
                overhead = self._overheads[batch] = Overhead(batch * cost)
        return overhead

    def shape(self, rules: Rules) -> str:
        steps = f"{self.mode} of {rules.depth} steps"
        if self.mode == "sequence":
            return steps
        nodes = f"{rules.nodes} nodes at most" if rules.times is None else "nodes at most, as far as they pay"
        pruned = f"k = {rules.k}, theta_prob = {rules.theta_prob}, theta_sib = {rules.theta_sib}"
        return f"{steps} and {nodes}, {pruned}" + (f", tau = {rules.tau}" if rules.tau else "")
