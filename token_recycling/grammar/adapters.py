"""Recognises logits processors that hold a sequence to a grammar, so that drafts keep to it too.

Known are those of `constrain` and the server (`GrammarProcessor`); xgrammar's own (Dong et al., 2411.15100); those of
outlines, with whatever library it asks: xgrammar, llguidance or outlines-core; the function of lm-format-enforcer; and
any that says so itself (`Matching`). They choose the tokens as they do in `generate`, each called once a token. Drafts
follow a copy of their matcher (`state.State`). Any other processor is called as before, and drafts know nothing of it.
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
"""Processor seconds of a mask from which on a grammar is no longer followed: repeats within repeats take seconds."""
_MOST_FORCED = 256
"""Bytes of what must follow that are found; each costs some microseconds."""


@dataclass
class _Watch:
    """Whether a mask of this sequence was slow: a draft asks for one at every node, the processor for one a token."""

    timed: bool = True
    """Whether masks are timed; else none is slow."""
    slow: bool = False


class _FirstBytes:
    """The tokens of xgrammar's vocabulary by the byte that they begin with."""

    def __init__(self, vocabulary: Sequence[bytes], words: int) -> None:
        self.words = words
        first = [token[0] if token else -1 for token in vocabulary]
        self._first = np.pad(np.array(first, np.int16), (0, 32 * words - len(first)), constant_values=-1)
        self._others: dict[int, np.ndarray] = {}
        """Masks of the tokens that begin with another byte."""

    def only(self, mask: np.ndarray) -> int | None:
        """Return the byte that all tokens of a mask begin with; None if there is none."""
        (used,) = mask.nonzero()
        if not len(used):
            return None
        bits = int(mask[used[0]]) & 0xFFFFFFFF
        byte = int(self._first[32 * used[0] + (bits & -bits).bit_length() - 1])
        if byte not in self._others:
            self._others[byte] = packed(self._first != byte)
        return None if byte < 0 or (mask & self._others[byte]).any() else byte


_first_bytes: dict[str, _FirstBytes] = {}
"""By the metadata of a tokenizer: to list a vocabulary takes a microsecond a token. Where two have equal metadata the
worst is a string that ends early, since the matcher checks every byte.
"""


def _first_bytes_of(tokenizer_info: Any) -> _FirstBytes:
    about = tokenizer_info.dump_metadata()
    if about not in _first_bytes:
        _first_bytes[about] = _FirstBytes(tokenizer_info.decoded_vocab, words_of(tokenizer_info.vocab_size))
    return _first_bytes[about]


@dataclass(frozen=True)
class _Xgrammar:
    """A place of xgrammar's matcher."""

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
        """Limited: a grammar may force a text without end, such as a schema with a required property of its own kind,
        on which xgrammar's `find_jump_forward_string` fills all memory.
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
    """One matcher of llguidance that goes from place to place: forward or back by a token takes half a microsecond,
    where a copy takes time that grows with the output.
    """

    def __init__(self, pristine: Any, stops: Sequence[int]) -> None:
        """`stops`: the tokens that end a sequence."""
        self._pristine, self.matcher, self.stops = pristine, pristine.deep_copy(), frozenset(stops)
        self.place = _Llguidance(self, None, 0, 0)

    def go(self, place: _Llguidance) -> bool:
        """Go to a place; return whether the matcher is alive there."""
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
        """Go to a place from the beginning: the grammar cannot go back, or is too complex where the matcher was."""
        tokens = list[int]()
        while place.parent is not None:
            tokens.append(place.token)
            place = place.parent
        self.matcher = self._pristine.deep_copy()
        self.matcher.consume_tokens(tokens[::-1])


@dataclass(frozen=True, eq=False, slots=True)
class _Llguidance:
    """A place of llguidance's matcher; places share one matcher."""

    shared: _SharedMatcher
    parent: _Llguidance | None
    token: int
    """The token that led here from the parent."""
    depth: int

    def fill(self, mask: np.ndarray) -> None:
        if self.shared.go(self):
            self.shared.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.shared.matcher.is_error():
            mask[:] = 0

    def after(self, token: int) -> _Llguidance | None:
        # llguidance 1.9.1 cannot go back over the end of a sequence: it loses its place.
        if token in self.shared.stops or not self.shared.go(self) or not self.shared.matcher.consume_token(token):
            return None
        self.shared.place = _Llguidance(self.shared, self, token, self.depth + 1)
        return self.shared.place

    @property
    def forced(self) -> str:
        return self.shared.matcher.compute_ff_bytes().decode(errors="ignore") if self.shared.go(self) else ""


@dataclass(frozen=True)
class _Listed:
    """A place of a library that lists the tokens which may follow; it does not say what is forced."""

    allowed: Callable[[Any], Sequence[int]]
    next_place: Callable[[Any, int], Any]
    """The place after a token, None where there is none."""
    place: Any
    forced = ""

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = mask_of(self.allowed(self.place), len(mask))

    def after(self, token: int) -> _Listed | None:
        place = self.next_place(self.place, token)
        return None if place is None else _Listed(self.allowed, self.next_place, place)


@runtime_checkable
class Matching(Protocol):
    """A logits processor of any library that says what it will allow."""

    def first_state(self) -> State | None:
        """Its state at the beginning of a sequence; None if it was used."""


class GrammarProcessor(LogitsProcessor):
    """Holds one sequence to a grammar that llguidance has compiled; make a new one for every sequence.

    Its matcher only goes forward, whatever was drafted: where masks were computed before it went back, llguidance 1.9.1
    may allow other tokens.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.pristine.deep_copy()
        self._read: int | None = None
        """Tokens of the sequence that it has seen; None before it is called."""
        self._ended, self._follows = False, True
        """Whether the sequence has ended, and whether the matcher has taken all of it."""

    def first_state(self) -> State | None:
        """Drafts have a matcher of their own, which goes forward and back."""
        return state_of_grammar(self._grammar) if self._read is None else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(input_ids) > 1:
            raise ValueError(f"a processor of constrain() serves one sequence, got {len(input_ids)}; make one for each")
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
        """Return the mask of the next token; where none may follow, of those that end the sequence."""
        mask = np.zeros(self._grammar.words, np.int32)
        if self._follows:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if mask.any() and not self._matcher.is_error():
                return mask
        self.dead_end()
        return mask_of(self._grammar.stops, self._grammar.words)

    def dead_end(self) -> None:
        """Called where no token may follow, or the grammar is too complex to tell; then the sequence ends."""


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
    cache: dict[int, Sequence[int]] = {}  # the same few places come again and again

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
    """How processors of a library are read."""

    unused: Callable[[Any], bool]
    matcher: Callable[[Any], tuple[Matcher, int]]
    """Its matcher at the beginning, and how many tokens it knows."""


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
"""By name, so that no library is imported for it; a subclass may do something else."""
_ENFORCER = "lmformatenforcer.integrations.transformers.TransformersPrefixAllowedTokensFn"


def _name(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def for_sequence(processor: LogitsProcessor, row: int) -> LogitsProcessor | None:
    """The same for one sequence of a batch alone, if it is of a known library and unused; None if not."""
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
    """What the first recognised one of `processors` allows after a prompt; None if there is none that is unused, or it
    cannot be followed.

    `padded` (1, columns) int64 is what the processors are shown of the prompt. `timed`: whether a clock may decide that
    a grammar is too slow to be followed.
    """
    for processor in processors:
        with lost_drafts():
            state = _state_of(processor, padded, timed)
            if state is not None:
                return state
    return None


def prefix_parts(processor: PrefixConstrainedLogitsProcessor) -> tuple[Any, int]:
    """Return what a processor was given: the function that it calls, and how many sequences a prompt has."""
    parts = vars(processor).values()
    return next(filter(callable, parts)), next(part for part in parts if isinstance(part, int))


def _state_of(processor: LogitsProcessor, padded: torch.Tensor, timed: bool) -> State | None:
    """Return what a recognised processor allows at the beginning."""
    if isinstance(processor, Matching):
        state = processor.first_state()
        return state if isinstance(state, State) else None  # a method of this name may mean something else
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
