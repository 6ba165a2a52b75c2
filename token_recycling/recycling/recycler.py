"""What the adapters of engines share: one matrix for all requests of a replica, and what belongs to one request.

What may follow is kept and grown by the same compiled functions as in the drafter `recycling` (`candidates`). Nothing
here imports transformers or an engine. What is learned follows from tokens and logits, never from clocks or random
numbers, so that the ranks of a tensor-parallel engine learn the same.

Cost per step: what the target says is compared with the matrix at all positions, and a top-k taken where it is new.
Drafts are grown for one request after the other here, some microseconds a node; `batches` grows all at once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from .._util.topk import top_candidates
from ..costs.budget import NO_COSTS
from ..trees.templates import chain
from .best_first import CHILDREN, GrowingTree, Limits, TemplateArrays, count_chosen, fill, grow
from .ngram_matrix import NgramMatrix
from .ngrams import last_ngram, ngrams_below
from .occurrences import LONGEST, Occurrences, Recorder

logger = logging.getLogger("token_recycling")

_OURS = "token_recycling"


@dataclass(frozen=True)
class Options:
    """What a user may set, in the engine's own configuration."""

    k: int = 8
    """Candidates kept after every context."""
    orders: int = 3
    """Most tokens of a context, 1 to 4; 1 is the adjacency matrix of the paper."""
    memory: float = 64.0
    """Megabytes for contexts of two tokens and more."""
    past: int = 1_048_576
    """How many tokens of earlier outputs are kept, the newest: drafted is what followed there too; up to 20 MB. The end
    of each one's prompt is kept with it, by which it is found, and never drafted.
    """
    suffix: bool = True
    """Draft what followed where the last tokens stood in the request's own text before."""
    token_cost: float = 0.02
    """What one more token in a pass costs, as a share of a pass over one token; chains end where they do not pay. vLLM
    begins with it and learns what its own passes take. At 0 every chain is as long as the engine allows. Not for trees,
    whose size is the engine's.
    """
    learns: bool = True
    """Learn from all requests. If not, the matrix stays as it was loaded and no request leaves a trace in it."""
    matrix: str = ""
    """File of the matrix: loaded at the start if it is there, saved at intervals and at the end."""
    save_seconds: float = 30.0
    """Time between two saves."""

    def __post_init__(self) -> None:
        if not 0 <= self.token_cost < 1:
            raise ValueError(f"expected token_cost from 0 to less than 1, got {self.token_cost}")
        if self.save_seconds <= 0:
            raise ValueError(f"expected save_seconds above 0, got {self.save_seconds}")

    @classmethod
    def parse(cls, given: object) -> Options:
        """Options from a mapping of names to values, as an engine's configuration has them; raises ValueError."""
        if not isinstance(given, Mapping):
            raise ValueError(f"expected the options of token_recycling as an object of names and values, got {given!r}")
        hints = get_type_hints(cls)
        unknown = sorted(map(str, given.keys() - hints.keys()))
        if unknown:
            raise ValueError(f"expected options of {', '.join(hints)}; got {', '.join(unknown)}")
        for name, value in given.items():
            wanted = (int, float) if hints[name] is float else hints[name]
            if not isinstance(value, wanted) or (isinstance(value, bool) and hints[name] is not bool):
                raise ValueError(f"expected {name} of type {hints[name].__name__}, got {value!r}")
        return cls(**given)


class RequestState:
    """What belongs to one request: where its tokens stood before, and the draft that grows."""

    def __init__(self, nodes: int, options: Options, matrix: NgramMatrix) -> None:
        self.text = Occurrences()
        self.growing = GrowingTree.empty(nodes + 1, options.orders, options.k)
        self.length = 0
        """Number of tokens of the text that were read."""
        self.nodes = 0
        """Nodes of the draft, the root included, whether or not the engine verified all of them."""
        self._options, self._matrix, self._last = options, matrix, -1
        self._recorder = Recorder(matrix.past)

    @property
    def ngrams(self) -> np.ndarray:
        """(nodes, orders) int64: the n-gram at each node of the draft."""
        growing = self.growing
        root = growing.recent[: self._options.orders]
        return ngrams_below(root, growing.parents[: self.nodes], growing.tokens[: self.nodes])

    def read(self, tokens: np.ndarray, ends: bool = False) -> None:
        """Reads what is new of the text (length,); one that is not a continuation is read anew. `ends`: it is whole.

        What followed since the draft was grown teaches which kinds of candidates were right, along its nodes as far as
        they are now part of the text, and belongs to the past of the requests to come.
        """
        if not 0 < self.length <= len(tokens) or tokens[self.length - 1] != self._last:
            self.text, self.length, self._recorder = Occurrences(), 0, Recorder(self._matrix.past, tokens)
        elif self._options.learns:
            written = tokens[self.length :].astype(np.int64)
            if self.nodes:
                count_chosen(self.growing, self.nodes, written, self._matrix.calibration)
            self._recorder.add(written.tolist(), ends)
        if self._options.suffix:
            self.text.extend(tokens[self.length :])
        self.length, self._last = len(tokens), int(tokens[-1])


class Recycler:
    """Drafts for the requests of one replica and learns from what the engine verified."""

    def __init__(self, vocab_size: int, nodes: int, options: Options, tokenizer: str = "", saves: bool = True) -> None:
        """`nodes`: most drafted tokens of a request. `tokenizer`: the fingerprint of the tokenizer, for the file.
        `saves`: whether this process writes the file; one of a replica does. Raises ValueError, and MatrixFileError for
        a file that is damaged or of another model or other options.
        """
        self.options, self.nodes = options, nodes
        self.matrix = NgramMatrix(vocab_size, options.k, options.orders, options.memory, options.past)
        self._tokenizer = tokenizer
        self._path = Path(options.matrix) if options.matrix else None
        self._saves = saves and options.learns and self._path is not None
        self._changed, self._saved = False, time.monotonic()
        self._chain = TemplateArrays.of(chain(nodes))
        if self._path is not None and self._path.exists():
            self.matrix.load(self._path, tokenizer)
            logger.info("loaded %s from %s", self.matrix, self._path)
        elif self._path is not None and not options.learns:
            raise ValueError(
                f"expected a matrix file at {self._path}, since learns is false, got none; let one be learned"
            )

    def new_state(self) -> RequestState:
        """State for a new request."""
        return RequestState(self.nodes, self.options, self.matrix)

    def state_of(self, record: Any) -> RequestState:
        """The state of a request, kept on the engine's own record of it, with which it goes."""
        if not hasattr(record, _OURS):
            setattr(record, _OURS, self.new_state())
        return getattr(record, _OURS)

    def learn(self, ngrams: np.ndarray, logits: torch.Tensor) -> None:
        """Learns from the target's logits (n, vocabulary) after n n-grams (n, orders), the newest token first."""
        if not self.options.learns or not len(ngrams):
            return
        rows = None
        if logits.device.type == "cpu":  # elsewhere all are copied at once sooner than some are chosen
            logits = logits.float()
            rows = self.matrix.surprised_by(ngrams, logits.numpy())
            ngrams = ngrams[rows]
        if len(ngrams):
            self.matrix.learn(ngrams, *top_candidates(logits, self.options.k, rows))
            self._changed = True

    def chain(self, state: RequestState, tokens: np.ndarray, depth: int) -> int:
        """Reads a text (length,) and grows its likeliest continuation; returns the drafted tokens, `depth` at most.

        They are `state.growing.tokens` from 1, their probabilities of being accepted `state.growing.values` from 1.
        """
        state.read(tokens)
        recent, sources = last_ngram(tokens, LONGEST), self.matrix.sources(state.text)
        state.nodes = fill(state.growing, recent, sources, self._chain, min(depth, self.nodes))
        return state.nodes - 1

    def tree(self, state: RequestState, tokens: np.ndarray, depth: int) -> int:
        """Reads a text (length,) and grows its likeliest continuations into a tree in `state.growing`; returns its
        nodes, the root included.
        """
        state.read(tokens)
        recent, sources = last_ngram(tokens, LONGEST), self.matrix.sources(state.text)
        state.nodes = grow(state.growing, recent, sources, Limits(NO_COSTS, self.nodes, depth))
        return state.nodes

    def save(self) -> None:
        """Writes the matrix to its file if this process does that and something was learned since the last time.

        A disk that refuses must not end the service: it is logged, and tried again after the interval.
        """
        if not self._saves or not self._changed:
            return
        assert self._path is not None
        self._saved = time.monotonic()
        try:
            self.matrix.save(self._path, self._tokenizer)
            self._changed = False
        except OSError:
            logger.exception("the matrix could not be saved in %s", self._path)

    def save_if_due(self) -> None:
        """Saves where the interval is over."""
        if time.monotonic() - self._saved >= self.options.save_seconds:
            self.save()

    def small(self) -> Recycler:
        """Another with the same compiled functions, to have them compiled: of few tokens and little memory."""
        options = dataclasses.replace(self.options, matrix="", learns=True, memory=0.01, past=LONGEST)
        return Recycler(max(self.options.k, CHILDREN), self.nodes, options)

    def warm_up(self) -> None:
        """Compiles what a step needs, on a small matrix, so that no request waits for it."""
        small = self.small()
        state, tokens = small.new_state(), np.array([0, 1, 0], np.int32)
        for grown in (small.tree, small.chain, small.chain):
            grown(state, tokens, 1)
            tokens = np.append(tokens, np.int32(1))
        Recorder(small.matrix.past).add([0] * LONGEST, ends=True)
        small.learn(state.ngrams, torch.rand(state.nodes, small.matrix.vocab_size))
