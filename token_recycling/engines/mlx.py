"""Token Recycling with mlx-lm: its `generate` and `stream_generate`, with the same arguments and responses.

    from mlx_lm import load
    from token_recycling.engines.mlx import generate, stream_generate

    model, tokenizer = load("mlx-community/Qwen3-4B-4bit")
    text = generate(model, tokenizer, "import os", max_tokens=200)

The output equals mlx-lm's: its own loop runs, on a model that reads drafted tokens in the same pass (Luo et al.,
2408.08696, with the methods of `recycling`). mlx-lm passes the newly sampled token to a model and expects the logits
after it. Where that pays, `Drafting` reads a drafted continuation in the same forward pass. As long as the next sampled
tokens equal the drafted ones, their logits are available already; otherwise the rest is rolled back (`Before`).
Samplers, processors and random numbers stay mlx-lm's. It verifies no trees: drafts are chains. The learned state of a
model is kept as long as the model.

mlx-lm starts a forward pass before the token that it reads is known. A draft follows a known token, and gives up this
lead. So there are two decisions: whether to wait for the token, then how much to draft after it. Both use the cost of
forward passes, including the lead, which is learned from each pass.

Keys and values are rolled back by trimming, as in mlx-lm; those of a rotating cache, which a forward pass over several
tokens leaves in order, are cut at the end. Recurrent layers (`ArraysCache`) are restored to their earlier state, and
the accepted tokens are read again: mlx-lm replaces such states and never writes into them, so keeping them requires no
copy.

Cost per step: a top-k over the logits and some ten microseconds; without a draft this overlaps with the device.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from .._util.extras import lacking

if missing := lacking("mlx", "mlx", "mlx_lm"):
    raise ModuleNotFoundError(f"the adapter of mlx-lm {missing}")

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationResponse, generation_stream
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import does_model_support_input_embeddings

from .._util.compiled import compiling
from ..recycling.matrix_file import fingerprint
from ..recycling.ngrams import ngrams_at
from ..recycling.recycler import Recycler
from ..recycling.sizes import check_vocabulary
from .engine import EngineOptions, Replica, StepCosts, TokenBuffer, check_version

__all__ = ["TokenRecycling", "generate", "stream_generate"]

logger = logging.getLogger("token_recycling")

LOWEST, BEYOND = (0, 32), (0, 33)
"""mlx-lm versions from the first to before the second have this interface."""
_LONGEST = 32
"""Maximum number of tokens in a pass: a token and its draft."""
_PASS = 0.01
"""Prior seconds of a pass over one token."""
_NOTHING = np.empty(0, np.int32)
_TRIMMED = (KVCache, QuantizedKVCache, ChunkedKVCache)
_kept: dict[int, TokenRecycling] = {}
"""By the model's id: mlx's models are not hashable."""


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    draft_model: TokenRecycling | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """`mlx_lm.stream_generate` in fewer passes: the same arguments and responses. `draft_model` drafts and keeps its
    learned state; by default one per model. `num_draft_tokens`: the longest draft, at most 31. Raises ValueError.
    """
    longest = kwargs.pop("num_draft_tokens", TokenRecycling.most)
    _check(model, draft_model, longest, kwargs)
    drafter = _kept_with(model) if draft_model is None else draft_model
    drafter.attach(model, tokenizer)
    cache = kwargs.pop("prompt_cache", None)
    if cache is None:
        cache = make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    unknown = unknown_layers(cache)
    if unknown:
        _say_once(f"nothing is drafted: rolling back a cache of {', '.join(unknown)} is unsupported")
        yield from plain_stream_generate(
            model, tokenizer, prompt, max_tokens, None, stream, prompt_cache=cache, **kwargs
        )
        return
    quantized_from = None
    if kwargs.get("kv_bits") is not None:
        quantized_from = kwargs.get("quantized_kv_start", DEFAULT_QUANTIZED_KV_START)
    drafting = Drafting(model, cache, drafter, longest, max_tokens, quantized_from)
    progress = kwargs.pop("prompt_progress_callback", None)

    def on_progress(processed: int, total: int) -> None:
        drafting.begin(processed, total)
        if progress is not None:
            progress(processed, total)

    kwargs.update(prompt_cache=cache, prompt_progress_callback=on_progress)
    responses = plain_stream_generate(drafting, tokenizer, prompt, max_tokens, None, stream, **kwargs)
    try:
        for response in responses:
            response.from_draft = drafting.from_draft
            left = time.perf_counter()
            yield response
            drafting.away += time.perf_counter() - left
    finally:
        responses.close()
        with mx.stream(stream):
            drafting.settle()


def generate(model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """`mlx_lm.generate` in fewer passes; `kwargs` as for `stream_generate`. Raises ValueError."""
    shown = functools.partial(print, end="", flush=True) if verbose else lambda text: None
    shown("=" * 10 + "\n")
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        shown(response.text)
        text += response.text
    assert response is not None, "there is always a last response"
    shown(
        f"\n{'=' * 10}\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB\n"
    )
    return text


def _check(model: Any, draft_model: Any, longest: Any, kwargs: dict[str, Any]) -> None:
    if draft_model is not None and not isinstance(draft_model, TokenRecycling):
        raise ValueError(
            f"draft_model must be a TokenRecycling or None, got {type(draft_model).__name__}; "
            "mlx_lm.stream_generate takes a model that drafts"
        )
    if not isinstance(longest, int) or not 1 <= longest <= TokenRecycling.most:
        raise ValueError(f"num_draft_tokens must be from 1 to {TokenRecycling.most}, got {longest!r}")
    if kwargs.get("input_embeddings") is not None and not does_model_support_input_embeddings(model):
        raise ValueError("the model does not support input_embeddings; pass tokens")
    if mx.distributed.init().size() > 1:
        raise ValueError(
            f"drafting in {mx.distributed.init().size()} processes is unsupported: their clocks differ; use "
            "mlx_lm.stream_generate"
        )


def _kept_with(model: Any) -> TokenRecycling:
    if id(model) not in _kept:
        _kept[id(model)] = TokenRecycling()
        weakref.finalize(model, _kept.pop, id(model))
    return _kept[id(model)]


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


class TokenRecycling:
    """Drafts for one model; pass it as `draft_model`. `options` are those of `EngineOptions`; costs of passes are
    learned unless `token_cost` is given. Raises ValueError for a wrong option and RuntimeError for an unsupported
    mlx-lm.
    """

    most = _LONGEST - 1
    """Maximum tokens of a draft."""

    def __init__(self, **options: Any) -> None:
        check_version("mlx-lm", mlx_lm.__version__, LOWEST, BEYOND)
        self.options = EngineOptions.parse(options)
        self.recycler: Replica | None = None
        """Matrix and drafting state; None until the first sequence."""
        self._model: weakref.ref | None = None
        self._learns_costs = "token_cost" not in options
        self.passes = self._new_costs()
        """Costs of the model's forward passes over 1, 2, ... tokens."""
        self._tokenizer = ""
        self._sequences: weakref.WeakKeyDictionary[Any, np.ndarray] = weakref.WeakKeyDictionary()
        """Tokens of a sequence, by a layer of its cache."""

    def attach(self, model: Any, tokenizer: Any) -> None:
        """Attach to this model, as long as the model exists. Raises ValueError if attached to another."""
        attached = self._model and self._model()
        if attached is not None and attached is not model:
            raise ValueError("this TokenRecycling was used with another model; create one per model")
        if attached is None:
            self._model = weakref.ref(model)
            self.passes = self._new_costs()
            self._tokenizer = fingerprint(tokenizer) if self.options.matrix else ""

    def prepare(self, vocab_size: int) -> Replica:
        """Return the replica with its matrix; raises MatrixFileError for a damaged file or one of another tokenizer."""
        if self.recycler is None:
            shape = {"chains": True, "corrected": self._learns_costs}
            self.recycler = Replica(vocab_size, self.most, self.options, self._tokenizer, **shape)
            self.recycler.warm_up(np.int32)
            weakref.finalize(self, self.recycler.save)
        check_vocabulary(self.recycler.matrix.vocab_size, vocab_size)
        return self.recycler

    def sequence_of(self, cache: Sequence[Any]) -> np.ndarray:
        """Return the tokens (n,) int32 in a cache, as far as this object has read or generated them."""
        for layer in _with_lengths(cache):
            text = self._sequences.get(layer, _NOTHING)
            return text[: layer.offset] if len(text) >= layer.offset else _NOTHING
        return _NOTHING

    def keep_text(self, cache: Sequence[Any], text: np.ndarray) -> None:
        """Remember the tokens in a cache, for as long as the cache exists."""
        for layer in _with_lengths(cache):
            self._sequences[layer] = text

    def _new_costs(self) -> StepCosts:
        relative = 1 + self.options.token_cost * np.arange(self.most + 1)
        return StepCosts(_PASS * relative, learns=self._learns_costs)


def _with_lengths(cache: Sequence[Any]) -> Iterator[Any]:
    """Return the layers that record how many tokens they have read."""
    return (layer for layer in layers_of(cache) if hasattr(layer, "offset"))


class Pass(NamedTuple):
    """A forward pass of the model and its outcome."""

    place: int  # of the newest token of the sequence; tokens before it may be read again
    draft: list[int]  # the tokens read after it
    logits: mx.array  # (1, 1 + drafted, vocabulary)
    read: list[int]  # all tokens of the pass, if there is a draft
    before: Before | None  # the cache before the pass, if there is a draft


class Drafting:
    """Wraps a model while one sequence is generated."""

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        drafter: TokenRecycling,
        longest: int,
        max_tokens: int,
        quantized_from: int | None,
    ) -> None:
        """`longest`: maximum draft; `max_tokens`: -1 for no limit; `quantized_from`: cache length that is quantized."""
        self._model, self._cache, self._drafter = model, cache, drafter
        self._longest, self._max_tokens, self._quantized_from = longest, max_tokens, quantized_from
        self.away = 0.0
        """Seconds during which mlx-lm's loop did not run."""
        self.from_draft = False
        """Whether the newest token was drafted."""
        self._prompt_left: int | None = None
        self._text = TokenBuffer(drafter.sequence_of(cache))
        self._recycled: Recycler | None = None
        """The recycler of the sequence, created for the first draft."""
        self._unread: mx.array | None = None
        """The sequence's newest token, if a pass was started before it was known."""
        self._passed: Pass | None = None
        """The newest pass."""
        self._used = 0
        """Number of drafted tokens of the newest pass that were sampled."""
        self._again: list[int] = []
        """Tokens that the next pass must read again."""
        self._unlearned: list[Pass] = []
        self._asked = 0
        """Number of sampled tokens of the output."""
        self._timed, self._since = 0, 0.0
        """Size of the newest forward pass, 0 if its time is not learned, and its start time."""

    def begin(self, processed: int, total: int) -> None:
        """Handle mlx-lm's progress reports on the prompt; the first, before any pass, gives its length `total`."""
        if self._prompt_left is None:
            self._prompt_left = total

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        """Return logits (1, n, vocabulary) after prompt tokens (1, n), or (1, 1, vocabulary) after a sampled token."""
        if self._prompt_left:
            return self._read_prompt(inputs, input_embeddings)
        assert self._passed is not None, "a prompt has a token"
        self._asked += 1
        passed, drawn = self._passed, inputs[0]
        self._read_uncached()
        self.from_draft = self._used < len(passed.draft) and drawn.item() == passed.draft[self._used]
        if self.from_draft:
            self._text.extend([passed.draft[self._used]])
            self._used += 1
            return passed.logits[:, self._used : self._used + 1]
        self._drafter.passes.record_outcome(1, max(1, len(passed.read)), len(passed.draft), self._used)
        # After a draft the token is known: its logits were evaluated already.
        if passed.draft or self._waiting_pays():
            return self._pass_with_draft(drawn)
        return self._pass_ahead(drawn)

    def settle(self) -> None:
        """Leave exactly the sampled tokens in the cache, however mlx-lm's loop has ended."""
        if self._passed is None:
            return
        self._take_back()
        if self._again:
            self._model(mx.array([self._again]), cache=self._cache)
            mx.eval([layer.state for layer in self._cache])
        self._read_uncached()
        # A forward pass from which nothing was sampled may still be running.
        self._learn(self._unlearned if self._used else self._unlearned[:-1])
        if self._recycled is not None:
            self._recycled.observe(self._text.tokens[self._recycled.recorded :].tolist(), ends=True)
        self._drafter.keep_text(self._cache, self._text.tokens)
        self._recycler.save_if_due()

    def _read_prompt(self, tokens: mx.array, embeddings: mx.array | None) -> mx.array:
        assert self._prompt_left
        self._text.extend(tokens[0].tolist())
        if embeddings is None:
            self._prompt_left -= tokens.shape[1]
            logits = self._model(tokens, cache=self._cache)
        else:
            self._prompt_left -= embeddings.shape[1]
            logits = self._model(tokens, cache=self._cache, input_embeddings=embeddings)
        if not self._prompt_left:
            self._recycler = self._drafter.prepare(logits.shape[-1])
            self._began(Pass(len(self._text) - 1, [], logits[:, -1:], [], None))
        return logits

    def _pass_ahead(self, drawn: mx.array) -> mx.array:
        """Start a forward pass over a token that may not be known yet."""
        self._time(1, follows=self._timed == 1)
        logits = self._model(drawn[None], cache=self._cache)
        self._began(Pass(len(self._text), [], logits, [], None))
        self._unread = drawn
        return logits

    def _pass_with_draft(self, drawn: mx.array) -> mx.array:
        """Run a forward pass over a token and the paying draft after it."""
        token, follows = int(drawn.item()), self._timed > 1
        began = self._now()
        self._take_back()
        self._text.extend([token])
        self._learn(self._unlearned)
        self._unlearned = []
        draft, gains = self._chain(self._room())
        draft = draft[: self._paying(gains)]
        read = [*self._again, token, *draft]
        self._time(len(read) if draft else 0, follows, began)
        before = Before(self._cache) if draft else None
        logits = self._model(mx.array([read], drawn.dtype), cache=self._cache)[:, len(self._again) :]
        self._began(Pass(len(self._text) - 1, draft, logits, read, before))
        return logits[:, :1]

    def _waiting_pays(self) -> bool:
        """Return whether a draft after the token about to be known is probably worth more than the lead."""
        self._learn(self._unlearned[:-1])
        del self._unlearned[:-1]
        _, gains = self._chain(self._room() + 1)
        return self._paying(gains[1:]) > 0

    def _began(self, passed: Pass) -> None:
        self._passed, self._used, self._again = passed, 0, []
        self._unlearned.append(passed)

    def _take_back(self) -> None:
        """Roll the newest forward pass back to its sampled tokens."""
        assert self._passed is not None
        draft, read, before = self._passed.draft, self._passed.read, self._passed.before
        if before is not None:
            kept = len(read) - len(draft) + self._used
            if before.keep(kept, len(read)):
                self._again = read[:kept]

    def _room(self) -> int:
        """Return the maximum draft after one more token."""
        rows = most_rows(self._cache, self._quantized_from)
        most = self._drafter.most if rows is None else min(self._drafter.most, rows - 1)
        most = min(self._longest, most - len(self._again))
        return most if self._max_tokens < 0 else min(most, self._max_tokens - self._asked)

    def _chain(self, depth: int) -> tuple[list[int], np.ndarray]:
        """Return the most probable continuation of the sequence, and the probability of each of its tokens."""
        if depth < 1 or not len(self._text):
            return [], np.empty(0, np.float32)
        if self._recycled is None:
            self._recycled = self._recycler.begin(self._text.tokens)
        chain = self._recycled.draft(self._text.tokens, depth)
        return chain["token"][1:].tolist(), chain["value"][1:].copy()

    def _paying(self, gains: np.ndarray) -> int:
        """Return the length of the draft with the most tokens per second."""
        (nodes,) = self._drafter.passes.paying([gains], len(self._again))
        return nodes - 1

    def _learn(self, passes: list[Pass]) -> None:
        orders = self._recycler.options.orders
        for place, draft, logits, *_ in passes:
            if place < 0:  # from a prompt given only as embeddings
                continue
            first = max(0, place + 1 - orders)
            tokens = np.append(self._text.tokens[first : place + 1], draft).astype(np.int32)
            ngrams = ngrams_at(tokens[None], np.array([len(tokens) - 1]), np.array([1 + len(draft)]), orders)
            self._recycler.learn_logits(ngrams, np.array(logits[0].astype(mx.float32)))

    def _read_uncached(self) -> None:
        if self._unread is not None:
            self._text.extend([self._unread.item()])
            self._unread = None

    def _time(self, rows: int, follows: bool, now: float | None = None) -> None:
        """Start timing a pass of `rows` tokens; the previous one took until now, if this `follows` in the same way."""
        now = self._now() if now is None else now
        if follows:
            self._drafter.passes.record_time(self._timed, now - self._since)
        self._timed, self._since = rows, now

    def _now(self) -> float:
        return time.perf_counter() - compiling.seconds - self.away


def layers_of(cache: Sequence[Any]) -> Iterator[Any]:
    """Yield all layers, including those inside layers with several caches."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers_of(layer.caches)
        else:
            yield layer


def unknown_layers(cache: Sequence[Any]) -> list[str]:
    """Return the types of layers that may not support rolling back."""
    known = (*_TRIMMED, RotatingKVCache, ArraysCache)
    return sorted({type(layer).__name__ for layer in layers_of(cache) if type(layer) not in known})


def most_rows(cache: Sequence[Any], quantized_from: int | None) -> int | None:
    """Return how many tokens of a forward pass can all be rolled back; None for no limit.

    `quantized_from`: the length from which mlx-lm quantizes the cache, after a pass. A rotating cache that keeps the
    first tokens (`max_kv_size`) drops, when full, other tokens than a pass over several tokens attends to.
    """
    limits = []
    for layer in layers_of(cache):
        if type(layer) is RotatingKVCache and layer.keep:
            limits.append(layer.max_size - layer.offset)
        elif type(layer) is KVCache and quantized_from is not None:
            limits.append(quantized_from - 1 - layer.offset)
    return min(limits, default=None)


class Before:
    """A prompt cache as it was before a pass over several tokens that may be rolled back."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._cache = cache
        self._reads_again = any(type(layer) is ArraysCache for layer in layers_of(cache))
        self._states = [_state(layer) for layer in layers_of(cache)] if self._reads_again else []

    def keep(self, kept: int, rows: int) -> int:
        """Roll back a pass over `rows` tokens, except the first `kept`. Return how many of these must be read again."""
        if kept == rows:
            return 0
        if not self._reads_again:
            for layer in layers_of(self._cache):
                _drop(layer, rows - kept)
            return 0
        for layer, state in zip(layers_of(self._cache), self._states, strict=True):
            if state is None:
                layer.trim(rows)
            else:
                layer.state = state
        return kept


def _state(layer: Any) -> Any:
    """Return the state to restore; None for layers that are trimmed."""
    if type(layer) is ArraysCache:
        arrays, *others = layer.state
        return list(arrays), *others
    return layer.state if type(layer) is RotatingKVCache else None


def _drop(layer: Any, rows: int) -> None:
    if type(layer) is RotatingKVCache:
        kept = layer.keys.shape[2] - rows
        layer.keys, layer.values = layer.keys[..., :kept, :], layer.values[..., :kept, :]
        layer.offset, layer._idx = layer.offset - rows, kept
    else:
        layer.trim(rows)
