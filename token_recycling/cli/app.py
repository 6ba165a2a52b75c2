"""The command line: `token-recycling COMMAND`; each command is a file in `commands/` and is registered here.

Commands use the library's public functions and add only terminal output. They import torch and transformers when they
run, so that help and usage errors appear immediately.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .commands.bench import bench
from .commands.chat import chat
from .commands.check import check
from .commands.compare import compare
from .commands.datastore import datastore
from .commands.drafters import drafters
from .commands.generate import generate
from .commands.matrix import matrix
from .commands.report import report
from .commands.serve import serve
from .commands.train import train
from .commands.warm import warm
from .console import OneDrafter, OneLineErrors
from .options import flattened

app = typer.Typer(
    cls=OneLineErrors,
    help="Lossless speculative decoding for Hugging Face causal LMs.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Show the version, or print help if no command is given."""
    if version:
        print(f"token-recycling {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, chat, compare, serve, bench, report, check, warm, matrix, drafters):
    app.command(cls=OneDrafter)(flattened(command))
app.add_typer(datastore, name="datastore")
app.add_typer(train, name="train")
