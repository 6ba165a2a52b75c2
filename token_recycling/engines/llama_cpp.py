"""Token Recycling in llama-cpp-python, for GGUF models: a draft model for its class `Llama`.

    draft = TokenRecycling()
    llama = Llama("model.gguf", draft_model=draft, logits_all=True)
    draft.attach(llama)

`Llama` calls its draft model after every forward pass, with the ids of the sequence. It samples at one drafted position
after another for as long as the sampled tokens are the drafted ones: a draft is a chain, and the output is the same as
without it. The logits are read from `Llama.scores`. `eval` of the attached object is wrapped, since only there is it
certain which tokens the rows belong to (Luo et al., 2408.08696; drafts as in `recycling`).

The second token of a forward pass may cost as much as the first, and each further one half as much (quantized weights
on a CPU), or next to nothing (on a GPU). So costs are learned from all forward passes, drafting and learning included,
and nothing is drafted where it does not pay.

Cost per step: a top-k over the new logits, and some microseconds per drafted token.
"""

from __future__ import annotations

import time
import weakref
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
from .replica import EngineOptions, PassCosts, Replica
from .versions import check_signature, check_version

LOWEST, BEYOND = (0, 3, 36), (0, 4)
"""llama-cpp-python from the first to before the second has this interface."""
_EVAL = ("self", "tokens")
_SECOND, _FURTHER, _PASS = 0.9, 0.3, 0.02
"""Prior costs: of the second token relative to the first, and of each further one; seconds of a forward pass over one
token.
"""


class TokenRecycling(LlamaDraftModel):
    """The `draft_model` of one `Llama`; `options` are those of `EngineOptions`. Raises ValueError for a wrong option
    and RuntimeError for a llama-cpp-python that is not known.
    """

    _text: Recycler | None = None
    _read: np.ndarray
    """The ids of the sequence so far."""
    _evaluated_next: np.ndarray
    """Tokens of the next forward pass: the newest and the draft."""
    _values: np.ndarray
    """(n,) float32: how likely each of these is accepted."""
    _verified = False
    """Whether the last pass did that and nothing else."""

    def __init__(self, num_pred_tokens: int = 32, **options: Any) -> None:
        """`num_pred_tokens`: most drafted tokens of a pass; fewer are drafted where they do not pay."""
        check_version("llama-cpp-python", llama_cpp.__version__, LOWEST, BEYOND)
        if num_pred_tokens < 1:
            raise ValueError(f"num_pred_tokens must be >= 1, got {num_pred_tokens}")
        self.num_pred_tokens, self.options = num_pred_tokens, EngineOptions.parse(options)
        more = np.arange(num_pred_tokens + 1)
        self.passes = PassCosts(options, _PASS * (1 + _SECOND * (more > 0) + _FURTHER * np.maximum(more - 1, 0)))
        """Costs of forward passes."""
        self._drafting = 0.0
        """Seconds of this step's drafting."""
        self.recycler: Replica | None = None
        """Matrix and drafting state; None until `attach`."""

    def attach(self, llama: llama_cpp.Llama) -> None:
        """Learns from all that `llama` evaluates from now on; call it once. Raises ValueError for a `Llama` that cannot
        verify drafts as it was made, and MatrixFileError for a file that is damaged or of another tokenizer or options.
        """
        self._check(llama)
        tokenizer = _gguf_fingerprint(llama) if self.options.matrix else ""
        self.recycler = Replica(
            llama.n_vocab(), self.num_pred_tokens, self.options, tokenizer, chains=True, corrected=True
        )
        self.recycler.warm_up(np.int32)
        self._read = self._evaluated_next = np.empty(0, np.int32)
        original, owner = type(llama).eval, weakref.ref(llama)

        def observed(tokens: Any) -> None:
            evaluating = owner()
            assert evaluating is not None, "called through itself"
            start, began = evaluating.n_tokens, time.perf_counter()
            original(evaluating, tokens)
            self._verified = self._observe(evaluating, start)
            if self._verified:
                self.passes.took(len(tokens), self._drafting + time.perf_counter() - began)

        llama.eval = observed
        weakref.finalize(llama, self.recycler.save)

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Return the most probable continuation of a sequence (n,) as far as it pays: (m,) intc; m may be 0."""
        if self.recycler is None:
            raise RuntimeError("draft.attach(llama) was not called; call it once before the first completion")
        began = time.perf_counter()
        read, self._read = self._read, input_ids.astype(np.int32)
        if not len(read) or not np.array_equal(self._read[: len(read)], read):
            self._text = self.recycler.begin(self._read)
            self.passes.begin_text()
        elif self._verified:
            self.passes.gave(len(self._read) - len(read), self._values)
        assert self._text is not None
        costs, ratio = self.passes.seconds, self.passes.ratio
        chain = self._text.draft(self._read, self.num_pred_tokens, costs, ratio)
        self._values = chain.values.copy()
        draft = chain.tokens[1:].astype(np.intc)
        self._evaluated_next = np.append(self._read[-1:], draft)
        self.recycler.save_if_due()
        self._drafting = time.perf_counter() - began
        return draft

    def _observe(self, llama: llama_cpp.Llama, start: int) -> bool:
        """Learns from a pass over the tokens from `start` on, the drafted ones included. Returns whether it verified
        the last draft and nothing else.
        """
        assert self.recycler is not None
        end, tokens = llama.n_tokens, np.asarray(llama.input_ids, np.int32)
        counted = np.array([end - 1]), np.array([end - start])
        self.recycler.learn_logits(ngrams_at(tokens[None], *counted, self.options.orders), llama.scores[start:end])
        verifies = start == len(self._read) - 1 and np.array_equal(tokens[start:end], self._evaluated_next)
        if self._text is not None and not verifies:
            # A prompt: what follows there was not generated, and shows nothing about the draft.
            self._text.forget_draft()
        return verifies

    def _check(self, llama: llama_cpp.Llama) -> None:
        if self.recycler is not None:
            raise ValueError("attach was called twice; make one TokenRecycling for each Llama")
        if llama.draft_model is not self:
            raise ValueError("the Llama was made without draft_model=draft, this object; pass it there")
        if len(llama.scores) < llama.n_ctx():
            raise ValueError(
                f"the Llama keeps logits of {len(llama.scores)} tokens, not of all {llama.n_ctx()}; "
                "make the Llama with logits_all=True, without which it fails in longer texts with any draft model"
            )
        if self.num_pred_tokens >= llama.n_batch:
            raise ValueError(
                f"num_pred_tokens must be < n_batch of {llama.n_batch}, got {self.num_pred_tokens}: "
                "a draft must be verified in one batch"
            )
        if llama_cpp.llama_model_is_recurrent(llama.model) or llama_cpp.llama_model_is_hybrid(llama.model):
            raise ValueError("recurrent and hybrid models are unsupported: they cannot roll back rejected tokens")
        check_signature("llama-cpp-python", "Llama.eval", type(llama).eval, _EVAL)


def _gguf_fingerprint(llama: llama_cpp.Llama) -> str:
    """The fingerprint of the vocabulary in the GGUF file; empty, that is not stated, where it has none."""
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return ""
    texts = (llama_cpp.llama_vocab_get_text(vocabulary, token) for token in range(llama.n_vocab()))
    return vocabulary_fingerprint((text.decode("utf-8", "replace"), token) for token, text in enumerate(texts))
