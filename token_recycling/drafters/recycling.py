"""Token Recycling beyond the paper: candidates with longer contexts, and trees sized by hardware and acceptance.

Like `published` (Luo et al., 2408.08696) it drafts a tree from candidates that the target computes anyway, also at
rejected nodes. Beyond that, candidates keep their probabilities and are also stored after the last two and three
tokens. Continuations of earlier occurrences of the last tokens, and tokens that lost to the newest one, are candidates
too. The tree is grown at each step from calibrated probabilities, to as many nodes as pay on this machine. Drafting is
disabled where it would slow decoding. This module adapts `Recycler`, which engines also use.

Cost per step: a top-k over the logits of all nodes; some microseconds per node in compiled code for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._util.files import cache_folder
from .._util.locks import Lock
from .._util.topk import top_candidates
from ..grammar.statistics import GrammarStatistics
from ..model.inspection import weights_fingerprint
from ..model.target import Target
from ..recycling.ngram_matrix import NgramMatrix, Options
from ..recycling.ngrams import ABSENT
from ..recycling.recycler import CHILDREN, Recycler
from ..recycling.recycler import warm_up as compile_drafting
from ..recycling.sizes import check_vocabulary, fitting
from ..trees.draft import Context, Draft, Step
from ..trees.templates import Template, nodes_of, size_description, template_from
from ._base import PREDICTED, Drafter, DrafterTraits, SequenceDrafter

if TYPE_CHECKING:
    from ..grammar.state import State

_DEEPEST = 255
_MOST_NODES = 255
"""Maximum nodes of a tree sized by cost: those of the largest pass on the cost curve."""
_UNLEARNED = 8
"""Assumed size of past drafts before anything is learned: where nodes are expensive, drafting is disabled after the
first draft that does not pay. Trained drafters and drafts within grammars start with a larger credit.
"""


@dataclass
class Recycling(Drafter, Options):
    """Drafts from a matrix of contexts and from the sequence itself."""

    tree: str | int | Template = "auto"
    """auto: at each step as many nodes as pay; a number of nodes, grown best first; or a template: paper, chain:N,
    static:N, rank paths, or a file of them.
    """
    warmed: bool = False
    """Start from a matrix learned from the model's own output (`token-recycling warm`), stored in a file."""
    matrix: NgramMatrix | None = field(default=None, init=False)
    """The learned candidates; created with the first sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grammar_statistics = GrammarStatistics()
        """Statistics of the target's choices where a grammar allows several tokens."""
        self.template = template_from(self.tree)
        if self.template is not None and self.template.breadth > CHILDREN:
            raise ValueError(f"ranks of the tree must be below {CHILDREN}, got rank {self.template.breadth - 1}")
        self._size = size_description(self.tree, self.template)
        self._making = Lock()

    @cached_property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(
            on_host=True,
            nodes=nodes_of(self.tree, self.template),
            assumed_nodes=_UNLEARNED,
            top_k=self.k,
            predictions=self.suffix,
            within_grammars=self.template is None,
            grammar_statistics=self.grammar_statistics,
            reproducible=True,
        )

    def warm_up(self, device: torch.device) -> None:
        warm_up(device)

    def fit(self, target: Target) -> None:
        if self.matrix is not None:
            check_vocabulary(self.matrix.vocab_size, target.vocab_size)
        if self.warmed or self.matrix is not None:
            self.prepare(target)

    def fit_again(self, target: Target) -> None:
        self.prepare(target)

    def start(self, prompt: torch.Tensor, target: Target) -> RecyclingSequence:
        warm_up(target.device)
        return RecyclingSequence(self, self.prepare(target), prompt.cpu().numpy())

    def prepare(self, target: Target) -> NgramMatrix:
        """Return the matrix for this target; raises ValueError if it has other options. A target with another
        vocabulary size, as after `resize_token_embeddings`, gets an empty matrix.
        """
        if self.matrix is None or self.matrix.vocab_size != target.vocab_size:
            with self._making:  # unless another thread has created it meanwhile
                self.matrix = fitting(self.matrix, target.vocab_size) or self._first_matrix(target)
        if (self.matrix.k, self.matrix.orders) != (self.k, self.orders):
            raise ValueError(
                f"the matrix must have this drafter's k={self.k}, orders={self.orders}, "
                f"got k={self.matrix.k}, orders={self.matrix.orders}; make the drafter with the options of its matrix"
            )
        return self.matrix

    def warmed_file(self, target: Target) -> Path:
        """Return the file of the matrix learned from the target's own output (`hf.warm`) with these options: in the
        cache folder, named by the weights.
        """
        return cache_folder() / "warm" / f"{weights_fingerprint(target.model)}-{self.k}-{self.orders}.safetensors"

    def _first_matrix(self, target: Target) -> NgramMatrix:
        """Return an empty matrix, or with `warmed` the one learned from the target's own output."""
        matrix = self.new_matrix(target.vocab_size)
        if not self.warmed:
            return matrix
        path = self.warmed_file(target)
        if not path.exists():
            raise ValueError(
                f"this model was not warmed for k={self.k}, orders={self.orders}: no file {path}; "
                "run `token-recycling warm MODEL` first, or leave out warmed=true"
            )
        matrix.load(path)
        return matrix

    def describe(self) -> str:
        sources = {"suffix": self.suffix, "earlier outputs": self.history, "warmed": self.warmed}
        parts = [f"{self.k} candidates", f"contexts of {self.orders}", *(name for name in sources if sources[name])]
        return f"recycling: tree {self._size}; {', '.join(parts)}"


class RecyclingSequence(SequenceDrafter):
    """One sequence and its recycler. The matrix is shared: each look-up is one uninterrupted call of compiled code."""

    drafter: Recycling

    def __init__(self, drafter: Recycling, matrix: NgramMatrix, prompt: np.ndarray) -> None:
        super().__init__(drafter)
        template, nodes = drafter.template, drafter.traits.nodes
        sized = nodes if isinstance(nodes, int) else _MOST_NODES
        most = sized if template is None else len(template) - 1
        self._recycler = Recycler(matrix, prompt, most, suffix=drafter.suffix, template=template)
        self._prompt: np.ndarray | None = prompt
        """The prompt, until it is read: by the first draft, or after a first step without a draft."""
        self._drafted = False
        """Whether this step has a draft."""
        self._predicted = False

    def predict(self, tokens: torch.Tensor) -> None:
        self._predicted = True
        self._recycler.predict(tokens.tolist())

    def draft(self, context: Context) -> Draft:
        self._prompt, self._drafted, budget = None, True, context.budget
        tokens, max_depth = context.tokens.cpu().numpy(), min(_DEEPEST, context.remaining - 1)
        if context.state is None or self.drafter.template is not None:
            tree = self._recycler.draft(tokens, max_depth, budget.times, budget.ratio)
            probabilities = tree["probabilities"][tree["parent"], tree["rank"]]
        else:
            tree, probabilities = self._recycler.draft_within(
                tokens, max_depth, context.state, self.drafter.grammar_statistics, budget.times, budget.ratio
            )
        return Draft.of(tree["token"], tree["parent"], probabilities)

    def observe(self, step: Step) -> None:
        """Record the emitted tokens, and learn from the target's logits, also at nodes of other drafters."""
        drafted, self._drafted = self._drafted or self._prompt is not None, False
        if self._prompt is not None:
            self._recycler.grow(self._prompt, 0)
            self._prompt = None
        self._recycler.observe(step.tokens, step.finished)
        if not drafted:
            return
        draft = step.draft
        ngrams = self._recycler.ngrams(draft.parents, draft.tokens)
        chosen = np.full(len(draft), ABSENT, np.int64)
        chosen[step.accepted] = step.tokens
        learnable = np.arange(len(draft))[step.learnable]
        # Rows that predicted correctly are not overwritten.
        teaching = learnable[~self._recycler.matrix.predicts(ngrams[learnable], chosen[learnable])]
        if step.grammar_states is None:
            self._recycler.matrix.learn(ngrams[teaching], *step.top(self.drafter.k, teaching))
        else:
            self._learn_within(step.grammar_states, step, teaching, ngrams)

    def statistics(self) -> Mapping[str, float]:
        return {PREDICTED: self._recycler.predicted} if self._predicted else {}

    def _learn_within(
        self, states: Sequence[State | None], step: Step, teaching: np.ndarray, ngrams: np.ndarray
    ) -> None:
        """Learn which allowed tokens the target chooses: its other candidates never become output."""
        from ..grammar.allowed import top_allowed

        choices = {
            node: state for node in teaching.tolist() if (state := states[node]) is not None and not state.single
        }
        if choices:
            nodes = np.array([*choices])
            self._recycler.matrix.learn(ngrams[nodes], *top_allowed(step, choices, self.drafter.k))


@cache
def warm_up(device: torch.device) -> None:
    """Compile the functions needed for drafting for a target on `device`."""
    compile_drafting()
    top_candidates(torch.zeros(2, 2, device=device), 1)
    NgramMatrix(2, 1, 1).predicts(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))
