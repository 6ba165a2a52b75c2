"""STAND-INS for SGLang's GPU code, so that its own NGRAM worker runs on a CPU with a transformers model.

SGLang's kernels need CUDA. Real are the worker, `NgramVerifyInput`, `ForwardMode` and the registry of algorithms.
Replaced, each by a few lines that follow its documentation, are the forward pass over a tree, greedy acceptance,
positions and links from a mask, the KV memory and the scheduler. So tests cover the contract (tree layout, masks, rows
of logits, outputs), but no kernel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from token_recycling.engines import sglang as adapter
from token_recycling.engines.engine import Replica

ABSENT = {"sgl_kernel", "IPython", "torchvision", "gguf", "orjson", "pybase64"}
"""Kernels and libraries that SGLang imports but no test calls."""


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def reconstruct(mask, seq_lens, positions, index, next_token, next_sibling, requests: int, nodes: int) -> None:
    """Compute positions and links of trees from their masks."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    tree = mask.view(requests, nodes, nodes)
    positions.copy_((tree.sum(-1) - 1 + seq_lens[:, None]).view(-1))
    index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    first, sibling = _derive_tree_links(mask.numpy(), requests, nodes)
    next_token.copy_(first)
    next_sibling.copy_(sibling)


def accept_greedily(verify_input: Any, batch: Any, logits_output: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    """Replace `eagle_sample` for greedy requests: follow links from the root while tokens equal the target's choice."""
    nodes = verify_input.draft_token_num
    predict = logits_output.next_token_logits.argmax(-1).int()
    tokens = verify_input.draft_token.view(-1, nodes)
    accepted = torch.full((len(tokens), nodes), -1, dtype=torch.int32)
    lengths = []
    for row in range(len(tokens)):
        path = [0]
        child = int(verify_input.retrieve_next_token[row, 0])
        while child >= 0:
            if tokens[row, child] == predict[row * nodes + path[-1]]:
                path.append(child)
                child = int(verify_input.retrieve_next_token[row, child])
            else:
                child = int(verify_input.retrieve_next_sibling[row, child])
        accepted[row, : len(path)] = torch.tensor(path) + row * nodes
        lengths.append(len(path))
    return predict, torch.tensor(lengths, dtype=torch.int32), accepted


def stand_in(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace SGLang's operations by the functions above; `put` sets an attribute of its module."""
    from sglang.srt.speculative import ngram_worker

    for name, instead in {
        "reconstruct_indices_from_tree_mask_func": reconstruct,
        "eagle_sample": accept_greedily,
        "assign_extend_cache_locs_func": lambda **_: None,
        "move_accept_tokens_to_target_kvcache": lambda *_: None,
        "commit_mamba_states_after_verify": lambda *_: None,
        "prepare_mamba_track_for_verify": lambda *_: None,
        "record_stream_for_v2_verify": lambda *_: None,
        "set_time_batch": lambda *_, **__: None,
    }.items():
        assert hasattr(ngram_worker, name), f"SGLang's worker no longer uses {name}"
        put(ngram_worker, name, instead)


def worker(target: Scheduler, recycler: Replica) -> Any:
    """Return this package's worker for the requests of a scheduler."""
    nodes = recycler.nodes + 1
    made = object.__new__(adapter.worker_class())
    vars(made).update(
        _target_worker=target,
        model_runner=SimpleNamespace(watermark_state=None),
        enable_overlap=target.overlap,
        draft_token_num=nodes,
        speculative_num_draft_tokens=nodes,
        max_batch_size=len(target.requests),
        device="cpu",
        token_to_kv_pool_allocator=None,
        ngram_corpus=adapter.NoCorpus(),
        _prev_decode_rids=set(),
        trees=adapter.Trees(recycler, nodes),
    )
    made._init_preallocated_tensors()
    return made


class Scheduler:
    """One batch of requests from prefill to the end; with `overlap` results arrive one step later."""

    def __init__(self, model: Any, prompts: list[list[int]], nodes: int, overlap: bool) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        self.model, self.overlap, self.steps = model, overlap, 0
        self.requests = [
            SimpleNamespace(
                rid=str(place),
                origin_input_ids_unpadded=array("q", prompt),
                output_ids=array("q"),
                grammar=None,
                sampling_params=SamplingParams(),
            )
            for place, prompt in enumerate(prompts)
        ]
        self.kept = [list(prompt) for prompt in prompts]
        """Tokens whose keys and values are cached."""
        first = [self._logits(tokens)[-1].argmax() for tokens in self.kept]
        self.waiting = [[int(token)] for token in first]
        accepted = torch.zeros(len(prompts), nodes, dtype=torch.int32)
        accepted[:, 0] = torch.stack(first)
        ones = torch.ones(len(prompts), dtype=torch.int32)
        self.batch = SimpleNamespace(
            reqs=self.requests,
            forward_mode=ForwardMode.DECODE,
            seq_lens=torch.tensor([len(prompt) for prompt in prompts]),
            has_grammar=False,
            grammar_needs_sync=lambda: False,
            return_logprob=False,
            req_pool_indices=None,
            req_to_token_pool=SimpleNamespace(req_to_token=None),
            spec_info=NgramVerifyInput(
                draft_token_num=nodes, new_seq_lens=ones, accept_tokens=accepted.flatten(), accept_lens=ones
            ),
        )
        if not overlap:
            self._say()

    def step(self, worker: Any) -> None:
        """Run one step: the worker drafts, requests verification and returns the accepted tokens."""
        batch = self.batch
        batch.seq_lens_cpu = batch.seq_lens
        result = worker.forward_batch_generation(batch)
        if self.overlap:
            self._say()
        self.steps += 1
        rows = result.next_token_ids.view(len(self.requests), -1).tolist()
        lengths = result.accept_lens.tolist()
        roots = batch.input_ids.view(len(self.requests), -1)[:, 0].tolist()
        for place, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            self.kept[place] += [roots[place], *row[: count - 1]]
            self.waiting[place] = row[:count]
        batch.spec_info, batch.seq_lens = result.next_draft_input, result.new_seq_lens
        if not self.overlap:
            self._say()

    def _say(self) -> None:
        for request, tokens in zip(self.requests, self.waiting, strict=True):
            request.output_ids.extend(tokens)
        self.waiting = [[] for _ in self.requests]

    def forward_batch_generation(self, batch: Any, pp_proxy_tensors: Any = None, is_verify: bool = False) -> Any:
        """Run the target over the trees of a batch; each node sees its text, its ancestors and itself."""
        assert is_verify
        nodes = batch.spec_info.draft_token_num
        masks, flat = [], batch.spec_info.custom_mask
        for kept in self.kept:  # as on a GPU: each node's row covers the text and the tree
            mask, flat = flat.split([nodes * (len(kept) + nodes), flat.numel() - nodes * (len(kept) + nodes)])
            mask = mask.view(nodes, -1)
            assert mask[:, : len(kept)].all()
            masks.append(mask[:, len(kept) :])
        assert not flat.numel()
        tokens = batch.input_ids.view(-1, nodes).tolist()
        places = batch.spec_info.positions.view(-1, nodes)
        logits = [
            self._logits(kept, tokens[row], masks[row], places[row])[-nodes:] for row, kept in enumerate(self.kept)
        ]
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=torch.cat(logits)), can_run_cuda_graph=False
        )

    @torch.no_grad()
    def _logits(self, kept: list[int], tree: Any = (), mask: Any = None, places: Any = None) -> torch.Tensor:
        ids = torch.tensor([[*kept, *tree]])
        positions, sees = torch.arange(ids.shape[1])[None], torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        if mask is not None:
            sees[len(kept) :, len(kept) :] = mask
            positions[0, len(kept) :] = places
        barred = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
        return self.model(ids, attention_mask=barred[None, None], position_ids=positions, use_cache=False).logits[0]
