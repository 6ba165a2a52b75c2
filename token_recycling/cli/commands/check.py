"""`token-recycling check`: whether a model can be accelerated, and why not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from .. import console, loading
from ..options import Device, DTypeOption, Json, Model, Threads


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
