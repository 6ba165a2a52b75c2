"""`token-recycling check`: report whether a model can be accelerated, and if not, why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ...model import loading
from .. import console, running
from ..options import DeviceOptions, Json

if TYPE_CHECKING:
    from ...model.info import ModelInfo

_UNTRIED = "experimental, on CUDA only; this check does not run it"


def check(
    model: DeviceOptions,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Load the weights, and compare a tree with linear decoding.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report whether and how a model can be accelerated, or why not. Exit status 1 if it cannot."""
    with running.loading_progress(model.model, weights=self_test):
        support = _support_of(model, self_test)
    if as_json:
        console.print_json(support.as_dict())
    else:
        _print_support(Console(), support)
    if not support.supported:
        raise typer.Exit(1)


def _support_of(model: DeviceOptions, self_test: bool) -> ModelInfo:
    """Return whether and how a model can be accelerated. The weights are loaded only for a self-test."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    from ...model.info import ModelInfo
    from ...model.support import check as checked

    config = loading.load_configuration(model.model)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "one that AutoModelForCausalLM does not know"
        reason = f"the model must be a decoder-only model that generates text, got {kind}"
        return ModelInfo((config.architectures or [config.model_type])[0], config.model_type, reason)
    if self_test:
        weights = loading.load_model(model.model, model.dtype, model.device, model.threads)
        support = checked(weights, self_test=True)
    else:
        with torch.device("meta"):
            support = checked(AutoModelForCausalLM.from_config(config))
    named = config.architectures or [support.name]
    if support.name in named:
        return support
    note = f"config.json names {named[0]}, not {support.name}: if this is a draft head, check its target model instead"
    return dataclasses.replace(support, notes=(*support.notes, note))


def _print_support(out: Console, support: ModelInfo) -> None:
    """Print whether and how a model is supported."""
    lines = [
        ("model", f"{support.name}, family {support.family}"),
        ("supported", "yes" if support.supported else "no"),
        ("because" if support.reason else "how", support.reason or support.how),
    ]
    if support.supported:
        lines.append(("attention", support.attention))
        lines.append(("tested family", "yes" if support.tested else "no"))
        lines.append(("fast path", f"no: {support.no_fast_path}" if support.no_fast_path else _UNTRIED))
    if support.difference is not None:
        lines.append(("self-test", f"logits differ by {support.difference:.1e} at most"))
    lines += [("note", note) for note in support.notes]
    for name, text in lines:
        console.say(out, f"{name:14}{text}")
