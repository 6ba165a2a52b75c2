"""`token-recycling generate`: continues a prompt and streams the text."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...model import loading
from .. import console, running
from ..options import Chat, Device, Drafting, DType, Json, MaxNewTokens, Model, Threads


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue, or - for standard input; default --file, else standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with the prompt; - is standard input.")] = None,
    matrix: Annotated[Path | None, typer.Option(help="Matrix file: loaded if there, saved at the end.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics, to standard error.")] = False,
    drafter: Drafting = "recycling",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; above, tokens are drawn.")] = 0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the likeliest with this share.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End after this text; may be given repeatedly.")] = None,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Continues a prompt, and streams the text; Ctrl-C keeps what was learned."""
    sampling = _sampling(temperature, top_p, top_k, seed)
    if file is not None and file.is_dir():
        raise ValueError(
            f"expected a file with one prompt, got the folder {file}; `token-recycling compare` takes folders"
        )
    given = loading.read_prompts([] if prompt is None else [prompt], file)
    made, loaded = running.drafter_and_model(drafter, model, dtype, device, threads)
    (ids,) = running.encoded(loaded, given, chat)
    if matrix is not None:
        loading.load_matrix(loaded, made, matrix)
    stops = {"stop_strings": stop, "tokenizer": loaded.tokenizer} if stop else {}
    arguments = loading.arguments(loaded, ids, max_new_tokens, **sampling, **stops)

    from ..._util.text_stream import IncrementalText, StepRecorder, decoded
    from ...hf.accelerate import accelerated
    from ...recycling.matrix import fingerprint

    text = IncrementalText(loaded.tokenizer)
    waiting = contextlib.ExitStack()

    def show(tokens: list[int]) -> None:
        waiting.close()
        if not as_json:
            print(text.push(tokens), end="", flush=True)

    recorder = StepRecorder(show)
    interrupted = False
    with waiting, accelerated(loaded.model, made) as acceleration:
        waiting.enter_context(console.working(f"reading the prompt, {ids.shape[1]} tokens"))
        acceleration.stats.synchronize = stats or as_json
        try:
            loaded.model.generate(**arguments, streamer=recorder)
        except KeyboardInterrupt:
            interrupted = True
        finally:  # whatever ends it, what was learned is saved
            if matrix is not None and recorder.steps:
                made.matrix.save(matrix, fingerprint(loaded.tokenizer))  # type: ignore[attr-defined]
    if as_json:
        result = {"text": decoded(loaded.tokenizer, recorder.tokens), "tokens": recorder.tokens}
        console.print_json({**result, "interrupted": interrupted, "stats": acceleration.stats.as_dict()})
    else:
        print(text.flush())
        if stats:
            console.print_stats(Console(stderr=True), acceleration.stats)
    if len(recorder.tokens) == arguments["max_new_tokens"] < max_new_tokens:
        console.note(f"the text ends where the model's context of {loaded.context} tokens does")
    if interrupted:
        raise typer.Exit(130)


def _sampling(temperature: float, top_p: float | None, top_k: int | None, seed: int | None) -> dict[str, Any]:
    """Arguments of `model.generate`, among them all for which there is an option. For what there is none, such as a
    repetition penalty, the model's own configuration holds, as in `model.generate` itself.
    """
    if not temperature:
        if (top_p, top_k, seed) != (None, None, None):
            raise ValueError(
                "expected --temperature above 0 with --top-p, --top-k or --seed, got 0, which draws nothing"
            )
        return {}
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": 0 if top_k is None else top_k,
    }
