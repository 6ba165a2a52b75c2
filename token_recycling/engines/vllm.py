"""Token Recycling in vLLM, as a proposer of its own: chains, verified by vLLM's rejection sampler.

    python -m vllm.entrypoints.openai.api_server --model MODEL --speculative-config \
        '{"method": "custom_class", "num_speculative_tokens": 24,
          "model": "token_recycling.engines.vllm.TokenRecycling"}'

vLLM makes one object in every worker (`method="custom_class"`) and calls it for drafts after every step. It shows a
proposer the texts, not the logits; those of every drafted position, the rejected ones too, pass through the model
runner's `_sample(logits, spec_decode_metadata)`, which is wrapped here, once a process. Version and signature are
checked when the class is loaded. vLLM verifies no trees, so that the draft of a request is the likeliest chain, and of
all chains in a step as many tokens are sent as pay (Luo et al., 2408.08696, with the means of the drafter `recycling`).

A request may carry what is expected to be answered, as `prediction` of the `extra_args` of its sampling parameters: a
text, or token ids in a list. Cost per step: what `recycling.recycler` says.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

import numpy as np
import torch

from ..costs.budget import NO_COSTS
from ..costs.costs import OnlineCurve
from ..recycling.matrix_file import fingerprint
from ..recycling.ngrams import ngrams_at
from .replica import EngineOptions, Replica
from .versions import check_version, wrap_once

logger = logging.getLogger("token_recycling")

LOWEST, BEYOND = (0, 22), (0, 34)
"""vLLM versions from the first to before the second have this interface."""
_HOOK = ("self", "logits", "spec_decode_metadata")
_OURS = "token_recycling"
_PASS = 0.01
"""Seconds of a pass over one token, as long as nothing is known."""


class TokenRecycling:
    """The class to name as `model` of `speculative_config`; options are in `additional_config["token_recycling"]`.
    Raises ValueError for a wrong option, MatrixFileError for a wrong file, and RuntimeError for a vLLM that is not
    known.
    """

    def __init__(self, vllm_config: Any) -> None:
        import vllm

        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        check_version("vLLM", vllm.__version__, LOWEST, BEYOND)
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"expected pipeline_parallel_size=1, got {parallel.pipeline_parallel_size}: "
                "the draft would not reach the first stage; use tensor parallelism"
            )
        if model.is_hybrid or model.is_attention_free:
            raise ValueError(
                "expected a model with a KV cache alone, got one with recurrent layers, in whose state vLLM's kernels "
                "may leave rejected tokens; serve it without speculation"
            )
        self._tokenizer = functools.cache(functools.partial(_tokenizer, model))
        options = EngineOptions.parse((vllm_config.additional_config or {}).get(_OURS, {}))
        first = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank) == 0 and parallel.rank == 0
        self.recycler = Replica(
            model.get_vocab_size(),
            vllm_config.speculative_config.num_speculative_tokens,
            options,
            fingerprint(self._tokenizer()) if options.matrix and not model.skip_tokenizer_init else "",
            saves=first,
            chains=True,
            corrected=True,
        )
        scheduler = vllm_config.scheduler_config
        most = scheduler.max_num_seqs * (self.recycler.nodes + 1)
        seed = _PASS * (1 + options.token_cost * np.arange(min(most, scheduler.max_num_batched_tokens)))
        self.passes = OnlineCurve(seed) if options.token_cost else None
        """What passes take; None where every token is to be drafted."""
        self._tokens, self._began = 0, 0.0
        """Of the pass that is over, or 0 where its time says nothing; and when it began."""
        self.recycler.warm_up(np.int32)
        self._max_model_len = model.max_model_len
        self._runner: Any = None
        _repair_cpu_sampler()
        _hook()
        util.Finalize(None, self.recycler.save, exitpriority=100)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM after it has loaded the target; there is no other model."""

    def observe(self, runner: Any, logits: torch.Tensor, metadata: Any) -> None:
        """Learns from the logits (n, vocabulary) after the newest token and every drafted one of each request."""
        self._runner, batch = runner, runner.input_batch
        requests = batch.num_reqs
        counts = np.ones(requests, np.int64)
        if metadata is not None:
            counts += metadata.num_draft_tokens
        if counts.sum() != len(logits):
            raise RuntimeError(f"expected {counts.sum()} rows of logits, got {len(logits)}; this vLLM is not supported")
        starts = runner.query_start_loc.np[: requests + 1].astype(np.int64)
        last = batch.num_computed_tokens_cpu[:requests] + np.diff(starts) - 1
        ngrams = ngrams_at(batch.token_ids_cpu, last, counts, self.recycler.options.orders)
        self.recycler.learn_logits(ngrams, logits)
        # Tokens of a prompt have no logits, and cost less.
        self._tokens = len(logits) if len(logits) == starts[-1] else 0

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for each request; `sampled_token_ids` already end its row of `token_ids_cpu`."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        if rows:
            known, ids = self._runner.requests, self._runner.input_batch.req_ids
            requests = [known[ids[row]] for row in rows]
            places = np.array(rows)
            lengths = num_tokens_no_spec[places].astype(np.int64)
            rooms = np.array([self._room(*each) for each in zip(requests, lengths.tolist(), strict=True)])
            for row, draft in zip(rows, self.draft(requests, token_ids_cpu, places, lengths, rooms), strict=True):
                drafts[row] = draft
        self.recycler.save_if_due()
        return drafts

    def draft(
        self, records: list[Any], tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, rooms: np.ndarray
    ) -> list[list[int]]:
        """A chain for each of n requests, as `Recycler.draft`, by the time between two calls."""
        now = time.perf_counter()
        if self._tokens and self.passes is not None:
            self.passes.took(self._tokens, now - self._began)
        self._tokens, self._began = 0, now
        ends = zip(records, rows.tolist(), lengths.tolist(), strict=True)
        texts = [
            self.recycler.text_of(
                record, tokens[row, :length], functools.partial(self._predicted, record), _answered(record)
            )
            for record, row, length in ends
        ]
        costs = NO_COSTS if self.passes is None else self.passes.seconds
        counts = self.recycler.draft(texts, tokens, rows, lengths, rooms, costs)
        return [self.recycler.chain(text, count) for text, count in zip(texts, counts.tolist(), strict=True)]

    def _predicted(self, request: Any) -> Sequence[int]:
        """What a request expects to be answered: token ids, or a text, as `prediction` of its `extra_args`."""
        asked = getattr(request, "sampling_params", None)
        given = None if asked is None else (getattr(asked, "extra_args", None) or {}).get("prediction")
        if isinstance(given, str):
            given = self._tokenizer()(given, add_special_tokens=False)["input_ids"]
        vocabulary = self.recycler.matrix.vocab_size
        if isinstance(given, list) and all(type(one) is int and 0 <= one < vocabulary for one in given):
            return given
        if given is not None:
            logger.warning(
                "expected prediction as a text, or as token ids below %d in a list, got %.40r; nothing is predicted",
                vocabulary,
                given,
            )
        return ()

    def _room(self, request: Any, length: int) -> int:
        """How many drafted tokens may be accepted within all limits. None where a request has a seed of its own: vLLM
        draws as many numbers as tokens were drafted, so that the text would change with what was learned.
        """
        left, asked = self._max_model_len - length, request.sampling_params
        if asked is None:
            return min(left - 1, self.recycler.nodes)
        if asked.seed is not None and asked.temperature > 0:
            return 0
        if asked.max_tokens is not None:
            left = min(left, asked.max_tokens - len(request.output_token_ids))
        return min(left - 1, self.recycler.nodes)


def _tokenizer(model: Any) -> Any:
    """The target's tokenizer, by vLLM's configuration of the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )


def _answered(request: Any) -> int:
    """How many tokens of a request are no prompt."""
    return len(getattr(request, "output_token_ids", ()))


def _hook() -> None:
    """Lets the proposer of a model runner see the logits on their way to the sampler."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
            recycling = getattr(self, "drafter", None)
            if isinstance(recycling, TokenRecycling) and logits is not None:
                recycling.observe(self, logits, spec_decode_metadata)
            return original(self, logits, spec_decode_metadata)

        return _sample

    wrap_once("vLLM", GPUModelRunner, "_sample", _HOOK, seen)


def _repair_cpu_sampler() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from .vllm_cpu import repair_sampler

        repair_sampler()
