"""`token-recycling matrix`: show the contents of a saved matrix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...model import loading
from .. import console, running
from ..options import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...drafters.published import AdjacencyMatrix


def matrix(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A matrix file, as written by --matrix.")],
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer shows tokens as text.")] = None,
    token: Annotated[list[str] | None, typer.Option(help="Row to show: a token id, or text with --model.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of most used rows to show.")] = 12,
    as_json: Json = False,
) -> None:
    """Show the contents of a saved matrix: sizes, and the most used rows or those of --token."""
    if not file.is_file():
        raise ValueError(f"there is no matrix file at {file}")
    with console.working(f"reading {file.name}"):
        from ...drafters.published import matrix_in
        from ...recycling.matrix_file import fingerprint, read_matrix_file

        tensors, header = read_matrix_file(file)
        contents = matrix_in(tensors)
    tokenizer = None
    if model is not None:
        with running.loading_progress(model):
            tokenizer = loading.load_tokenizer(model)
    if tokenizer is not None and header["tokenizer"] not in ("", fingerprint(tokenizer)):
        raise ValueError(
            f"{file} was learned with the tokenizer {header['tokenizer']}, got {fingerprint(tokenizer)}; "
            "use the model that it was learned from"
        )
    shown = _tokens_of(token, tokenizer, contents.vocab_size) if token else _busiest(contents, rows)
    facts = {
        "file": str(file),
        "format_version": int(header["version"]),
        "vocab_size": contents.vocab_size,
        "k": contents.k,
        "bytes": file.stat().st_size,
        "tokenizer": header["tokenizer"] or None,
        "rows_filled": int(contents.filled.sum()),
        "longer_contexts": int((tensors["context_keys"] > 0).sum()) if "context_keys" in tensors else 0,
        "history_tokens": int((tensors["history"] >= 0).sum()) if "history" in tensors else 0,
        "rows": _rows(contents, shown, tokenizer),
    }
    if as_json:
        console.print_json(facts)
    else:
        _print(Console(), facts)


def _busiest(matrix: AdjacencyMatrix, rows: int) -> list[int]:
    """Return the filled rows that drafts use most: those of the most frequent candidates."""
    import torch

    filled = matrix.filled
    counts = torch.bincount(matrix.candidates[filled].flatten().long(), minlength=matrix.vocab_size)
    order = torch.where(filled, counts, -1).argsort(descending=True, stable=True)
    return order[: min(rows, int(filled.sum()))].tolist()


def _tokens_of(names: Iterable[str], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Return the token ids that a user names, as digits or as text, of which all tokens are returned; raises
    ValueError.
    """
    tokens: list[int] = []
    for name in names:
        if name.isascii() and name.isdigit():
            if int(name) >= vocab_size:
                raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, got {name}")
            tokens.append(int(name))
        elif tokenizer is None:
            raise ValueError(f"{name!r} is not a token id; to look up text, also give --model")
        else:
            tokens += tokenizer(name, add_special_tokens=False)["input_ids"]
    return tokens


def _rows(
    matrix: AdjacencyMatrix, tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[dict[str, Any]]:
    """Return rows as plain values, with token texts if there is a tokenizer."""

    def read(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token])

    rows = ((token, matrix.candidates[token].tolist()) for token in tokens)
    return [
        {"token": token, "text": read(token), "candidates": row, "candidate_texts": list(map(read, row))}
        for token, row in rows
    ]


def _print(out: Console, facts: dict[str, Any]) -> None:
    """Print a saved matrix: the header, then rows of a token and its candidates."""
    share = console.percent(facts["rows_filled"] / facts["vocab_size"])
    console.say(
        out,
        f"{facts['file']}: adjacency matrix, format version {facts['format_version']}\n"
        f"{facts['vocab_size']:,} tokens x {facts['k']} candidates, {facts['bytes']:,} bytes\n"
        f"tokenizer: {facts['tokenizer'] or 'not stated'}\n"
        f"rows filled: {facts['rows_filled']:,} ({share})\n"
        f"contexts of two tokens and more: {facts['longer_contexts']:,}\n"
        f"earlier outputs: {facts['history_tokens']:,} tokens",
    )
    if not facts["rows"]:
        return
    table = Table("after", "candidates, best first")
    for row in facts["rows"]:
        shown = [_token(token, text) for token, text in zip(row["candidates"], row["candidate_texts"], strict=True)]
        table.add_row(Text(_token(row["token"], row["text"])), Text("  ".join(shown)))
    out.print(table)


def _token(token: int, text: str | None) -> str:
    return str(token) if text is None else f"{token} {text!r}"
