"""Recognizes logits processors that constrain a sequence to a grammar, so that drafts can follow the grammar too.

Recognized are the processors of `constrain` and the server (`GrammarProcessor`), of xgrammar (Dong et al., 2411.15100),
and of outlines with any of its backends (xgrammar, llguidance, outlines-core); the function of lm-format-enforcer; and
any processor with the protocol `Matching`. The processors constrain the output as in `generate`, called once per token.
Drafts follow a copy of their matcher (`state.State`). Other processors are called as usual, and drafts ignore them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from .masks import mask_of, packed, unpacked, words_of
from .state import Matcher, State, lost_drafts

if TYPE_CHECKING:
    from .compile import Grammar

_SLOW = 0.02
"""Processor seconds per mask above which drafts stop following a grammar: nested repetitions take seconds."""
_MOST_FORCED = 256
"""Maximum bytes of a forced string; each costs a few microseconds."""


@dataclass
class _Watch:
    """Records whether a mask of this sequence was slow: a draft needs a mask per node, the processor one per token."""

    timed: bool = True
    """Whether masks are timed; if not, no mask counts as slow."""
    slow: bool = False


class _FirstBytes:
    """The tokens of xgrammar's vocabulary by first byte."""

    def __init__(self, vocabulary: Sequence[bytes], words: int) -> None:
        self.words = words
        first = [token[0] if token else -1 for token in vocabulary]
        self._first = np.pad(np.array(first, np.int16), (0, 32 * words - len(first)), constant_values=-1)
        self._others: dict[int, np.ndarray] = {}
        """For a byte, the mask of the tokens that do not begin with it."""

    def only(self, mask: np.ndarray) -> int | None:
        """Return the first byte that all tokens of a mask share, or None."""
        (used,) = mask.nonzero()
        if not len(used):
            return None
        bits = int(mask[used[0]]) & 0xFFFFFFFF
        byte = int(self._first[32 * used[0] + (bits & -bits).bit_length() - 1])
        if byte not in self._others:
            self._others[byte] = packed(self._first != byte)
        return None if byte < 0 or (mask & self._others[byte]).any() else byte


_first_bytes: dict[str, _FirstBytes] = {}
"""Cached by tokenizer metadata, since listing a vocabulary takes a microsecond per token. If two tokenizers have equal
metadata, a forced string may at worst end early, since the matcher checks every byte.
"""


def _first_bytes_of(tokenizer_info: Any) -> _FirstBytes:
    about = tokenizer_info.dump_metadata()
    if about not in _first_bytes:
        _first_bytes[about] = _FirstBytes(tokenizer_info.decoded_vocab, words_of(tokenizer_info.vocab_size))
    return _first_bytes[about]


@dataclass(frozen=True)
class _Xgrammar:
    """A state of xgrammar's matcher."""

    matcher: Any
    first_bytes: _FirstBytes
    watch: _Watch = field(default_factory=_Watch)

    def fill(self, mask: np.ndarray) -> None:
        began = time.thread_time()
        self.matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])
        self.watch.slow |= self.watch.timed and time.thread_time() - began > _SLOW

    def after(self, token: int) -> _Xgrammar | None:
        if self.watch.slow:
            return None
        forked = self.matcher.fork()
        if not forked.accept_token(token) or forked.is_terminated():
            return None
        return _Xgrammar(forked, self.first_bytes, self.watch)

    @property
    def forced(self) -> str:
        """The forced string, limited to `_MOST_FORCED` bytes. A grammar may force an endless text, such as a schema
        that requires a property of the same schema, for which xgrammar's `find_jump_forward_string` fills all memory.
        """
        here, text = _Xgrammar(self.matcher.fork(), self.first_bytes, self.watch), bytearray()
        mask = np.zeros(self.first_bytes.words, np.int32)
        while len(text) < _MOST_FORCED and not self.watch.slow and not here.matcher.is_terminated():
            here.fill(mask)
            byte = self.first_bytes.only(mask)
            if byte is None or not here.matcher.accept_string(bytes([byte])):
                break
            text.append(byte)
        return text.decode(errors="ignore")


class _SharedMatcher:
    """One llguidance matcher that moves between states: a move by one token takes half a microsecond, while the cost of
    a copy grows with the output.
    """

    def __init__(self, pristine: Any, stops: Sequence[int]) -> None:
        """`stops`: the tokens that end a sequence."""
        self._pristine, self.matcher, self.stops = pristine, pristine.deep_copy(), frozenset(stops)
        self.place = _Llguidance(self, None, 0, 0)

    def go(self, place: _Llguidance) -> bool:
        """Move to a state; return whether the matcher accepts the path to it."""
        here, there, back, ahead = self.place, place, 0, list[int]()
        while here is not there:
            if here.depth >= there.depth and here.parent is not None:
                here, back = here.parent, back + 1
            else:
                assert there.parent is not None
                ahead.append(there.token)
                there = there.parent
        if self.matcher.is_error() or (back and not self.matcher.rollback(back)):
            self._restart(here)
        self.place = place
        return not ahead or self.matcher.consume_tokens(ahead[::-1])

    def _restart(self, place: _Llguidance) -> None:
        """Move to a state from the initial state, because the matcher cannot roll back or has exceeded its limits."""
        tokens = list[int]()
        while place.parent is not None:
            tokens.append(place.token)
            place = place.parent
        self.matcher = self._pristine.deep_copy()
        self.matcher.consume_tokens(tokens[::-1])


@dataclass(frozen=True, eq=False, slots=True)
class _Llguidance:
    """A state of llguidance's matcher; all states share one matcher."""

    shared: _SharedMatcher
    parent: _Llguidance | None
    token: int
    """The token that leads from the parent to this state."""
    depth: int

    def fill(self, mask: np.ndarray) -> None:
        if self.shared.go(self):
            self.shared.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.shared.matcher.is_error():
            mask[:] = 0

    def after(self, token: int) -> _Llguidance | None:
        # llguidance 1.9.1 cannot roll back over the end of a sequence: its state is corrupted.
        if token in self.shared.stops or not self.shared.go(self) or not self.shared.matcher.consume_token(token):
            return None
        self.shared.place = _Llguidance(self.shared, self, token, self.depth + 1)
        return self.shared.place

    @property
    def forced(self) -> str:
        return self.shared.matcher.compute_ff_bytes().decode(errors="ignore") if self.shared.go(self) else ""


@dataclass(frozen=True)
class _Listed:
    """A state of a library that lists the allowed tokens, without forced strings."""

    allowed: Callable[[Any], Sequence[int]]
    next_place: Callable[[Any, int], Any]
    """Returns the state after a token, or None."""
    place: Any
    forced = ""

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = mask_of(self.allowed(self.place), len(mask))

    def after(self, token: int) -> _Listed | None:
        place = self.next_place(self.place, token)
        return None if place is None else _Listed(self.allowed, self.next_place, place)


@runtime_checkable
class Matching(Protocol):
    """A logits processor of any library that exposes its grammar state."""

    def first_state(self) -> State | None:
        """Return the state at the beginning of a sequence; None if the processor has been used."""


class GrammarProcessor(LogitsProcessor):
    """Constrains one sequence to a grammar compiled by llguidance; create one per sequence.

    Its matcher is independent of drafts and only moves forward: after masks and a rollback, llguidance 1.9.1 may allow
    other tokens.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.pristine.deep_copy()
        self._read: int | None = None
        """Number of tokens read; None before the first call."""
        self._ended, self._follows = False, True
        """Whether the sequence has ended, and whether the matcher has accepted all of it."""

    def first_state(self) -> State | None:
        """Return the initial state, with a separate matcher for drafts; None if the processor has been used."""
        return state_of_grammar(self._grammar) if self._read is None else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(input_ids) > 1:
            raise ValueError(f"a processor of constrain() serves one sequence, got {len(input_ids)}; use one for each")
        new = [] if self._read is None else input_ids[0, self._read :].tolist()
        for token in new:
            self._ended |= token in self._grammar.stops
            self._follows = self._follows and not self._ended and self._matcher.consume_token(token)
        self._read = input_ids.shape[1]
        if self._ended:
            return scores
        allowed = torch.from_numpy(unpacked(self._mask(), scores.shape[1])).to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _mask(self) -> np.ndarray:
        """Return the mask of the next token; the end tokens, if no other token may follow."""
        mask = np.zeros(self._grammar.words, np.int32)
        if self._follows:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if mask.any() and not self._matcher.is_error():
                return mask
        self.dead_end()
        return mask_of(self._grammar.stops, self._grammar.words)

    def dead_end(self) -> None:
        """Handle a state where no token may follow, or the grammar is too complex to tell. The sequence ends."""


def state_of_grammar(grammar: Grammar) -> State:
    """Return the state at the beginning of an output."""
    return State(_SharedMatcher(grammar.pristine, grammar.stops).place, grammar.words)


def _of_xgrammar(compiled: Any) -> tuple[Matcher, int]:
    import xgrammar

    info = compiled.tokenizer_info
    return _Xgrammar(xgrammar.GrammarMatcher(compiled), _first_bytes_of(info)), info.vocab_size


def _of_llguidance(processor: Any) -> tuple[Matcher, int]:
    from llguidance import LLMatcher

    tokenizer = processor.llg_tokenizer
    matcher = LLMatcher(tokenizer, processor.grammar)
    return _SharedMatcher(matcher, tokenizer.eos_tokens).place, tokenizer.vocab_size


def _of_outlines_core(index: Any) -> tuple[Matcher, int]:
    cache: dict[int, Sequence[int]] = {}  # a few states recur

    def allowed(place: int) -> Sequence[int]:
        if place not in cache:
            cache[place] = [*index.get_allowed_tokens(place)]
        return cache[place]

    most = max(max(tokens) for tokens in index.get_transitions().values())
    return _Listed(allowed, index.get_next_state, index.get_initial_state()), most + 1


def _of_enforcer(enforcer: Any, sequence: Sequence[int]) -> tuple[Matcher, int]:
    return _Listed(
        lambda tokens: enforcer.get_allowed_tokens(tokens).allowed_tokens,
        lambda tokens, token: [*tokens, token],
        [*sequence],
    ), enforcer.vocab_size


class _Library(NamedTuple):
    """Access to the processors of a library."""

    unused: Callable[[Any], bool]
    matcher: Callable[[Any], tuple[Matcher, int]]
    """Returns the initial matcher and the vocabulary size of its masks."""


_LIBRARIES = {
    "xgrammar.contrib.hf.LogitsProcessor": _Library(
        lambda processor: not processor.matchers, lambda processor: _of_xgrammar(processor.compiled_grammars[0])
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _Library(
        lambda processor: processor.is_first_token, lambda processor: _of_xgrammar(processor.compiled_grammar)
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _Library(
        lambda processor: processor.is_first_token, _of_llguidance
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _Library(
        lambda processor: processor.is_first_token, lambda processor: _of_outlines_core(processor.index)
    ),
}
"""By class name, so that no library is imported; subclasses are excluded, since they may behave differently."""
_ENFORCER = "lmformatenforcer.integrations.transformers.TransformersPrefixAllowedTokensFn"


def _name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def for_sequence(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """Return an equal processor for one sequence of a batch; None for a used processor or an unknown library."""
    library = _LIBRARIES.get(_name(processor))
    if library is None:
        return None
    with lost_drafts():
        if not library.unused(processor):
            return None
        if (grammars := getattr(processor, "compiled_grammars", None)) is not None:
            return type(processor)(grammars[row if len(grammars) > 1 else 0])
        return copy.copy(processor)
    return None


def state_of(processors: Sequence[LogitsProcessor], padded: torch.Tensor, timed: bool = True) -> State | None:
    """Return the state of the first recognized and unused processor after a prompt; None without one, or if it fails.

    `padded` (1, columns) int64 is the prompt as the processors see it. `timed`: whether drafts stop following a grammar
    that is measured to be slow.
    """
    for processor in processors:
        with lost_drafts():
            state = _state_of(processor, padded, timed)
            if state is not None:
                return state
    return None


def prefix_parts(processor: PrefixConstrainedLogitsProcessor) -> tuple[Any, int]:
    """Return the arguments of a processor: the function that it calls, and the number of sequences per prompt."""
    parts = vars(processor).values()
    return next(filter(callable, parts)), next(part for part in parts if isinstance(part, int))


def _state_of(processor: LogitsProcessor, padded: torch.Tensor, timed: bool) -> State | None:
    """Return the initial state of a processor; None if the processor is used or not recognized."""
    if isinstance(processor, Matching):
        state = processor.first_state()
        return state if isinstance(state, State) else None  # another class may use this method name differently
    library, beginning = _LIBRARIES.get(_name(processor)), None
    if library is not None and library.unused(processor):
        beginning = library.matcher(processor)
    elif type(processor) is PrefixConstrainedLogitsProcessor:
        function, _ = prefix_parts(processor)
        if _name(function) == _ENFORCER:
            beginning = _of_enforcer(function.token_enforcer, padded[0].tolist())
    if beginning is None:
        return None
    matcher, tokens = beginning
    if isinstance(matcher, _Xgrammar):
        matcher.watch.timed = timed
    return State(matcher, words_of(tokens))
