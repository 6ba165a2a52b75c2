"""`token-recycling tune`: what trees cost on this machine, and which pay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...model import loading
from .. import console, running
from ..options import Chat, Device, DType, Json, Model, Threads, completed_drafters


def tune(
    model: Model,
    seconds: Annotated[
        float,
        typer.Option(min=0, help="Most time for each curve, two rounds at least, twenty at most; 20 is leisurely."),
    ] = 2.0,
    length: Annotated[
        int | None, typer.Option(min=1, help="Longest text to measure for; default 1024, or the model's limit.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File with a prompt, or folder of such files, to decode with what was measured; - is standard input."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of --prompts, take the first N only.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate for each of --prompts; default 128.")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="File to write the fixed tree to that --prompts show to pay most.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of --template; default as many as pay.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            metavar="SPEC",
            autocompletion=completed_drafters,
            help="With --prompts: whose candidates a fixed tree is for; its own tree should try every rank. "
            "Default recycling:tree=paper.",
        ),
    ] = None,
    prime: Annotated[
        bool, typer.Option("--prime", help="Make the rows for recycling:primed=true too, if there are none.")
    ] = False,
    dtype: DType = None,
    device: Device = None,
    threads: Threads = None,
    chat: Chat = None,
    as_json: Json = False,
) -> None:
    """Measures what trees cost on this machine, saves it for `accelerate`, and shows which size of tree pays."""
    _check(prompts, template, nodes, limit=limit, max_new_tokens=max_new_tokens, drafter=drafter, chat=chat)
    given = [] if prompts is None else loading.read_prompts([], prompts)[:limit]
    recorder, loaded = running.drafter_and_model(drafter or "recycling:tree=paper", model, dtype, device, threads)
    encoded = running.encoded(loaded, given, chat)

    from ...model.pass_costs import PassCosts
    from ...model.tree_model import TreeModel
    from .. import tuning, tuning_tables

    out, target = Console(quiet=as_json), TreeModel(loaded.model)
    costs = PassCosts(target)
    longest = max([length or min(1024, target.max_length or 1024), *(ids.shape[1] for ids in encoded)])
    result = tuning.measured(costs, longest, seconds)
    forecast = tuning.forecasts(costs, longest)
    tuning_tables.print_curves(out, result["setting"], result["curves"], forecast)
    if given:
        result.update(tuning.decoded(loaded, costs, encoded, recorder, max_new_tokens or 128, nodes))
        tuning_tables.print_grown(out, result["grown"])
        tuning_tables.print_fixed(out, result["fixed"])
    else:
        result["forecast"] = forecast
        tuning_tables.print_forecast(out, forecast)
    if template is not None:
        result["template"] = str(tuning.write_template(template, result["fixed"]["paths"]))
    if prime:
        result["primed"] = str(tuning.primed(target))
    tuning_tables.print_files(out, result)
    if as_json:
        console.print_json(result)


def _check(prompts: Path | None, template: Path | None, nodes: int | None, **others: object) -> None:
    """Refuses options that would do nothing, before anything slow begins; `others` too need --prompts."""
    for name, value in {"template": template, **others}.items():
        if prompts is None and value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"expected --prompts with {option}, got none; give a file or a folder of prompts")
    if nodes is not None and template is None:
        raise ValueError("expected --template with --nodes, got none; give a file to write the tree to")
    if template is not None and template.is_dir():
        raise ValueError(f"expected a file for --template, got the folder {template}")
