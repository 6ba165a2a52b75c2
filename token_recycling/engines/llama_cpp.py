"""Token Recycling in llama-cpp-python, for GGUF models.

    llama = accelerate(Llama("model.gguf", logits_all=True, flash_attn=True))

`Llama` calls its draft model after every forward pass, with the ids of the sequence. It samples at one drafted position
after another as long as the sampled tokens equal the drafted ones: a draft is a chain, and the output is the same as
without drafts. The logits are read from `Llama.scores`. The object's `eval` is wrapped, since only there the tokens of
the rows are certain (Luo et al., 2408.08696; drafts as in `recycling`). `Llama` counts unverified drafted tokens as
read; `generate` is wrapped to exclude them wherever users see tokens.

The second token of a forward pass may cost as much as the first, and each further one half as much (quantized weights
on a CPU), or next to nothing (on a GPU). So costs are learned from all forward passes, drafting and learning included,
and nothing is drafted where it does not pay.

Without flash attention, and with weight types other than Q4_0, Q4_1, Q5_1 and Q8_0, llama.cpp's CPU kernels round a
forward pass over several tokens differently from a pass over a single token, so outputs may differ from those without
drafts at near-ties. `accelerate` warns in these cases.

Cost per step: a top-k over the new logits, and some microseconds per drafted token. While drafting is stopped, only
every fourth step is learned from, which costs 1% of a step of 14 milliseconds.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

from .._util.extras import lacking

if missing := lacking("llama-cpp", "llama_cpp"):
    raise ModuleNotFoundError(f"the adapter of llama.cpp {missing}")

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel

from ..recycling.matrix_file import vocabulary_fingerprint
from ..recycling.ngrams import ngrams_at
from ..recycling.recycler import Recycler
from .engine import EngineOptions, Replica, StepCosts, check_signature, check_version

logger = logging.getLogger("token_recycling")

LOWEST, BEYOND = (0, 3, 36), (0, 4)
"""llama-cpp-python versions from the first to before the second have this interface."""
_EVAL = ("self", "tokens")
_SECOND, _FURTHER, _PASS = 1.2, 0.5, 0.02
"""Prior costs: of the second token relative to the first, and of each further token; seconds of a forward pass over one
token.
"""
_POWER = 4.0
"""First power of forecasts: a wrong draft of ten tokens costs as much as seven tokens without drafts."""

_EXACT = {2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 9: "Q5_1"}
"""Weight types, by their number in a GGUF file, whose logits do not depend on the number of tokens in a pass."""
_STOPPED, _EVERY = 32, 4
"""Steps without a draft after which drafting counts as stopped; every n-th of the following steps is learned from."""


def accelerate(llama: llama_cpp.Llama, num_pred_tokens: int = 32, **options: Any) -> llama_cpp.Llama:
    """Make a `Llama` draft, and return it. `num_pred_tokens`: maximum drafted tokens of a pass; fewer are drafted where
    they do not pay. `options` are those of `EngineOptions`.

    Raises ValueError for a wrong option or a `Llama` whose settings do not allow verifying drafts, MatrixFileError for
    a file that is damaged or of another tokenizer or options, and RuntimeError for an unsupported llama-cpp-python.
    """
    check_version("llama-cpp-python", llama_cpp.__version__, LOWEST, BEYOND)
    _check(llama, num_pred_tokens)
    llama.draft_model = draft_model = TokenRecycling(llama, num_pred_tokens, options)
    original, signature = type(llama).eval, inspect.signature(type(llama).generate)
    owner = weakref.ref(llama)

    def evaluate(tokens: Any) -> None:
        evaluating = owner()
        assert evaluating is not None, "called through itself"
        start, began = evaluating.n_tokens, time.perf_counter()
        original(evaluating, tokens)
        draft_model.observe(evaluating, start, began)

    def generate(*args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        generating = owner()
        assert generating is not None, "called through itself"
        return _without_drafts(generating, signature.bind(generating, *args, **kwargs))

    llama.eval, llama.generate = evaluate, generate
    weakref.finalize(llama, draft_model.replica.save)
    return llama


def _without_drafts(llama: llama_cpp.Llama, call: inspect.BoundArguments) -> Generator[int, Any, None]:
    """Generate like `Llama.generate`. Logits processors see no unverified drafted tokens, nor does `llama` count them
    between two tokens and when the call ends.
    """
    call.apply_defaults()
    # Number of tokens before the next one.
    read = len(call.arguments["tokens"]) + (0 if call.arguments["reset"] else llama.n_tokens)

    def on_read(processor: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tokens, logits: processor(tokens[:read], logits)

    if call.arguments["logits_processor"] is not None:
        call.arguments["logits_processor"] = list(map(on_read, call.arguments["logits_processor"]))
    generated, sent = type(llama).generate(*call.args, **call.kwargs), None
    while True:
        token = _next(generated, sent)
        if (evaluated := llama.n_tokens) > read:
            llama.n_tokens, llama._requires_eval = read, True  # the last logits are those of a drafted token
        if token is None:
            return
        sent = yield token
        if llama.n_tokens == read:
            llama.n_tokens = evaluated
        read += 1


def _next(generated: Generator[int, Any, None], sent: Any) -> int | None:
    try:
        return generated.send(sent)
    except StopIteration:
        return None


class TokenRecycling(LlamaDraftModel):
    """The draft model of one accelerated `Llama`."""

    def __init__(self, llama: llama_cpp.Llama, num_pred_tokens: int, options: dict[str, Any]) -> None:
        self.num_pred_tokens, self.options = num_pred_tokens, EngineOptions.parse(options)
        more, token_cost = np.arange(num_pred_tokens + 1), options.get("token_cost")
        self.costs = (
            StepCosts(_PASS * (1 + _SECOND * (more > 0) + _FURTHER * np.maximum(more - 1, 0)), power=_POWER)
            if token_cost is None
            else StepCosts(1 + token_cost * more, learns=False)
        )
        """Costs of forward passes over 1, 2, ... tokens."""
        tokenizer = _gguf_fingerprint(llama) if self.options.matrix else ""
        self.replica = Replica(llama.n_vocab(), num_pred_tokens, self.options, tokenizer, chains=True, corrected=True)
        self.replica.warm_up(np.int32)
        self._recycler: Recycler | None = None
        self._tokens = self._evaluated_next = np.empty(0, np.int32)
        """The ids of the sequence so far; and those of the next forward pass, the newest token and the draft."""
        self._drafted = 0
        """Number of tokens of the last draft."""
        self._drafting, self._seconds = 0.0, 0.0
        """Seconds of this step's drafting; and of the last step, 0 unless it verified exactly the draft."""

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Return the most probable continuation of a sequence (n,) that pays: (m,) intc; m may be 0."""
        began = time.perf_counter()
        before, self._tokens = self._tokens, input_ids.astype(np.int32)
        if not len(before) or not np.array_equal(self._tokens[: len(before)], before):
            self._recycler = self.replica.begin(self._tokens)
        elif self._seconds:
            accepted = min(self._drafted, len(self._tokens) - len(before) - 1)
            self.costs.record_outcome(1, 1 + self._drafted, self._drafted, accepted)
        assert self._recycler is not None
        chain = self._recycler.draft(self._tokens, self.num_pred_tokens, self.costs.cheapest)
        (nodes,) = self.costs.paying([chain["value"][1:]])
        self._drafted, draft = nodes - 1, chain["token"][1:nodes].astype(np.intc)
        self._evaluated_next = np.append(self._tokens[-1:], draft)
        self.replica.save_if_due()
        self._drafting = time.perf_counter() - began
        return draft

    def observe(self, llama: llama_cpp.Llama, start: int, began: float) -> None:
        """Learn from a forward pass over the tokens from `start` on, drafted ones included, which began at `began`."""
        end, tokens = llama.n_tokens, np.asarray(llama.input_ids, np.int32)
        if self.costs.steps_without < _STOPPED or end % _EVERY == 0 or end - start > 1:
            counted = np.array([end - 1]), np.array([end - start])
            ngrams = ngrams_at(tokens[None], *counted, self.options.orders)
            self.replica.learn_logits(ngrams, llama.scores[start:end])
        self._seconds = 0.0
        if start == len(self._tokens) - 1 and np.array_equal(tokens[start:end], self._evaluated_next):
            self._seconds = self._drafting + time.perf_counter() - began
            self.costs.record_time(end - start, self._seconds)
        elif self._recycler is not None:
            # A prompt: its tokens were not generated, and reveal nothing about the draft.
            self._recycler.forget_draft()


def _check(llama: llama_cpp.Llama, num_pred_tokens: int) -> None:
    if num_pred_tokens < 1:
        raise ValueError(f"num_pred_tokens must be >= 1, got {num_pred_tokens}")
    if isinstance(llama.draft_model, TokenRecycling):
        raise ValueError("the Llama is accelerated already; call accelerate once")
    if llama.draft_model is not None:
        raise ValueError(
            f"the Llama has a draft_model, {type(llama.draft_model).__name__}, which would be replaced; "
            "create the Llama without one"
        )
    if len(llama.scores) < llama.n_ctx():
        raise ValueError(
            f"the Llama keeps logits of {len(llama.scores)} tokens, not of all {llama.n_ctx()}; "
            "create the Llama with logits_all=True, without which any draft model fails on longer outputs"
        )
    if num_pred_tokens >= llama.n_batch:
        raise ValueError(
            f"num_pred_tokens must be < n_batch of {llama.n_batch}, got {num_pred_tokens}: "
            "a draft must be verified in one batch"
        )
    if llama_cpp.llama_model_is_recurrent(llama.model) or llama_cpp.llama_model_is_hybrid(llama.model):
        raise ValueError("recurrent and hybrid models are unsupported: they cannot roll back rejected tokens")
    check_signature("llama-cpp-python", "Llama.eval", type(llama).eval, _EVAL)
    if llama.context_params.flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED:
        logger.warning(
            "flash attention is off, so llama.cpp rounds forward passes over several tokens differently from those "
            "over one: outputs may differ from those without drafts at near-ties; create the Llama with flash_attn=True"
        )
    weights = llama.metadata.get("general.file_type")
    if weights is not None and int(weights) not in _EXACT:
        logger.warning(
            "llama.cpp rounds forward passes over several tokens differently from those over one with the weights of "
            "this file (general.file_type %s): outputs may differ from those without drafts at near-ties; on a CPU "
            "files of %s are exact",
            weights,
            ", ".join(_EXACT.values()),
        )


def _gguf_fingerprint(llama: llama_cpp.Llama) -> str:
    """Return the fingerprint of the vocabulary in the GGUF file; empty (unknown) if it has none."""
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return ""
    texts = (llama_cpp.llama_vocab_get_text(vocabulary, token) for token in range(llama.n_vocab()))
    return vocabulary_fingerprint((text.decode("utf-8", "replace"), token) for token, text in enumerate(texts))
