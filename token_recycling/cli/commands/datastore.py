"""`token-recycling datastore`: build datastores of existing text for the drafter rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..._util.prompts import bytes_of, text_files
from ...model import loading
from .. import console, running
from ..options import Json

datastore = console.group("Datastores of existing text for the drafter rest.")


@datastore.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
    ],
    model: Annotated[str, typer.Option(help="Model whose tokenizer encodes them: a folder or a hub name.")],
    output: Annotated[
        Path, typer.Option(help="File to write; an existing file is replaced once the new one is complete.")
    ],
    as_json: Json = False,
) -> None:
    """Build a datastore from text files, one document each; use it as --drafter rest:datastore=FILE."""
    paths = text_files(files)
    if output.is_dir():
        raise ValueError(f"--output must be a file, got the folder {output}")
    loading.check_source(model)
    with running.loading_progress(model):
        from ...drafters import rest as library
        from ...recycling.matrix_file import fingerprint
        from ...training.corpus import documents

        tokenizer = loading.load_tokenizer(model)
    with console.working("reading", bytes_of(paths)) as advance:
        ids = list(documents(paths, tokenizer, advance))
    with console.working(f"indexing {sum(map(len, ids)):,} tokens"):
        datastore_file = library.build(ids, output, fingerprint(tokenizer))
    summary = {
        "file": str(output),
        "documents": int((datastore_file.tokens == library.END).sum()),
        "tokens": len(datastore_file),
        "bytes": output.stat().st_size,
        "tokenizer": datastore_file.tokenizer,
    }
    if as_json:
        console.print_json(summary)
    else:
        print(f"{output}: documents {summary['documents']:,}, tokens {summary['tokens']:,}, bytes {summary['bytes']:,}")
