"""Token Recycling beyond the paper: candidates with more context, and trees that fit the hardware and the text.

As `published` (Luo et al., 2408.08696) it drafts a tree from the candidates that the target computes anyway, at
rejected nodes too. Beyond it they keep their probabilities, and are kept after the last two and three tokens too;
what followed where the last tokens stood before is among them, and what the target held likely besides the newest
token; and the tree is grown at each step from calibrated probabilities to as many nodes as pay on this machine. Where
drafting does not pay in the long run, it rests. This adapts the one `Recycler`, which engines use too.

Cost per step: a top-k over the logits of all nodes; some microseconds a node in compiled code for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from ..._util.compiled import compiling
from ..._util.locks import Lock
from ..._util.topk import top_candidates
from ...costs.budget import NO_COSTS
from ...costs.costs import Costs, Work, paying_nodes, tokens_by_size
from ...model.tree_model import TreeModel
from ...recycling.constrained import Habits, states_of
from ...recycling.matrix_file import check_vocabulary
from ...recycling.ngram_matrix import NgramMatrix
from ...recycling.ngrams import ABSENT, ngrams_at
from ...recycling.nodes import CHILDREN
from ...recycling.options import Options
from ...recycling.recycler import Recycler
from ...recycling.warm_up import warm_up as compile_drafting
from ...trees.constraint import State
from ...trees.draft import Context, Draft, Step
from ...trees.templates import root_only, size_in_words, template_from
from ...trees.tree import Tree
from .._base import Drafter, DrafterTraits, TextDrafter
from .._shared.pairing import Pairs
from .allowed import top_allowed
from .priming import prime
from .states import States, TextStates

_DEEPEST = 64


@dataclass
class Recycling(Drafter, Options):
    """Drafts from a matrix of contexts and from the text itself."""

    tree: str | int | Tree = "auto"
    """auto (at each step as many nodes as pay), a number of nodes grown best first, or a template: paper, chain:N,
    static:N, rank paths, or a file of them.
    """
    learns_prompt: bool = False
    """Learn from the prompt's own candidates first; they take the output layer on every token of it."""
    remembers: float = 0.0
    """Share of a row that stays when its context is seen again; 0 keeps the last candidates alone."""
    favours: float = 0.0
    """Share of probability that an emitted token takes from the other candidates of its row."""
    primed: bool = False
    """Ask the model for its candidates after every single token first: seconds, once a model, kept in a file."""
    states: bool = False
    """Draft from the target's hidden states too, by a map that is learned while decoding; it is kept with the matrix.
    """
    matrix: NgramMatrix | None = field(default=None, init=False)
    """What has been learned; made at the first text."""

    @property
    def traits(self) -> DrafterTraits:
        last = (lambda layers: [layers]) if self.states else None
        return DrafterTraits(
            learns_prompt=self.learns_prompt,
            on_host=True,
            top_k=self.k,
            states=last,
            within_grammars=self.template is None,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.work = Work()
        """Of the steps of all texts, where the tree is to pay."""
        self.work_within = Work()
        """The same of texts whose form is given: most of what is drafted for them is forced."""
        self.habits = Habits()
        """Which tokens the target takes where a grammar allows several."""
        for name in ("remembers", "favours"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"expected {name} from 0 to less than 1, got {getattr(self, name)}")
        self.template = template_from(self.tree)
        if self.template is not None and self.template.breadth > CHILDREN:
            raise ValueError(f"expected a template of ranks below {CHILDREN}, got rank {self.template.breadth - 1}")
        self._making = Lock()
        self._learners = Pairs[States]()
        """What learns from the states of each target."""

    def warm_up(self, device: torch.device) -> None:
        warm_up(device, self.remembers > 0, self.favours > 0)

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> RecyclingText:
        self.warm_up(target.device)
        matrix = self.prepare(target)
        return RecyclingText(self, matrix, prompt.cpu().numpy(), costs, self._states_for(target, matrix))

    def prepare(self, target: TreeModel) -> NgramMatrix:
        """The matrix for this target; raises ValueError if it is of another vocabulary or of other options."""
        with self._making:
            if self.matrix is None:
                made = self.new_matrix(target.vocab_size)
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

    def _states_for(self, target: TreeModel, matrix: NgramMatrix) -> States | None:
        """What learns from states, anew for another matrix or target."""
        if not self.states:
            return None
        with self._making:
            learner = self._learners.get(target.model)
            if learner is None or not learner.serves(target, matrix):
                learner = self._learners[target.model] = States(target, matrix)
            return learner

    def describe(self) -> str:
        parts = [f"{self.k} candidates", f"contexts of {self.orders}"]
        said = {
            "suffix": self.suffix,
            "earlier outputs": self.past,
            "primed": self.primed,
            "hidden states": self.states,
        }
        parts += [name for name, used in said.items() if used]
        return f"recycling: tree {self.template or size_in_words(self.tree)}; {', '.join(parts)}"


class RecyclingText(TextDrafter):
    """One text and its recycler. The matrix is shared: each look-up is one call of compiled code, never interrupted."""

    drafter: Recycling

    def __init__(
        self, drafter: Recycling, matrix: NgramMatrix, prompt: np.ndarray, costs: Costs, states: States | None
    ) -> None:
        super().__init__(drafter)
        self._states = None if states is None else TextStates(states, prompt)
        self._costs, template = None, drafter.template
        """What passes cost, where the tree is to pay."""
        if template is not None:
            most = len(template) - 1
        elif drafter.tree == "auto":
            self._costs, most = costs, len(costs.by_nodes) * costs.texts - 1  # as of a text that is left alone
        else:
            most = int(drafter.tree)  # type: ignore[arg-type]
        self._recycler = Recycler(matrix, drafter, most, template=template)
        self._text = self._recycler.begin(prompt)
        self._prompt = np.full(drafter.orders - 1, ABSENT, np.int64)
        """The last tokens of the prompt that were learned from."""
        self._work = drafter.work
        self._state: State | None = None
        """What may follow the last draft's root, if a grammar says it."""
        self._rest = 0
        self._spent = 0.0
        self._values = np.empty(0, np.float32)
        """The probabilities of this step's nodes; none where no draft was made."""

    def observe_prompt(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        known = np.concatenate([self._prompt, tokens.cpu().numpy()])
        self._prompt = known[len(tokens) :]
        ngrams = ngrams_at(known[None], np.array([len(known) - 1]), np.array([len(tokens)]), self.drafter.orders)
        chosen = np.append(known[len(known) - len(tokens) + 1 :], ABSENT)
        self._learn(ngrams, *top_candidates(logits, self.drafter.k), chosen)

    def read_prompt(self, states: torch.Tensor) -> None:
        if self._states is not None:
            self._states.read_prompt(states)

    def draft(self, context: Context) -> Draft:
        self._state = context.state if self.drafter.traits.within_grammars else None
        self._work = self.drafter.work if self._state is None else self.drafter.work_within
        if self._rest:
            self._rest -= 1
            return Draft(root_only(), context.root)
        began = _now()
        times = self._times()
        tokens, room = context.tokens.cpu().numpy(), min(_DEEPEST, context.room - 1)
        if self._state is None:
            foresee = None if self._states is None else self._states.foresight(self.drafter.k)
            tree = self._recycler.draft_one(self._text, tokens, room, times, foresee)
            chances = tree.chances[tree.parents, tree.ranks]
        else:
            how = self._state, self.drafter.habits, times
            tree, chances = self._recycler.draft_within(self._text, tokens, room, *how)
        nodes = self._believed(tree.values, times)
        self._values = tree.values[:nodes].copy()
        shape, order = Tree.of_grown(tree.parents[:nodes].tolist(), tree.ranks[:nodes].tolist())
        confidence = chances[order]
        confidence[0] = 1
        draft = Draft(shape, torch.from_numpy(tree.tokens[order]), confidence=confidence)
        self._spent = _now() - began
        return draft

    def _times(self) -> np.ndarray:
        """What steps over 1, 2, ... nodes take, in passes; none where every node is wanted."""
        if self._costs is None:
            return NO_COSTS
        passes, work = self._costs.by_nodes, self._work
        return passes + work.step + work.node * np.arange(len(passes))

    def _believed(self, values: np.ndarray, times: np.ndarray) -> int:
        """How many of the nodes that have grown (n,) pay by what has come of such forecasts before."""
        if self._costs is None:
            return len(values)
        gains = self._costs.trust(self._work) * values[1:]
        return 1 + paying_nodes(tokens_by_size(gains), times[: len(values)])

    def observe(self, step: Step) -> None:
        self._learn_from(step)
        if self._states is not None:
            self._states.observe(step)

    def statistics(self) -> Mapping[str, float]:
        return {} if self._states is None else self._states.statistics()

    def _learn_from(self, step: Step) -> None:
        values, self._values = self._values, self._values[:0]
        if not len(values):
            self._recycler.observe(self._text, step.tokens, step.finished)
            return
        began = _now()
        self._recycler.observe(self._text, step.tokens, step.finished)
        # Nodes that other drafters proposed are as good to learn from.
        tree, tokens = step.draft.tree, step.draft.tokens.cpu().numpy()
        ngrams = self._recycler.ngrams(self._text, np.array(tree.parents), tokens)
        chosen = np.full(len(tree), ABSENT, np.int64)
        chosen[step.accepted] = step.tokens
        learnable = np.arange(len(tree))[step.learnable]
        # A row that was right stays as it is.
        teaching = learnable[~self._recycler.matrix.foresees(ngrams[learnable], chosen[learnable])]
        if self._state is None:
            self._learn(ngrams[teaching], *step.top(self.drafter.k, teaching), chosen[teaching])
        else:
            self._learn_within(self._state, step, teaching, ngrams, chosen)
        if self._costs is not None:
            self._reckon(step, values, self._costs, self._spent + _now() - began)

    def _learn_within(
        self, root: State, step: Step, teaching: np.ndarray, ngrams: np.ndarray, chosen: np.ndarray
    ) -> None:
        """Learn what the target takes of what the grammar allows: the rest of its candidates are never text."""
        states = states_of(root, step.draft.tree.parents, step.draft.tokens.tolist())
        self.drafter.habits.learn_path([states[node] for node in step.accepted], step.tokens)
        choices = {
            node: state for node in teaching.tolist() if (state := states[node]) is not None and not state.single
        }
        if choices:
            nodes = np.array([*choices])
            self._learn(ngrams[nodes], *top_allowed(step, choices, self.drafter.k), chosen[nodes])

    def _learn(self, ngrams: np.ndarray, ids: np.ndarray, probabilities: np.ndarray, chosen: np.ndarray) -> None:
        options = self.drafter
        how = {"chosen": chosen, "remembers": options.remembers, "favours": options.favours}
        self._recycler.learn(ngrams, ids, probabilities, **how)

    def _reckon(self, step: Step, values: np.ndarray, costs: Costs, seconds: float) -> None:
        """Counts what the step gave and took, `seconds` of it here."""
        verified, work = len(step.draft.tree), self._work
        work.count(verified, costs.in_passes(seconds))
        taken = costs.of(costs.nodes) + work.of(verified)
        self._rest = costs.rest(work, len(step.tokens), taken, own=work.of(1), foreseen=float(values.sum()))


@cache
def warm_up(device: torch.device, remembers: bool, favours: bool) -> None:
    """Compiles what drafting for a target on `device` takes, where rows remember or favour."""
    compile_drafting(np.int64, remembers=remembers / 2, favours=favours / 2)
    top_candidates(torch.zeros(2, 2, device=device), 1)
    NgramMatrix(2, 1, 1).foresees(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))


def _now() -> float:
    """Seconds; those of compiling do not pass."""
    return time.perf_counter() - compiling.seconds
