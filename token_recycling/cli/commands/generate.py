"""`token-recycling generate`: continue a prompt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..._util.options import SWITCH
from ..._util.prompts import read_prompts
from ...model import loading
from .. import console, running
from ..options import Chat, DecodingOptions, Json, ModelOptions, SamplingOptions


def generate(
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue, or - for standard input; default --file, else standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="File with the prompt; - is standard input.")] = None,
    matrix: Annotated[Path | None, typer.Option(help="Matrix file: loaded if it exists, saved at the end.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics to standard error.")] = False,
    decoding: DecodingOptions = DecodingOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this text; may be given repeatedly.")] = None,
    schema: Annotated[
        str | None, typer.Option(help="JSON schema that constrains the output, or a file with it (extra grammar).")
    ] = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt and stream the output; after Ctrl-C the matrix is still saved."""
    choosing = sampling.arguments()
    if file is not None and file.is_dir():
        raise ValueError(
            f"--file must be a file with one prompt, got the folder {file}; `token-recycling compare` takes folders"
        )
    if sampling.reproducible and matrix is not None:
        raise ValueError("--reproducible and --matrix cannot be combined: the contents of a matrix change the drafts")
    if "" in (stop or ()):
        raise ValueError("--stop must be a text to stop after, got ''")
    stated_schema = None if schema is None else running.stated_schema(schema)
    prompts = read_prompts([] if prompt is None else [prompt], [] if file is None else [file])
    drafter, loaded = running.drafter_and_model(decoding.drafter, model, sampling.reproducible)
    (ids,) = running.encoded(loaded, prompts, chat)
    if matrix is not None:
        loading.load_matrix(loaded, drafter, matrix)
    if stop:
        choosing |= {"stop_strings": stop, "tokenizer": loaded.tokenizer}
    if schema is not None:
        choosing["logits_processor"] = [running.schema_processor(loaded, stated_schema)]
    arguments = running.generate_arguments(loaded, ids, decoding.max_new_tokens, **choosing)

    from ..._util.text_stream import IncrementalText, StepRecorder, decoded
    from ...hf.accelerate import accelerated
    from ...recycling.matrix_file import fingerprint

    text = IncrementalText(loaded.tokenizer)
    waiting = contextlib.ExitStack()

    def show(tokens: list[int]) -> None:
        waiting.close()
        if not as_json:
            print(text.push(tokens), end="", flush=True)

    recorder = StepRecorder(show)
    interrupted = False
    with waiting, accelerated(loaded.model, drafter, fast=SWITCH[decoding.fast]) as acceleration:
        waiting.enter_context(console.working(f"reading the prompt, {ids.shape[1]} tokens"))
        acceleration.stats.synchronize = stats or as_json
        try:
            loaded.model.generate(**arguments, streamer=recorder)
        except KeyboardInterrupt:
            interrupted = True
        finally:  # save learned state even after an error or Ctrl-C
            if matrix is not None and recorder.steps:
                drafter.matrix.save(matrix, fingerprint(loaded.tokenizer))  # type: ignore[attr-defined]
    if as_json:
        result = {"text": decoded(loaded.tokenizer, recorder.tokens), "tokens": recorder.tokens}
        console.print_json({**result, "interrupted": interrupted, "stats": acceleration.stats.as_dict()})
    else:
        print(text.flush(), flush=True)  # before the statistics, also where both go to one pipe
        if stats:
            console.print_stats(Console(stderr=True), acceleration.stats, loaded.model.device)
    if len(recorder.tokens) == arguments["max_new_tokens"] < decoding.max_new_tokens:
        console.note(f"the output ends at the model's context length of {loaded.context} tokens")
    if interrupted:
        raise typer.Exit(130)
