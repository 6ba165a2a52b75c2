"""Token Recycling beyond the paper: candidates with more context, and trees that fit the hardware and the text.

Like the published method (Luo et al., 2408.08696; the drafter `published`) it drafts a tree from the candidates that
the target computes anyway, at rejected nodes too. Beyond it: candidates keep their probabilities, and are kept after
the last two and three tokens too (`ngram_matrix`); what followed where the last tokens stood before is among them, in
this text and in all that were written before it (`occurrences`), and so is what the target held likely besides the
newest token (`mixture`); and the tree is grown at each step from calibrated probabilities (`best_first`), to as many
nodes as pay on this machine (`costs`), by what passes and this drafter's own work take. Where drafting does not pay in
the long run, it rests.

Cost per step: a top-k over the logits of all nodes; some microseconds a node in compiled code for the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from ..._util.compiled import compiling
from ..._util.locks import Lock
from ..._util.topk import top_candidates
from ...costs.budget import NO_COSTS, paying_nodes, tokens_by_size
from ...costs.costs import Costs
from ...costs.drafting import Work
from ...model.tree_model import TreeModel
from ...recycling.best_first import CHILDREN, GrowingTree, Limits, TemplateArrays, count_chosen, fill, grow
from ...recycling.matrix import check_vocabulary
from ...recycling.ngram_matrix import NgramMatrix, check_options
from ...recycling.ngrams import ABSENT, last_ngram, ngrams_below, ngrams_of
from ...recycling.occurrences import LONGEST, Occurrences, Recorder
from ...recycling.warm_up import warm_up
from ...trees.draft import Context, Draft, Step
from ...trees.templates import root_only, size_in_words, template_from
from ...trees.tree import Tree
from .._base import Drafter, DrafterTraits, TextDrafter
from .priming import prime

_DEEPEST = 64


@dataclass
class Recycling(Drafter):
    """Drafts from a matrix of contexts and from the text itself."""

    tree: str | int | Tree = "auto"
    """auto (at each step as many nodes as pay), a number of nodes grown best first, or a template: paper, chain:N,
    static:N, rank paths, or a file of them.
    """
    k: int = 8
    """Candidates kept after every context."""
    orders: int = 3
    """Most tokens of a context, 1 to 4; 1 is the adjacency matrix of the paper."""
    memory: float = 16.0
    """Megabytes for contexts of two tokens and more: some 290,000 of them."""
    suffix: bool = True
    """Draft what followed where the last tokens stood in the text before."""
    past: int = 1_048_576
    """How many tokens of earlier outputs are kept, the newest: drafted is what followed there too; up to 20 MB."""
    learns_prompt: bool = False
    """Learn from the prompt's own candidates first; they take the output layer on every token of it."""
    primed: bool = False
    """Ask the model for its candidates after every single token first: seconds, once a model, kept in a file."""
    remembers: float = 0.0
    """Share of a row that stays when its context is seen again; 0 keeps the last candidates alone."""
    favours: float = 0.0
    """Share of probability that an emitted token takes from the other candidates of its row."""
    matrix: NgramMatrix | None = field(default=None, init=False)
    """What has been learned; made at the first text."""

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(learns_prompt=self.learns_prompt, on_host=True, top_k=self.k)

    def __post_init__(self) -> None:
        self.work = Work()
        """Of the steps of all texts, where the tree is to pay."""
        for name in ("remembers", "favours"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} from 0 to less than 1, got {getattr(self, name)}")
        check_options(self.k, self.orders, self.memory, self.past)
        self.template = template_from(self.tree)
        if self.template is not None and self.template.breadth > CHILDREN:
            raise ValueError(f"expected a template of ranks below {CHILDREN}, got rank {self.template.breadth - 1}")
        self._making = Lock()

    def warm_up(self, device: torch.device) -> None:
        fills = self.template is not None
        warm_up(device, fills=fills, remembers=bool(self.remembers), favours=bool(self.favours))

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> RecyclingText:
        self.warm_up(target.device)
        return RecyclingText(self, self.prepare(target), prompt.cpu().numpy(), costs)

    def prepare(self, target: TreeModel) -> NgramMatrix:
        """The matrix for this target: made if there is none, kept if it fits; raises ValueError if it was learned from
        another vocabulary or has another size than the options say.
        """
        with self._making:
            if self.matrix is None:
                made = NgramMatrix(target.vocab_size, self.k, self.orders, self.memory, self.past)
                if self.primed:
                    prime(made, target)
                self.matrix = made
        check_vocabulary(self.matrix.vocab_size, target.vocab_size)
        if (self.matrix.k, self.matrix.orders) != (self.k, self.orders):
            raise ValueError(
                f"expected a matrix of k={self.k}, orders={self.orders}, as this drafter's options say, "
                f"got k={self.matrix.k}, orders={self.matrix.orders}; make the drafter with the options of its matrix"
            )
        return self.matrix

    def describe(self) -> str:
        parts = [f"{self.k} candidates", f"contexts of {self.orders}"]
        said = {"suffix": self.suffix, "earlier outputs": self.past, "primed": self.primed}
        parts += [name for name, used in said.items() if used]
        return f"recycling: tree {self.template or size_in_words(self.tree)}; {', '.join(parts)}"


class RecyclingText(TextDrafter):
    """Where the tokens of one text stood before, and the tree that grows for it.

    The matrix is shared by all texts: each look-up and each lesson is one call of compiled code, which no other thread
    interrupts.
    """

    drafter: Recycling

    def __init__(self, drafter: Recycling, matrix: NgramMatrix, prompt: np.ndarray, costs: Costs) -> None:
        super().__init__(drafter)
        self.matrix = matrix
        self._costs, template = None, drafter.template
        """What passes cost, where the tree is to pay."""
        if template is not None:
            self._arrays, self._most = TemplateArrays.of(template), len(template) - 1
        elif drafter.tree == "auto":
            self._costs, self._most = costs, len(costs.by_nodes) * costs.texts - 1  # as of a text that is left alone
        else:
            self._most = int(drafter.tree)  # type: ignore[arg-type]
        self._text = Occurrences(prompt if drafter.suffix else ())
        self._recorder = Recorder(matrix.past)
        self._growing = GrowingTree.empty(self._most + 1, drafter.orders, drafter.k)
        self._before = np.full(drafter.orders - 1, ABSENT, np.int64)
        """The last tokens of the prompt that were learned from."""
        self._rest = 0
        """Steps for which nothing is to be drafted."""
        self._spent = 0.0
        """Seconds of this step's drafting."""
        self._nodes = 0
        """Nodes of this step's draft, the first that grew; 0 where no draft was made."""

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        piece, orders = tokens.cpu().numpy(), self.drafter.orders
        ngrams = ngrams_of(piece, orders, self._before)
        self._before = np.concatenate([self._before, piece])[len(piece) :]
        self._learn(ngrams, *top_candidates(logits, self.drafter.k), np.append(piece[1:], ABSENT))

    def draft(self, context: Context) -> Draft:
        if self._rest:
            self._rest -= 1
            return Draft(root_only(), context.root)
        began = _now()
        newest = self._read(context.tokens)
        sources, depth = self.matrix.sources(self._text), min(_DEEPEST, context.room - 1)
        if self.drafter.template is not None:
            self._nodes = fill(self._growing, newest, sources, self._arrays, depth)
        else:
            limits = self._limits(depth)
            self._nodes = self._believed(grow(self._growing, newest, sources, limits), limits.costs)
        draft = self._drafted()
        self._spent = _now() - began
        return draft

    def _limits(self, depth: int) -> Limits:
        if self._costs is None:
            return Limits(NO_COSTS, self._most, depth)
        passes, work = self._costs.by_nodes, self.drafter.work
        costs = passes + work.step + work.node * np.arange(len(passes))
        return Limits(costs, min(self._most, len(costs) - 1), depth)

    def _believed(self, nodes: int, costs: np.ndarray) -> int:
        """How many of the `nodes` that have grown pay by what has come of such forecasts before."""
        if self._costs is None:
            return nodes
        gains = self._costs.trust(self.drafter.work) * self._growing.values[1:nodes]
        return 1 + paying_nodes(tokens_by_size(gains), costs[:nodes])

    def observe(self, step: Step) -> None:
        nodes, self._nodes = self._nodes, 0
        self._recorder.add(step.tokens, step.finished)
        if not nodes:
            return
        began = _now()
        count_chosen(self._growing, nodes, np.array(step.tokens), self.matrix.calibration)
        # Nodes that other drafters proposed are as good to learn from.
        tree, tokens = step.draft.tree, step.draft.tokens.cpu().numpy()
        ngrams = ngrams_below(self._growing.recent[: self.drafter.orders], np.array(tree.parents), tokens)
        chosen = np.full(len(tree), ABSENT, np.int64)
        chosen[step.accepted] = step.tokens
        learnable = np.arange(len(tree))[step.learnable]
        # A row that was right stays as it is.
        teaching = learnable[~self.matrix.foresees(ngrams[learnable], chosen[learnable])]
        self._learn(ngrams[teaching], *step.top(self.drafter.k, teaching), chosen[teaching])
        if self._costs is not None:
            self._reckon(step, nodes, self._costs, self._spent + _now() - began)

    def _reckon(self, step: Step, nodes: int, costs: Costs, seconds: float) -> None:
        """Counts what the step gave and took, `seconds` of it here."""
        verified, work = len(step.draft.tree), self.drafter.work
        work.count(verified, costs.in_passes(seconds))
        taken = costs.of(costs.nodes) + work.of(verified)
        foreseen = float(self._growing.values[:nodes].sum())
        self._rest = costs.rest(work, len(step.tokens), taken, own=work.of(1), foreseen=foreseen)

    def _read(self, tokens: torch.Tensor) -> np.ndarray:
        """Reads what is new of the text; returns its last tokens, the newest first."""
        if self.drafter.suffix:
            self._text.extend(tokens[len(self._text) :].cpu().numpy())
        return last_ngram(tokens[-LONGEST:].cpu().numpy(), LONGEST)

    def _learn(self, ngrams: np.ndarray, ids: np.ndarray, probabilities: np.ndarray, chosen: np.ndarray) -> None:
        options = self.drafter
        self.matrix.learn(ngrams, ids, probabilities, chosen, options.remembers, options.favours)

    def _drafted(self) -> Draft:
        """The nodes that have grown, in order of depth."""
        growing, nodes = self._growing, self._nodes
        order = np.argsort(growing.depths[:nodes], kind="stable")
        places = np.empty(nodes, np.int64)
        places[order] = np.arange(nodes)
        parents, ranks = growing.parents[order], growing.ranks[order]
        tree = Tree((-1, *places[parents[1:]].tolist()), tuple(ranks.tolist()))
        confidence = growing.chances[parents, ranks]
        confidence[0] = 1
        return Draft(tree, torch.from_numpy(growing.tokens[order]), confidence=confidence)


def _now() -> float:
    """Seconds; those of compiling do not pass."""
    return time.perf_counter() - compiling.seconds
