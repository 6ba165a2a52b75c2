"""Token Recycling beyond the paper: candidates with longer contexts, and trees sized by hardware and acceptance.

As `published` (Luo et al., 2408.08696) it drafts a tree from candidates that the target computes anyway, at rejected
nodes too. Beyond it, candidates keep their probabilities and are stored after the last two and three tokens too;
continuations of earlier occurrences of the last tokens, and tokens that lost to the newest one, are candidates as well;
and the tree is grown at each step from calibrated probabilities, to as many nodes as pay on this machine. Drafting is
disabled where it would slow decoding. This adapts the one `Recycler`, which engines use too.

Cost per step: a top-k over the logits of all nodes; some microseconds per node in compiled code for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ..._util.files import cache_folder
from ..._util.locks import Lock
from ..._util.topk import top_candidates
from ...grammar.statistics import GrammarStatistics
from ...model.inspection import weights_fingerprint
from ...model.target import Target
from ...recycling.growth import CHILDREN
from ...recycling.matrix_file import check_vocabulary, say_that_it_starts_again
from ...recycling.ngram_matrix import NgramMatrix, Options
from ...recycling.recycler import warm_up as compile_drafting
from ...trees.templates import Template, size_in_words, template_from
from .._base import Drafter, DrafterTraits
from .sequence import RecyclingSequence

_UNLEARNED = 8
"""Assumed size of earlier drafts before anything is learned: where nodes are expensive, drafting is disabled after the
first draft that does not pay. Trained drafters and drafts within grammars start with a larger credit.
"""


@dataclass
class Recycling(Drafter, Options):
    """Drafts from a matrix of contexts and from the sequence itself."""

    tree: str | int | Template = "auto"
    """auto (at each step as many nodes as pay), a number of nodes grown best first, or a template: paper, chain:N,
    static:N, rank paths, or a file of them.
    """
    warmed: bool = False
    """Start with knowledge from the model's own output (`token-recycling warm`), kept in a file."""
    matrix: NgramMatrix | None = field(default=None, init=False)
    """What was learned; made with the first sequence."""

    @property
    def traits(self) -> DrafterTraits:
        nodes: int | Literal["auto"] | None = None
        if self.template is None:
            nodes = "auto" if self.tree == "auto" else int(str(self.tree))
        return DrafterTraits(
            on_host=True,
            nodes=nodes,
            assumed_nodes=_UNLEARNED,
            top_k=self.k,
            predictions=self.suffix,
            within_grammars=self.template is None,
            grammar_statistics=self.grammar_statistics,
            reproducible=True,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grammar_statistics = GrammarStatistics()
        """Which tokens the target chooses where a grammar allows several."""
        self.template = template_from(self.tree)
        if self.template is not None and self.template.breadth > CHILDREN:
            raise ValueError(f"ranks of the tree must be below {CHILDREN}, got rank {self.template.breadth - 1}")
        self._making = Lock()

    def warm_up(self, device: torch.device) -> None:
        warm_up(device)

    def fit(self, target: Target) -> None:
        if self.matrix is not None:
            check_vocabulary(self.matrix.vocab_size, target.vocab_size)
        if self.warmed or self.matrix is not None:
            self.prepare(target)

    def start(self, prompt: torch.Tensor, target: Target) -> RecyclingSequence:
        self.warm_up(target.device)
        return RecyclingSequence(self, self.prepare(target), prompt.cpu().numpy())

    def prepare(self, target: Target) -> NgramMatrix:
        """Return the matrix for this target; raises ValueError if it has other options. For a target with
        another vocabulary, as after `resize_token_embeddings`, it is an empty one.
        """
        with self._making:
            if self.matrix is not None and self.matrix.vocab_size != target.vocab_size:
                say_that_it_starts_again(self.matrix.vocab_size, target.vocab_size)
                self.matrix = None
            if self.matrix is None:
                matrix = self.new_matrix(target.vocab_size)
                if self.warmed:
                    self._load_warmed(matrix, target)
                self.matrix = matrix
        if (self.matrix.k, self.matrix.orders) != (self.k, self.orders):
            raise ValueError(
                f"the matrix must have this drafter's k={self.k}, orders={self.orders}, "
                f"got k={self.matrix.k}, orders={self.matrix.orders}; make the drafter with the options of its matrix"
            )
        return self.matrix

    def warmed_file(self, target: Target) -> Path:
        """Return the file of what the target taught by output of its own (`hf.warm`), for these options: in the cache
        folder, named by the weights.
        """
        return cache_folder() / "warm" / f"{weights_fingerprint(target.model)}-{self.k}-{self.orders}.safetensors"

    def _load_warmed(self, matrix: NgramMatrix, target: Target) -> None:
        path = self.warmed_file(target)
        if not path.exists():
            raise ValueError(
                f"this model was not warmed for k={self.k}, orders={self.orders}: no file {path}; "
                "run `token-recycling warm MODEL` first, or leave out warmed=true"
            )
        matrix.load(path)

    def describe(self) -> str:
        parts = [f"{self.k} candidates", f"contexts of {self.orders}"]
        said = {
            "suffix": self.suffix,
            "earlier outputs": self.history,
            "warmed": self.warmed,
        }
        parts += [name for name, used in said.items() if used]
        return f"recycling: tree {self.template or size_in_words(self.tree)}; {', '.join(parts)}"


@cache
def warm_up(device: torch.device) -> None:
    """Compile the functions that drafting for a target on `device` needs."""
    compile_drafting()
    top_candidates(torch.zeros(2, 2, device=device), 1)
    NgramMatrix(2, 1, 1).predicts(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))
