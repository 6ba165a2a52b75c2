"""Token Recycling in SGLang: whole trees, verified by its NGRAM algorithm.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm TOKEN_RECYCLING \\
        --speculative-num-draft-tokens 16

SGLang calls `engines.register_sglang` through its plug-in entry point. Its NGRAM worker verifies any tree of a fixed
number of nodes, given as tokens and an n x n ancestor mask per request, and its result contains the logits of every
node. Here the worker's drafts come from the matrix and the sequence (Luo et al., 2408.08696; drafts as in `recycling`),
and the matrix learns from the logits. Options are read from the environment variable TOKEN_RECYCLING, as JSON.

Cost per step: a top-k over the logits of all nodes; some microseconds per node.
"""

from __future__ import annotations

import json
import os
from multiprocessing import util
from typing import Any

import numpy as np
import torch

from ..recycling.matrix_file import fingerprint
from . import SGLANG
from .engine import EngineOptions, Replica, TokenBuffer, check_signature, check_version

NAME = "TOKEN_RECYCLING"
_OPTIONS = "TOKEN_RECYCLING"
_TOKENS = "token_recycling_tokens"
"""Attribute of a request for its token buffer."""
_DEEPEST = 64
_NODES = 16
"""Default number of nodes of a tree, the root included."""
_WORKER = {
    "_prepare_draft_tokens": ("self", "batch"),
    "_update_ngram_corpus": ("self", "batch"),
    "forward_batch_generation": ("self", "batch"),
}
"""Overridden methods of the NGRAM worker, and their first parameters."""


def register() -> None:
    """Register the algorithm with SGLang; raises RuntimeError for an unsupported SGLang."""
    import sglang

    check_version("SGLang", sglang.__version__, SGLANG, (*SGLANG[:2], SGLANG[2] + 1))
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=_algorithm())(lambda _: worker_class())


def _algorithm() -> type:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):
        """The NGRAM algorithm for all checks in SGLang, with a different worker and settings."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            prepare_server_args(server_args)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.NGRAM, name)

    return Algorithm


def prepare_server_args(server_args: Any) -> None:
    """Set the server arguments required to verify trees, and reject unsupported ones; raises ValueError."""
    if server_args.device == "cpu":
        raise ValueError(
            f"{NAME} needs a GPU, got the device cpu: there SGLang verifies sampled requests as if they were "
            "greedy; use token_recycling.engines.vllm, or the server of token-recycling"
        )
    if getattr(server_args, "enable_dp_attention", False):
        raise ValueError(f"{NAME} and data-parallel attention cannot be combined; omit --enable-dp-attention")
    if (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise ValueError(
            f"{NAME} needs page_size 1 or the attention backend flashinfer, got page_size "
            f"{server_args.page_size} and {server_args.attention_backend}: other backends verify trees wrongly there"
        )
    _options()
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = _NODES
    nodes = server_args.speculative_num_draft_tokens
    if nodes < 2:
        raise ValueError(f"--speculative-num-draft-tokens must be >= 2, the root included, got {nodes}")
    server_args.speculative_eagle_topk = server_args.speculative_num_steps = nodes - 1


def _options() -> EngineOptions:
    try:
        given = json.loads(os.environ.get(_OPTIONS) or "{}")
    except ValueError as error:
        raise ValueError(f"environment variable {_OPTIONS} must be JSON: {error}") from None
    return EngineOptions.parse(given)


def worker_class() -> type:
    """Return the NGRAM worker with trees from a matrix; raises RuntimeError if SGLang's worker has changed."""
    from sglang.srt.speculative import ngram_worker

    base = ngram_worker.NGRAMWorker
    for name, wanted in _WORKER.items():
        check_signature("SGLang", f"NGRAMWorker.{name}", getattr(base, name, None), wanted, more=True)

    class TokenRecyclingWorker(base):  # type: ignore[misc, valid-type]
        """Drafts trees from the matrix, has them verified as NGRAM's, and learns from all their nodes."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            corpus, ngram_worker.NgramCorpus = ngram_worker.NgramCorpus, NoCorpus
            try:
                super().__init__(*arguments, **named)
            finally:
                ngram_worker.NgramCorpus = corpus
            self.trees = Trees(self._recycler(), self.draft_token_num)

        def _recycler(self) -> Replica:
            from sglang.srt.runtime_context import get_parallel

            options, parallel = _options(), get_parallel()
            tokenizer = getattr(self.target_worker, "tokenizer", None)
            recycler = Replica(
                self.model_runner.model_config.vocab_size,
                self.draft_token_num - 1,
                options,
                fingerprint(tokenizer) if options.matrix and tokenizer is not None else "",
                saves=parallel.tp_rank == 0 and not parallel.dp_rank,
            )
            recycler.warm_up(np.int64)
            util.Finalize(None, recycler.save, exitpriority=100)
            return recycler

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.trees.grow(batch.reqs, self._accepted(batch))

        def _accepted(self, batch: Any) -> list[list[int]]:
            """Return the accepted tokens of each request that are not in its sequence yet, as with overlap."""
            if not self.enable_overlap or batch.grammar_needs_sync():
                return [[] for _ in batch.reqs]
            tokens, counts = batch.spec_info.accept_tokens.cpu(), batch.spec_info.accept_lens.tolist()
            rows = tokens.view(len(counts), -1).tolist()
            return [row[:count] for row, count in zip(rows, counts, strict=True)]

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: NGRAM adds sequences to its corpus here; a matrix learns from logits."""

        def forward_batch_generation(self, batch: Any, *arguments: Any, **named: Any) -> Any:
            verifies = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *arguments, **named)
            if verifies:
                self.trees.observe(result.logits_output.next_token_logits)
            return result

    return TokenRecyclingWorker


class NoCorpus:
    """Replaces NGRAM's corpus, which would be built but never queried."""

    def __init__(self, **_: Any) -> None:
        pass

    def erase_match_state(self, req_ids: list[str]) -> None:
        """Do nothing: state is dropped with SGLang's record of the request."""

    def reset(self) -> None:
        """Do nothing: the cache was cleared, but the learned candidates stay valid."""


class Trees:
    """The trees of a batch in SGLang's form, and learning from their logits."""

    def __init__(self, recycler: Replica, nodes: int) -> None:
        """`nodes`: number of nodes of every tree, the root included."""
        self.recycler, self.nodes = recycler, nodes
        self._ngrams = np.empty((0, recycler.options.orders), np.int64)
        self._rows = np.empty(0, np.int64)
        """Rows of the logits after these n-grams."""

    def grow(self, requests: list[Any], accepted: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (requests * n,) int64 and ancestor masks (requests * n * n,) bool of trees, the root first."""
        tokens = np.empty((len(requests), self.nodes), np.int64)
        masks = np.zeros((len(requests), self.nodes, self.nodes), bool)
        ngrams, rows = [self._ngrams[:0]], [self._rows[:0]]
        for place, (request, more) in enumerate(zip(requests, accepted, strict=True)):
            whole = _tokens_of(request, more)
            recycler = self.recycler.recycler_of(request, whole)
            tree = recycler.draft(whole, _DEEPEST)
            lay_out(tree, tokens[place], masks[place])
            if not _changes_logits(request):
                ngrams.append(recycler.ngrams(tree["parent"], tree["token"]))
                rows.append(place * self.nodes + np.arange(len(tree)))
        self._ngrams, self._rows = np.concatenate(ngrams), np.concatenate(rows)
        return tokens.reshape(-1), masks.reshape(-1)

    def observe(self, logits: torch.Tensor) -> None:
        """Learn from the logits (requests * n, vocabulary) of the last trees. On a GPU these are still being computed,
        so those of the previous step are learned.
        """
        known = logits.narrow(1, 0, self.recycler.matrix.vocab_size)
        self.recycler.observe_logits(self._ngrams, known, self._rows)
        self.recycler.learn_observed(newest=False)
        self.recycler.save_if_due()


def _changes_logits(request: Any) -> bool:
    """Return whether the logits of a request are not the model's: grammars, custom processors, biases and penalties
    change them in place.
    """
    asked = request.sampling_params
    return (
        getattr(request, "grammar", None) is not None
        or bool(getattr(request, "custom_logit_processor", None))
        or bool(asked.logit_bias)
        or bool(asked.frequency_penalty or asked.presence_penalty or asked.min_new_tokens)
        or asked.repetition_penalty != 1
    )


def _tokens_of(request: Any, accepted: list[int]) -> np.ndarray:
    """Return the sequence of a request so far (length,) int64, with `accepted` tokens that are not in its output yet.
    It is stored on the request, so that a step reads only new tokens.
    """
    prompt, output = request.origin_input_ids_unpadded, request.output_ids
    written = len(prompt) + len(output)
    buffer: TokenBuffer | None = getattr(request, _TOKENS, None)
    if buffer is None or not _continues(buffer, request, accepted):
        buffer = TokenBuffer(prompt, np.int64)
        setattr(request, _TOKENS, buffer)
    if len(buffer) < written:
        buffer.extend(output[len(buffer) - len(prompt) :])
    buffer.extend(accepted[len(buffer) - written :])
    return buffer.tokens


def _continues(buffer: TokenBuffer, request: Any, accepted: list[int]) -> bool:
    """Return whether the last token that was read is still at its position."""
    output = request.output_ids
    at = len(buffer) - 1 - len(request.origin_input_ids_unpadded)
    if at < len(output):
        return at < 0 or output[at] == buffer.tokens[-1]
    return accepted[at - len(output) :][:1] == [buffer.tokens[-1]]


def lay_out(tree: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> None:
    """Write a tree into `tokens` (n,) and `mask` (n, n), parents before children. If fewer than n nodes have grown, a
    chain of the newest token is appended to the last node, which has no child: SGLang would count equal siblings twice.
    """
    made = len(tree)
    tokens[:made], tokens[made:] = tree["token"], tree["token"][0]
    for node in range(len(tokens)):
        parent = tree["parent"][node] if node < made else node - 1
        if node:
            mask[node] = mask[parent]
        mask[node, node] = True
