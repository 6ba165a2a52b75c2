"""`token-recycling datastore`: datastores of past text for the drafter rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..._util.prompts import bytes_of, text_files
from ...model import loading
from .. import console, running
from ..options import Json

datastore = console.group("Datastores of past text, for the drafter rest.")


@datastore.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Text files, or folders of them; - is standard input.")
    ],
    model: Annotated[str, typer.Option(help="Model whose tokenizer reads them: folder, or name on the hub.")],
    output: Annotated[Path, typer.Option(help="File to write; an old one is replaced when the new one is complete.")],
    as_json: Json = False,
) -> None:
    """Build a datastore from text files, one document each; use it as --drafter rest:datastore=FILE."""
    found = text_files(files)
    if output.is_dir():
        raise ValueError(f"--output must be a file, got the folder {output}")
    loading.check_source(model)
    with running.loading_shown(model):
        from ...drafters import rest as library
        from ...recycling.matrix_file import fingerprint
        from ...training.corpus import documents

        tokenizer = loading.load_tokenizer(model)
    with console.working("reading", bytes_of(found)) as advance:
        ids = list(documents(found, tokenizer, advance))
    with console.working(f"indexing {sum(map(len, ids)):,} tokens"):
        made = library.build(ids, output, fingerprint(tokenizer))
    held = {
        "file": str(output),
        "documents": int((made.tokens == library.END).sum()),
        "tokens": len(made),
        "bytes": output.stat().st_size,
        "tokenizer": made.tokenizer,
    }
    if as_json:
        console.print_json(held)
    else:
        print(f"{output}: documents {held['documents']:,}, tokens {held['tokens']:,}, bytes {held['bytes']:,}")
