"""The command line: `token-recycling generate | compare | check | matrix | drafters`.

It stands on the library's surface and adds only what a terminal needs. torch and transformers are imported by the
commands that need them, so that help and wrong usage answer at once.
"""

from __future__ import annotations

import contextlib
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from . import console, loading, running

app = typer.Typer(
    cls=console.OneLineErrors,
    help="The same text from any Hugging Face decoder-only model, in fewer steps.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class DType(str, Enum):
    """What `--dtype` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the hub.")]
Drafting = Annotated[
    str, typer.Option("--drafter", metavar="SPEC", help="Drafter with options, such as recycling:k=16,tree=paper.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
DTypeOption = Annotated[
    DType | None, typer.Option("--dtype", help="Type of the weights; default float32 on a CPU, else auto, the file's.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default the accelerator if there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default torch's choice.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Put prompts into the chat template; default if the tokenizer has one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Shows the version, or help where no command is given."""
    if version:
        print(f"token-recycling {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; default --file or standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    matrix: Annotated[Path | None, typer.Option(help="Matrix file: loaded if there, saved at the end.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics, to standard error.")] = False,
    drafter: Drafting = "recycling",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; above, tokens are drawn.")] = 0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the likeliest with this share.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from this many likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End after this text; may be given repeatedly.")] = None,
    dtype: DTypeOption = None,
    device: Device = None,
    threads: Threads = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Continues a prompt, and streams the text; Ctrl-C keeps what was learned."""
    sampling = running.sampling(temperature, top_p, top_k, seed)
    if file is not None and file.is_dir():
        raise ValueError(
            f"expected a file with one prompt, got the folder {file}; `token-recycling compare` takes folders"
        )
    (given,) = loading.read_prompts([] if prompt is None else [prompt], file)
    made, loaded = running.drafter_and_model(drafter, model, dtype and dtype.value, device, threads)
    ids = loading.encode(loaded, given, running.chat(loaded, chat))
    if matrix is not None:
        loading.load_matrix(loaded, made, matrix)
    stops = {"stop_strings": stop, "tokenizer": loaded.tokenizer} if stop else {}
    arguments = loading.arguments(loaded, ids, max_new_tokens, **sampling, **stops)

    from .streaming import IncrementalText, StepRecorder, decoded

    text = IncrementalText(loaded.tokenizer)
    waiting = contextlib.ExitStack()

    def show(tokens: list[int]) -> None:
        waiting.close()
        if not as_json:
            print(text.push(tokens), end="", flush=True)

    recorder = StepRecorder(show)
    with waiting:
        waiting.enter_context(console.working(f"reading the prompt, {ids.shape[1]} tokens"))
        acceleration, interrupted = running.run(loaded, made, arguments, recorder, matrix, measure=stats or as_json)
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


@app.command()
def compare(
    model: Model,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPTS]...", help="Texts to continue.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File with a prompt, or folder of such files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first N prompts only.")] = None,
    drafter: Drafting = "recycling",
    max_new_tokens: MaxNewTokens = 128,
    dtype: DTypeOption = None,
    device: Device = None,
    threads: Threads = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Decodes prompts plain and recycled: the same text or not, and how much faster. Exit status 1 if any differs."""
    given = loading.read_prompts(texts or [], prompts)[:limit]
    made, loaded = running.drafter_and_model(drafter, model, dtype and dtype.value, device, threads)
    through_template = running.chat(loaded, chat)
    encoded = [loading.encode(loaded, prompt, through_template) for prompt in given]

    from ..drafting import make_drafter
    from . import side_by_side
    from .streaming import decoded, pieces

    # First calls cost extra on both sides; what is learned here goes with the drafter that learned it.
    throw_away = make_drafter(drafter)
    with console.working("warming up"):
        side_by_side.compare(loaded.model, loading.arguments(loaded, encoded[0], 16), throw_away, plain_first=True)
    out = Console()
    if not as_json:
        console.legend(out, throw_away.describe())
    found = []
    for place, (prompt, ids) in enumerate(zip(given, encoded, strict=True)):
        arguments = loading.arguments(loaded, ids, max_new_tokens)
        with console.working(f"prompt {place + 1} of {len(given)}, plain and recycled", place, len(given)):
            plain_first = place % 2 == 0
            found.append(side_by_side.compare(loaded.model, arguments, made, plain_first, *prompt))
        if not as_json:
            title = f"{place + 1} of {len(given)}"
            console.print_comparison(out, title, found[-1], pieces(loaded.tokenizer, found[-1].steps))
    summary = side_by_side.summary(found)
    if as_json:
        rows = [{**one.as_dict(), "text": decoded(loaded.tokenizer, one.recycled.tokens)} for one in found]
        console.print_json({"prompts": rows, "summary": summary})
    else:
        console.print_summary(out, summary)
    if not summary["identical"]:
        raise typer.Exit(1)


@app.command()
def check(
    model: Model,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Load the weights, and compare a tree with linear decoding.")
    ] = False,
    dtype: DTypeOption = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Says whether and how a model can be accelerated, and why not. Exit status 1 if it cannot."""
    loading.check_source(model)
    with console.working(f"loading {model}"):
        found = loading.support_of(model, self_test, dtype and dtype.value, device, threads)
    if as_json:
        console.print_json(found.as_dict())
    else:
        console.print_support(Console(), found)
    if not found.supported:
        raise typer.Exit(1)


@app.command()
def matrix(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A matrix file, as written by --matrix.")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer shows tokens as text.")] = None,
    token: Annotated[list[str] | None, typer.Option(help="Row to show: an id, or a text with --model.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many of the busiest rows to show.")] = 12,
    as_json: Json = False,
) -> None:
    """Shows what a saved matrix holds: its header, and the rows that drafts pass through most, or those asked for."""
    if not file.is_file():
        raise ValueError(f"expected a matrix file, got {file}: there is none")
    with console.working(f"reading {file.name}"):
        from ..matrix import fingerprint, read_matrix
        from . import listing

        found, header = read_matrix(file)
        tokenizer = None if model is None else loading.load_tokenizer(model)
    if tokenizer is not None and header["tokenizer"] not in ("", fingerprint(tokenizer)):
        raise ValueError(
            f"{file}: expected the tokenizer {header['tokenizer']}, got {fingerprint(tokenizer)}; "
            "give the model that the matrix was learned from"
        )
    shown = listing.tokens_of(token, tokenizer, found.vocab_size) if token else listing.busiest(found, rows)
    held = {
        "file": str(file),
        "format_version": int(header["version"]),
        "vocab_size": found.vocab_size,
        "k": found.k,
        "bytes": file.stat().st_size,
        "tokenizer": header["tokenizer"] or None,
        "rows_filled": int(found.filled.sum()),
        "rows": listing.matrix_rows(found, shown, tokenizer),
    }
    if as_json:
        console.print_json(held)
    else:
        console.print_matrix(Console(), held)


@app.command()
def drafters(as_json: Json = False) -> None:
    """Lists the drafters and their options, as --drafter NAME:OPTION=VALUE,... takes them."""
    with console.working("looking for drafters"):
        from . import listing

        found = listing.drafters()
    if as_json:
        console.print_json({"drafters": found})
    else:
        console.print_drafters(Console(), found)
