"""Medusa-1: heads on the target's last hidden state predict the next tokens (Cai et al., 2401.10774).

The hidden state of the last accepted node produced the newest token. The heads predict candidates for the tokens after
it, head k for depth k; the candidates of one head are children of every candidate of the preceding head (section
2.1.1). The combinations to verify are chosen once, by the accuracy of each head's candidates in training (section
2.3.3), or at each step by the heads' probabilities. The paper's typical acceptance changes the output and is not
implemented.

Cost per step: the heads, mostly another pass of the target's output layer; some microseconds per node for the tree. A
first step that also reads the prompt drafts nothing: its hidden states are not known yet.

Heads (section 2.1): a head is a residual block x + SiLU(Wx + b), with W and b initially zero, and an output layer
initialized as the target's. With such output layers (`own_output`) four heads on the shipped target are as large as the
target itself. So by default a head's output layer is the target's times a learned square matrix, initially the
identity: all heads together are one more product with weights that are read once. The matrix is needed: SiLU hardly
goes below zero, so the block alone could not subtract what the hidden state predicts for the next token.

Cost of a draft: the square matrices, and the output layer on one row per head.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import PreTrainedModel

from .._util.topk import top_candidates
from ..costs import best_size
from ..model.hidden import last_state, output_layer, output_width
from ..model.target import Target
from ..trees.draft import Budget, Context, Draft, Step
from ..trees.templates import Template, best_paths, template_from, tree_of
from ._base import DrafterTraits, SequenceDrafter, check_at_least
from ._shared.neural import placed_copy
from ._shared.saved import TrainedPartError, check_model, load_part, read_tensors, save_part
from ._shared.states import StatesDrafter, best_product, product_draft

KIND = "medusa"


class MedusaHeads(torch.nn.Module):
    """`heads` heads of `blocks` residual blocks each, on hidden states of one width."""

    def __init__(self, heads: int, width: int, blocks: int = 1, output: torch.Tensor | None = None) -> None:
        """`output` (vocabulary, width) is copied into an output layer per head; None: share the target's."""
        super().__init__()
        if heads < 1 or blocks < 1:
            raise ValueError(f"heads and blocks must be >= 1, got {heads} and {blocks}")
        self.weight = torch.nn.Parameter(torch.zeros(blocks, heads, width, width))
        self.bias = torch.nn.Parameter(torch.zeros(blocks, heads, 1, width))
        self.shares_output = output is None
        """Whether the target's output layer is applied after the heads."""
        output = torch.eye(width) if output is None else output.detach().float()
        self.output = torch.nn.Parameter(output.repeat(heads, 1, 1))

    @property
    def heads(self) -> int:
        return self.weight.shape[1]

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return self.weight.shape[2]

    def forward(self, hidden: torch.Tensor, shared: torch.nn.Module) -> torch.Tensor:
        """Return logits (heads, n, vocabulary) from hidden states (n, width); `shared` is the target's output layer."""
        states = hidden.to(self.weight.dtype).expand(self.heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + silu(torch.baddbmm(bias, states, weight))
        states = torch.bmm(states, self.output.transpose(1, 2))
        return shared(states.to(hidden.dtype)) if self.shares_output else states


@dataclass
class SavedHeads:
    """Saved heads and their accuracy."""

    heads: MedusaHeads
    accuracy: list[list[float]]
    """For each head, the accuracy of its candidate of each rank on held-out outputs; empty for the authors' heads."""
    facts: dict[str, Any]
    """Facts about their training; empty for the authors' heads."""


def save_heads(
    folder: str | os.PathLike[str],
    heads: MedusaHeads,
    model: PreTrainedModel,
    accuracy: Sequence[Sequence[float]],
    **facts: Any,
) -> None:
    """Write `medusa.safetensors` and `medusa.json`, in the dtype of `heads`."""
    described = {"heads": heads.heads, "own_output": not heads.shares_output, "accuracy": accuracy, **facts}
    save_part(folder, KIND, heads.state_dict(), model, described)


_PUBLISHED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_NAME = re.compile(r"(?:medusa_heads?\.|heads\.)?(\d+)\.(\d+)\.((?:linear\.)?(?:weight|bias))")
"""Names of tensors in the authors' files: head, block and parameter; the output layer is after the last block."""


def _published(path: Path) -> SavedHeads:
    """Return heads in the format of the paper's authors, which have no measured accuracy."""
    tensors = read_tensors(path)
    named: dict[tuple[int, int, str], torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise TrainedPartError(
                f"{path}: unknown tensor {name}; expected HEAD.BLOCK.linear.weight and HEAD.BLOCK.weight"
            )
        named[int(match[1]), int(match[2]), match[3]] = tensor
    number = 1 + max((head for head, _, _ in named), default=0)
    blocks = 1 + max((block for _, block, _ in named), default=0)
    try:
        output = torch.stack([named.pop((head, blocks - 1, "weight")) for head in range(number)])
        heads = MedusaHeads(number, output.shape[2], blocks - 1, output.new_empty(0, output.shape[2]))
        for block, head in itertools.product(range(blocks - 1), range(number)):
            heads.weight.data[block, head] = named.pop((head, block, "linear.weight")).T
            heads.bias.data[block, head] = named.pop((head, block, "linear.bias"))
    except (KeyError, RuntimeError, ValueError) as error:
        raise TrainedPartError(f"{path}: tensors are missing or malformed ({error})") from None
    if named:
        raise TrainedPartError(f"{path}: unknown tensors of {len(named)} names, such as {next(iter(named))}")
    heads.output = torch.nn.Parameter(output)
    return SavedHeads(heads.requires_grad_(False), [], {})


def load_heads(folder: str | os.PathLike[str]) -> SavedHeads:
    """Return heads from a folder; raises TrainedPartError for a damaged folder, FileNotFoundError if there are none."""
    for name in _PUBLISHED:
        if (Path(folder) / name).is_file():
            return _published(Path(folder) / name)
    tensors, facts = load_part(folder, KIND)
    weight, output, accuracy = tensors.get("weight"), tensors.get("output"), facts.get("accuracy")
    if (
        weight is None
        or output is None
        or (weight.ndim, output.ndim) != (4, 3)
        or not isinstance(accuracy, list)
        or len(accuracy) != weight.shape[1]
        or not all(isinstance(ranks, list) and ranks for ranks in accuracy)
    ):
        raise TrainedPartError(f"{folder}: heads or their accuracy are missing or malformed; train them again")
    heads = MedusaHeads(
        weight.shape[1], weight.shape[2], weight.shape[0], output[0] if facts.get("own_output") else None
    )
    try:
        heads.load_state_dict(tensors)
    except RuntimeError as error:
        raise TrainedPartError(f"{folder}: tensors do not match the heads ({error}); train them again") from None
    return SavedHeads(heads.requires_grad_(False), accuracy, facts)


_STATIC = "static"


@dataclass
class Medusa(StatesDrafter[MedusaHeads]):
    """Drafts with trained heads on the target's last hidden state."""

    heads: str | Path
    """Folder of heads for this target: from `token-recycling train medusa`, or heads of Medusa-1's authors."""
    tree: str | int = "auto"
    """auto: as many nodes as pay at each step, by the heads' probabilities; a number of nodes; static: a fixed tree
    sized for this machine; static:N: a fixed tree of N nodes; rank paths, or a file of them.
    """
    k: int = 10
    """Candidates per head."""

    @property
    def traits(self) -> DrafterTraits:
        nodes = "auto" if self.tree == _STATIC else self.nodes  # sized for the machine at the first draft
        return DrafterTraits(states=last_state, on_host=True, nodes=nodes)

    def __post_init__(self) -> None:
        check_at_least(1, self, "k")
        self._saved = load_heads(Path(self.heads).expanduser())
        self.accuracy = [ranks[: self.k] for ranks in self._saved.accuracy]
        """Accuracy of each head's candidates, measured in training."""
        kind, _, number = str(self.tree).rpartition(":")
        if _STATIC in (kind, number) and not self.accuracy:
            raise ValueError(
                f"tree={self.tree} is chosen by accuracy measured in training, which {self.heads} does not have; "
                "use auto, a number of nodes, or rank paths"
            )
        if kind == _STATIC and number.isdigit() and int(number):
            self.template = tree_of(islice(best_paths(self.accuracy), int(number)))
        elif self.tree != _STATIC:
            self.template = template_from(self.tree)
            heads = self._saved.heads.heads
            self.check_template(heads, f"{heads} layers, one a head,")

    def start(self, prompt: torch.Tensor, target: Target) -> MedusaSequence:
        return MedusaSequence(self, self.placed(target), target)

    def check(self, target: Target) -> None:
        """Raise TrainedPartError unless the heads were trained for the target."""
        heads, facts = self._saved.heads, self._saved.facts
        if facts:
            check_model(self.heads, facts, target.model)
        ours = output_width(target.model)
        if heads.width != ours:
            raise TrainedPartError(f"{self.heads}: hidden size of the heads must be {ours}, got {heads.width}")
        if not facts and heads.output.shape[1] != target.vocab_size:
            raise TrainedPartError(
                f"{self.heads}: vocabulary of the heads must be {target.vocab_size}, got {heads.output.shape[1]}"
            )

    def place(self, target: Target) -> MedusaHeads:
        self.check(target)
        return placed_copy(self._saved.heads, target.device, target.dtype)

    def describe(self) -> str:
        return f"medusa: {self._saved.heads.heads} heads of {self.heads}, tree {self.tree_description()}"


class MedusaSequence(SequenceDrafter):
    """The heads' predictions for one sequence."""

    drafter: Medusa

    def __init__(self, drafter: Medusa, heads: MedusaHeads, target: Target) -> None:
        super().__init__(drafter)
        self._heads, self._output = heads, output_layer(target.model)
        self._hidden: torch.Tensor | None = None
        """(hidden,): the hidden state of the last accepted node, which produced the newest token."""
        read = sum(weight.numel() for weight in (*heads.parameters(), *self._output.parameters()))
        self.pass_cost = read / target.model.num_parameters()
        self._template = drafter.template
        """The tree to fill; None if it grows, and until the first draft if it is sized for the machine."""

    def read_prompt(self, states: torch.Tensor) -> None:
        if len(states):
            self._hidden = states[-1]

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
        """Return the tree with as many nodes as pay by the accuracy measured in training."""
        paths = list(islice(best_paths(self.drafter.accuracy), budget.nodes))
        return tree_of(paths[: best_size([gain for gain, _ in paths], budget.times)[0]])

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._hidden = step.states[step.accepted[-1]]

    def describe(self) -> str:
        if self.drafter.tree != _STATIC:
            return self.drafter.describe()
        return f"medusa: {self._heads.heads} heads of {self.drafter.heads}, tree {self._template or _STATIC}"
