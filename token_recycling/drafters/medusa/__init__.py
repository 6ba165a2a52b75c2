"""Medusa-1: heads on the target's last hidden state predict the next tokens (Cai et al., 2401.10774).

The hidden state of the last accepted node gave the newest token. The heads (`heads`) give candidates for the tokens
after it, head k for depth k; those of one head are the children of every candidate of the head before (section 2.1.1).
Which combinations are verified is decided once, by how often each head's candidates were right in training (section
2.3.3), or at each step by the heads' probabilities. The paper's typical acceptance changes the sequence and is not
here.

Cost per step: the heads, which is mostly the target's output layer once more; some microseconds a node for the tree.
Nothing is drafted in a first step that reads the prompt too: its hidden states are not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from ..._util.topk import top_candidates
from ...costs.budget import Budget, best_size
from ...model.inspection import last_state, output_layer, output_width
from ...model.tree_model import TreeModel
from ...trees.draft import Context, Draft, Step
from ...trees.templates import Template, best_paths, template_from, tree_of
from .._base import DrafterTraits, SequenceDrafter, check_at_least
from .._shared.placed import placed_copy
from .._shared.saved import TrainedPartError, check_model
from .._shared.states import StatesDrafter, best_product, product_draft
from .heads import MedusaHeads, load_heads

_STATIC = "static"


@dataclass
class Medusa(StatesDrafter[MedusaHeads]):
    """Drafts with trained heads on the target's last hidden state."""

    heads: str | Path
    """Folder made by `token-recycling train medusa` for this target."""
    tree: str | int = "auto"
    """auto (as many nodes as pay at each step, by the heads' probabilities) or a number of nodes; static: a fixed tree
    sized for this machine; static:N: N nodes; rank paths, or a file of them.
    """
    k: int = 10
    """Candidates per head."""

    @property
    def traits(self) -> DrafterTraits:
        nodes = "auto" if self.tree == _STATIC else self.nodes  # sized for the machine at the first draft
        return DrafterTraits(states=last_state, nodes=nodes)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "k")
        self._saved = load_heads(Path(self.heads).expanduser())
        self.accuracy = [ranks[: self.k] for ranks in self._saved.accuracy]
        """Accuracy of each head's candidates, as measured in training."""
        kind, _, number = str(self.tree).rpartition(":")
        if kind == _STATIC and number.isdigit() and int(number):
            self.template = tree_of(islice(best_paths(self.accuracy), int(number)))
        elif self.tree != _STATIC:
            self.template = template_from(self.tree)
            self.check_template(len(self.accuracy), f"{len(self.accuracy)} layers, one a head,")

    def start(self, prompt: torch.Tensor, target: TreeModel) -> MedusaSequence:
        return MedusaSequence(self, self.placed(target), target)

    def check(self, target: TreeModel) -> None:
        """Raise TrainedPartError unless the heads were trained for the target."""
        check_model(self.heads, self._saved.facts, target.model)
        width, ours = self._saved.heads.width, output_width(target.model)
        if width != ours:
            raise TrainedPartError(f"{self.heads}: hidden size of the heads must be {ours}, got {width}")

    def place(self, target: TreeModel) -> MedusaHeads:
        return placed_copy(self._saved.heads, target.device, target.dtype)

    def describe(self) -> str:
        return f"medusa: {self._saved.heads.heads} heads of {self.heads}, tree {self.tree_in_words()}"


class MedusaSequence(SequenceDrafter):
    """Predictions of the heads for one sequence."""

    drafter: Medusa

    def __init__(self, drafter: Medusa, heads: MedusaHeads, target: TreeModel) -> None:
        super().__init__(drafter)
        self._heads, self._output = heads, output_layer(target.model)
        self._hidden: torch.Tensor | None = None
        """(hidden,): the state of the last accepted node, from which the newest token was chosen."""
        read = sum(weight.numel() for weight in (*heads.parameters(), *self._output.parameters()))
        self.pass_cost = read / target.model.num_parameters()
        self._template = drafter.template
        """The tree that is filled; None where it grows, and until the first draft where it is sized for the machine."""

    def read_prompt(self, states: torch.Tensor) -> None:
        self._hidden = states[-1] if len(states) else None

    def draft(self, context: Context) -> Draft:
        static = self.drafter.tree == _STATIC
        if self._hidden is None or not context.budget.pays([1.0]):
            return Draft.chain(context.root)
        if static and self._template is None:
            self._template = self._static(context.budget)
        if self._template is not None and len(self._template) == 1:
            return Draft.chain(context.root)
        logits = self._heads(self._hidden[None], self._output)[:, 0]
        candidates, probabilities = top_candidates(logits, min(self.drafter.k, logits.shape[-1]))
        tree = self._template or best_product(probabilities.tolist(), context.budget.nodes)
        draft = product_draft(tree, context.root, candidates, probabilities)
        return replace(draft, probabilities=None) if static else draft

    def _static(self, budget: Budget) -> Template:
        """Return the tree of as many nodes as pay by the accuracy that was measured in training."""
        paths = list(islice(best_paths(self.drafter.accuracy), budget.nodes))
        return tree_of(paths[: best_size([gain for gain, _ in paths], budget.times)[0]])

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._hidden = step.states[step.accepted[-1]]

    def describe(self) -> str:
        if self.drafter.tree != _STATIC:
            return self.drafter.describe()
        return f"medusa: {self._heads.heads} heads of {self.drafter.heads}, tree {self._template or _STATIC}"
