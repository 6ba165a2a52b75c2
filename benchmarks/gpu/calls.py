"""Whole calls with random weights: memory, time to first token, cost of `accelerate`, and kernels of experts.

    python -m benchmarks.gpu.calls memory --shape 8B --shape window
    python -m benchmarks.gpu.calls start --shape 1B --shape 8B
    python -m benchmarks.gpu.calls experts --shape experts

- memory: peak allocation of a call besides the weights, with `generate` and accelerated, eager and captured, after
  prompts of 4k, 16k and 32k tokens. The goal is keys and values of at most 1.25 times those of plain decoding.
- start: seconds of `accelerate` with its captures, of the first call, and to the first token of a later call.
- experts: `generate` runs a mixture of experts with other kernels in decoding than in the prefill. Measures seconds of
  a forward pass over 8 to 64 rows with each kernel, and records the kernels of an accelerated call.

Rows are appended to those of `benchmarks.gpu.steps`, in the same file and report; existing rows are not measured again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import torch
import transformers
import typer
from rich.console import Console
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from token_recycling import accelerate, decelerate
from token_recycling._util.device import synchronize

from .report import write_report
from .rows import Row, opened
from .shapes import SHAPES, made

MEMORY_CONTEXTS, START_CONTEXTS, EXPERT_CONTEXTS = (4096, 16384, 32768), (512, 4096), (512,)
EXPERT_ROWS = (1, 8, 16, 32, 64)
_TOKENS, _ROUNDS = 32, 10
KINDS = {"generate": None, "eager": False, "captured": True}
"""Argument `fast` of `accelerate` for each kind of call; None for transformers' own decoding."""

Measurement = Callable[[PreTrainedModel], Row]


class _FirstToken(BaseStreamer):
    """Records the time of the first token after the prompt."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._calls, self.at = device, 0, 0.0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:  # the first `put` is the prompt
            synchronize(self._device)
            self.at = time.perf_counter()

    def end(self) -> None: ...


def measurements(what: str, shape: str, contexts: list[int], kinds: list[str]) -> Iterator[tuple[Row, Measurement]]:
    """Yield the keys of each row to measure of a shape, with the function that measures it."""
    for context in contexts:
        at = {"shape": shape, "context": context, "what": what}
        if what == "experts":
            for implementation in ("grouped_mm", "batched_mm"):
                for rows in EXPERT_ROWS:
                    key = {**at, "kind": implementation, "nodes": rows}
                    yield key, partial(_experts, implementation=implementation, context=context, rows=rows)
            yield {**at, "kind": "used", "nodes": 8}, partial(_experts_used, context=context)
        else:
            run = _peak if what == "memory" else _start
            for kind in kinds:
                yield {**at, "kind": kind, "nodes": 1}, partial(run, context=context, fast=KINDS[kind])


def _call(model: PreTrainedModel, context: int, streamer: BaseStreamer | None = None) -> float:
    """Decode some tokens after a random prompt; return the start time of the call."""
    ids = torch.randint(1, model.config.vocab_size, (1, context), device=model.device)
    synchronize(model.device)
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_TOKENS, do_sample=False, streamer=streamer)
    synchronize(model.device)
    return began


def _peak(model: PreTrainedModel, context: int, fast: bool | None) -> Row:
    """Return the peak bytes that a call allocates besides the weights; 0 on a CPU, where torch does not count them."""
    on_card = model.device.type == "cuda"
    if fast is not None:
        accelerate(model, fast=fast)
    try:
        _call(model, context)  # captures, and warms up the allocator
        if on_card:
            before = torch.cuda.memory_allocated(model.device)
            torch.cuda.reset_peak_memory_stats(model.device)
        _call(model, context)
        peak = torch.cuda.max_memory_allocated(model.device) - before if on_card else 0
    finally:
        if fast is not None:
            decelerate(model)
    return {"bytes": peak, "kv_bytes": _kv_bytes(model, context + _TOKENS)}


def _kv_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of keys and values of a plain call."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    kept = tokens if window is None else min(tokens, window)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * kept * model.dtype.itemsize


def _start(model: PreTrainedModel, context: int, fast: bool | None) -> Row:
    """Return the seconds of `accelerate`, of the first call, and to the first token of the third call."""
    began = time.perf_counter()
    if fast is not None:
        accelerate(model, fast=fast)
    synchronize(model.device)
    made_in = time.perf_counter() - began
    try:
        began = _call(model, context)
        first_call = time.perf_counter() - began
        _call(model, context)
        watch = _FirstToken(model.device)
        began = _call(model, context, watch)
    finally:
        if fast is not None:
            decelerate(model)
    return {"seconds": watch.at - began, "accelerate": made_in, "first_call": first_call}


@torch.no_grad()
def _experts(model: PreTrainedModel, implementation: str, context: int, rows: int) -> Row:
    """Return the seconds of a forward pass over `rows` rows after a prompt: the best of several rounds."""
    before = model.get_experts_implementation()
    model.set_experts_implementation(implementation)
    try:
        ids = torch.randint(1, model.config.vocab_size, (1, context), device=model.device)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        more, seconds = ids[:, :rows], float("inf")
        for done in range(_ROUNDS + 1):
            synchronize(model.device)
            began = time.perf_counter()
            model(input_ids=more, past_key_values=cache, use_cache=True)
            synchronize(model.device)
            if done:
                seconds = min(seconds, time.perf_counter() - began)
            cache.crop(-rows)
    finally:
        model.set_experts_implementation(before)
    return {"seconds": seconds}


def _experts_used(model: PreTrainedModel, context: int) -> Row:
    """Return the kernels of the last forward pass of a plain and of an accelerated call."""
    return {"used": {"generate": _kernel_of_last_pass(model, context), "accelerated": _accelerated(model, context)}}


def _accelerated(model: PreTrainedModel, context: int) -> str:
    accelerate(model, fast=False)
    try:
        return _kernel_of_last_pass(model, context)
    finally:
        decelerate(model)


def _kernel_of_last_pass(model: PreTrainedModel, context: int) -> str:
    """Return the function of transformers that computed experts last in a call, as seen by Python's profiler: with a
    hook of ours the call would fall back to `generate`.
    """
    used = "none"

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal used
        if event == "call" and frame.f_code.co_name.endswith("_experts_forward"):
            used = frame.f_code.co_name.removesuffix("_experts_forward")

    sys.setprofile(note)
    try:
        _call(model, context)
    finally:
        sys.setprofile(None)
    return used


def main(
    what: Annotated[Literal["memory", "start", "experts"], typer.Argument(help="kind of measurement")],
    shape: Annotated[list[str], typer.Option(help=f"one of {', '.join(SHAPES)}; repeatable")],
    context: Annotated[list[int] | None, typer.Option(help="tokens of the prompt; repeatable")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to test the program")] = "cuda",
    dtype: Annotated[str, typer.Option(help="data type of the weights")] = "bfloat16",
    output: Annotated[Path, typer.Option(help="folder for rows.jsonl and report.md")] = Path("docs/results/gpu"),
) -> None:
    """Run the missing measurements, and write the report. Exit status 1 if one failed."""
    if unknown := sorted({*shape} - {*SHAPES}):
        raise typer.BadParameter(f"unknown shape {', '.join(unknown)}; choose from {', '.join(SHAPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"no CUDA device found for --device {device}; test with --device cpu --shape tiny")
    transformers.utils.logging.set_verbosity_error()
    place, kind = torch.device(device), getattr(torch, dtype)
    say, rows, where = Console(stderr=True, width=120), *opened(output, place, kind)
    defaults = {"memory": MEMORY_CONTEXTS, "start": START_CONTEXTS, "experts": EXPERT_CONTEXTS}
    contexts = sorted(context or defaults[what])
    kinds = [name for name in KINDS if name != "captured" or place.type == "cuda"]
    failed = False
    for name in shape:
        missing = [(key, run) for key, run in measurements(what, name, contexts, kinds) if not rows.has(**key)]
        if not missing:
            continue
        model = made(name, max(contexts) + 2 * _TOKENS + max(EXPERT_ROWS), place, kind)
        for key, run in missing:
            try:
                result = run(model)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an error becomes a row and does not stop the others
                result, failed = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}, True
            rows.add({**key, **result})
            say.print(*{**key, **result}.values(), highlight=False)
        del model
    write_report(output, rows, where, f"python -m benchmarks.gpu.calls {' '.join(sys.argv[1:])}".strip())
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
