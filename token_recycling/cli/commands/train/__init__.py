"""`token-recycling train`: the small parts that some drafters need beside a model; a file here for each."""

from __future__ import annotations

import typer

from .medusa import medusa
from .specdec_pp import specdec_pp

train = typer.Typer()


@train.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Trains what some drafters need beside a model."""
    if context.invoked_subcommand is None:
        print(context.get_help())


train.command("medusa")(medusa)
train.command("specdec-pp")(specdec_pp)
