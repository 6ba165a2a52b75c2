"""Stages of the GPU measurements, most valuable first; each is a command that resumes where it stopped."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
METHODS = ("generate", "prompt_lookup_hf:n=10", "plain", "published", "recycling")
"""`plain` is our own loop without drafts; it is captured on a GPU, so it is the baseline of captured decoding."""
BATCHES = (1, 8, 32)
Command = tuple[str, ...]
_VLLM = ("vllm", "arctic_inference")  # suffix decoding in vLLM is in a package of its own


@dataclass(frozen=True)
class Stage:
    """Measurements of one kind."""

    name: str
    minutes: float
    """Estimated time on an H100."""
    sizes: tuple[tuple[Command, ...], ...]
    """Commands to run in order, for each size. If a command runs out of memory, the next size is tried."""
    needs: tuple[str, ...] = ()
    """Required libraries; the stage is skipped without them."""

    @property
    def missing(self) -> list[str]:
        """Return the required libraries that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def stages(output: Path, model: str, data: str) -> Iterator[Stage]:
    """Yield the stages on a GPU. `model` is a folder or .gguf file, `data` is as for `token-recycling bench`."""
    yield Stage("tests", 10, ((_module("pytest", "-q", "-m", "cuda", "--device", "cuda"),),))
    for shape, minutes in (("8B", 10), ("3B", 8), ("1B", 6), ("7B", 9)):
        steps = _module("benchmarks.gpu.steps", "--shape", shape, "--seconds", "36000", "--output", str(output))
        shorter = ((512, 2048, 8192), (512, 2048), (512,))
        yield Stage(f"steps {shape}", minutes, tuple(((*steps, *_each("--context", some)),) for some in shorter))
    memory, start = (_module("benchmarks.gpu.calls", what, "--output", str(output)) for what in ("memory", "start"))
    contexts = ((4096, 16384, 32768), (4096, 16384), (4096,))
    memory_shapes = _each("--shape", ("8B", "window"))
    yield Stage("memory", 8, tuple(((*memory, *memory_shapes, *_each("--context", some)),) for some in contexts))
    yield Stage("start", 5, (((*start, *_each("--shape", ("1B", "8B"))),),))
    experts = _module("benchmarks.gpu.calls", "experts", "--shape", "experts", "--output", str(output))
    yield Stage("experts", 4, ((experts,),))
    few = ("--limit", "2", "--device", "cuda")
    for dtype in ("bfloat16", "float32"):
        sizes = tuple((_bench(model, data, output / dtype, dtype, batches, *few),) for batches in _halved(BATCHES))
        yield Stage(f"texts {Path(model).stem} {dtype}", 12, sizes)
    grown = tuple(
        (
            _grown(ROOT / "build" / "grown" / shape, shape, model),
            _bench(str(ROOT / "build" / "grown" / shape), data, output / shape, "bfloat16", batches, *few),
        )
        for shape, batches in product(("8B", "3B"), _halved(BATCHES))
    )
    yield Stage("texts 8B bfloat16", 25, grown)
    rows = ("--rows", str(output / "vllm.jsonl"))
    vllm = _module("benchmarks.engines", "vllm", "--clock", "wall", *rows)
    yield Stage("vLLM", 20, (((*vllm, *_each("--load", (1, 8, 32, 64))),),), _VLLM)


def rehearsal(output: Path) -> Iterator[Stage]:
    """Yield the same programs with tiny models on the CPU, which test the commands, not their speed."""
    model, data, grown = str(ROOT / "models" / "target"), str(ROOT / "models" / "prompts"), output / "grown"
    less = ("--device", "cpu", "--limit", "1", "--max-new-tokens", "8", "--threads", "1")
    yield Stage(
        "tests", 1, ((_module("pytest", "-q", "-m", "cuda", "--device", "cpu", "tests/cuda/test_sampling.py"),),)
    )
    tiny = ("--shape", "tiny", "--context", "40", "--device", "cpu", "--dtype", "float32", "--few")
    yield Stage("steps tiny", 2, ((_module("benchmarks.gpu.steps", *tiny, "--output", str(output)),),))
    for what, shapes in (("memory", ("tiny", "tiny window")), ("start", ("tiny",)), ("experts", ("tiny experts",))):
        calls = _module("benchmarks.gpu.calls", what, *_each("--shape", shapes), "--context", "40")
        settings = ("--device", "cpu", "--dtype", "float32", "--output", str(output))
        yield Stage(what, 1, (((*calls, *settings),),))
    yield Stage("texts target float32", 1, ((_bench(model, data, output / "float32", "float32", (1, 2), *less),),))
    texts = _bench(str(grown), data, output / "small", "float32", (1, 2), *less)
    yield Stage("texts small float32", 1, ((_grown(grown, "small", model), texts),))
    vllm = _module("benchmarks.engines", "vllm", "--model", model, "--data", data)
    few = ("--limit", "2", "--max-new-tokens", "8", "--load", "1", "--rows", str(output / "vllm.jsonl"))
    yield Stage("vLLM", 2, (((*vllm, *few),),), _VLLM)


def _module(name: str, *arguments: str) -> Command:
    return sys.executable, "-m", name, *arguments


def _each(option: str, values: Sequence[object]) -> Command:
    return tuple(part for value in values for part in (option, str(value)))


def _halved(batches: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the batches, then repeatedly with the largest batch halved."""
    some = tuple(batches)
    while some[-1] > 1:
        yield some
        some = tuple(sorted({*some[:-1], some[-1] // 2}))
    yield some


def _grown(folder: Path, shape: str, model: str) -> Command:
    return _module("benchmarks.gpu.grown", str(folder), "--shape", shape, "--model", model)


def _bench(model: str, data: str, folder: Path, dtype: str, batches: Sequence[int], *more: str) -> Command:
    own = ("--data", data, "--dtype", dtype, "--output", str(folder), "--no-replay", "--repeats", "1")
    methods = _each("--method", METHODS)
    return _module("token_recycling", "bench", model, *own, *more, *methods, *_each("--batch", batches))
