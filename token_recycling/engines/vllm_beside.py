"""Token Recycling beside a model's own heads in vLLM: EAGLE, EAGLE-3 or MTP draft, and copies where these are surer.

    vllm serve MODEL --worker-extension-cls token_recycling.engines.vllm_beside.BesideHeads --speculative-config \
        '{"method": "eagle", "model": HEAD, "num_speculative_tokens": 24, "disable_padded_drafter_batch": true}'

vLLM has one drafter and no door for a second one, so that two methods of its model runner are wrapped, once a process.
Heads draft `head_tokens` for every request; a chain of this package, of up to `num_speculative_tokens`, takes the place
of their draft where its forecast is above what heads brought lately. Heads read every text in any case, as they must
to draft later; their further passes are left out in a step in which all requests have a chain.

Nothing here imports numba before a model runner is made: vLLM without Triton would fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .versions import check_signature, wrap_once

_OURS, _BESIDE = "token_recycling", "token_recycling_beside"
_INIT = ("self", "vllm_config", "device")
_DRAFT = ("self", "scheduler_output", "sampled_token_ids")
_PROPOSE = ("self", "num_speculative_tokens")
_HEAD_TOKENS = 4
"""What heads draft where nothing is said."""
_KEEPS, _SHARE, _PRIOR = 0.98, 0.5, 8.0
"""How much of older drafts counts after another one, and what is taken for granted: a share accepted in some drafts."""


class BesideHeads:
    """The class to name as `worker_extension_cls`: vLLM imports it in every worker before a model runner is made."""


class Beside:
    """Chains of one model runner beside its heads."""

    def __init__(self, runner: Any) -> None:
        """Raises ValueError for a configuration whose drafts cannot be replaced."""
        from .vllm import TokenRecycling

        config = runner.vllm_config
        _check(config)
        options = dict((config.additional_config or {}).get(_OURS, {}))
        most = config.speculative_config.num_speculative_tokens
        self.head_tokens = int(options.pop("head_tokens", min(_HEAD_TOKENS, most)))
        if not 1 <= self.head_tokens <= most:
            raise ValueError(
                f"expected head_tokens from 1 to num_speculative_tokens={most}, got {self.head_tokens}; heads draft so "
                "many for every request"
            )
        self._runner = runner
        self._brought, self._drafts = _PRIOR * _SHARE * self.head_tokens, _PRIOR
        """Accepted tokens of the heads' newest drafts, and how many drafts."""
        self._by_heads: set[str] = set()
        """Requests whose last draft heads made."""
        # Ranks know clocks of their own, and must agree on how many passes the heads make.
        self._may_skip = config.parallel_config.world_size == config.parallel_config.data_parallel_size == 1
        self._asked = self.head_tokens
        self.recycling = TokenRecycling(config, options)
        setattr(runner, _OURS, self.recycling)
        heads, propose = runner.drafter, runner.drafter.propose
        check_signature("vLLM", f"{type(heads).__name__}.propose", type(heads).propose, _PROPOSE, more=True)

        def some(num_speculative_tokens: int, *more: Any, **named: Any) -> Any:
            return propose(min(num_speculative_tokens, self._asked), *more, **named)

        heads.propose = some

    def chains(self, sampled: list[list[int]]) -> list[list[int]]:
        """A chain for each request in which it is surer than heads, else none; called before heads draft."""
        batch = self._runner.input_batch
        for request, tokens in zip(batch.req_ids, sampled, strict=False):
            if tokens and request in self._by_heads:
                self._brought = _KEEPS * self._brought + len(tokens) - 1
                self._drafts = _KEEPS * self._drafts + 1
        chains = self.recycling.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
        chains = [self._surer(request, chain) for request, chain in zip(batch.req_ids, chains, strict=False)]
        needed = any(tokens and not chain for tokens, chain in zip(sampled, chains, strict=True))
        self._asked = 0 if self._may_skip and not needed else self.head_tokens
        return chains

    def join(self, chains: list[list[int]], by_heads: torch.Tensor) -> list[list[int]]:
        """The draft of each request: its chain, or that of heads (n, drafted)."""
        ids, drafts = self._runner.input_batch.req_ids, by_heads.tolist()
        self._by_heads = {request for request, chain in zip(ids, chains, strict=False) if not chain}
        return [chain or draft for chain, draft in zip(chains, drafts, strict=True)]

    def _surer(self, request: str, chain: list[int]) -> list[int]:
        if not chain:
            return chain
        recycler, record = self.recycling.recycler, self._runner.requests[request]
        forecast = recycler.tree(getattr(record, _OURS), 1 + len(chain)).values[1:].sum()
        return chain if forecast > self._brought / self._drafts else []


def _check(config: Any) -> None:
    speculative = config.speculative_config
    if speculative is None or not speculative.use_eagle() or speculative.parallel_drafting:
        method = getattr(speculative, "method", None)
        raise ValueError(f"expected the method eagle, eagle3 or mtp beside which to draft, got {method!r}")
    if not speculative.disable_padded_drafter_batch or config.scheduler_config.async_scheduling:
        raise ValueError(
            "expected disable_padded_drafter_batch in the speculative config, and no asynchronous scheduling, got a "
            "drafter that begins before the sampled tokens are known; set disable_padded_drafter_batch to true"
        )
    if speculative.draft_sample_method != "greedy":
        raise ValueError(
            f"expected draft_sample_method='greedy', got {speculative.draft_sample_method!r}: probabilities of the "
            "heads' tokens would be taken for those of others"
        )


def _hook() -> None:
    """Gives every model runner that is made its `Beside`."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if HAS_TRITON and getattr(envs, "VLLM_USE_V2_MODEL_RUNNER", False) is not False:
        raise RuntimeError(
            "expected VLLM_USE_V2_MODEL_RUNNER=0, got a vLLM that chooses its model runner; set it: the second one "
            "keeps drafts on the device, where no chain can take their place"
        )

    def joined(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(self: Any, vllm_config: Any, device: Any) -> None:
            make(self, vllm_config, device)
            setattr(self, _BESIDE, Beside(self))

        return made

    def drafted(draft: Callable[..., Any]) -> Callable[..., Any]:
        def both(self: Any, scheduler_output: Any, sampled_token_ids: Any, *more: Any, **named: Any) -> Any:
            beside: Beside = getattr(self, _BESIDE)
            chains = beside.chains(sampled_token_ids)
            return beside.join(chains, draft(self, scheduler_output, sampled_token_ids, *more, **named))

        return both

    wrap_once("vLLM", GPUModelRunner, "__init__", _INIT, joined)
    wrap_once("vLLM", GPUModelRunner, "propose_draft_token_ids", _DRAFT, drafted, more=True)


_hook()
