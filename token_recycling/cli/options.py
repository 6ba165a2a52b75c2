"""Arguments and options shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from .._util.options import option
from ..drafters._registry import check_spec, drafter_names

if TYPE_CHECKING:
    from ..model.loading import Loaded


def completed_drafters(typed: str) -> list[str]:
    """Return completions of a drafter name."""
    return [name for name in drafter_names() if name.startswith(typed)]


def checked_drafter(spec: str) -> str:
    """Return a drafter spec after checking its name and options."""
    check_spec(spec)
    return spec


def checked_seed(seed: int | None) -> int | None:
    """Return a seed after checking that torch accepts it."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed must be a number of 64 bits, got {seed}")
    return seed


_loading = partial(option, rich_help_panel="Model")
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file or hub name.")]
Drafting = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="SPEC",
        help="Drafter with options, such as recycling:k=16,tree=paper.",
        autocompletion=completed_drafters,
        callback=checked_drafter,
    ),
]
Prepack = Annotated[
    bool | None,
    typer.Option(
        rich_help_panel="Model",
        help="Prepack CPU weights (doubles weight memory); default if the copy takes at most a quarter of memory.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Apply the chat template; default if the tokenizer has one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print a single JSON object and nothing else.")]


def declared(field: Field[Any], flag: str = "", **more: Any) -> Any:
    """Return the command-line option for a dataclass field made by `option`, which declares its help and bounds."""
    return typer.Option(flag or f"--{field.name.replace('_', '-')}", **field.metadata, **more)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each dataclass parameter is replaced by one option per field, since Typer has no option
    groups. Defaults come from the parameter's default if it has one, else from the class.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        annotations, defaults = get_type_hints(group, include_extras=True), parameter.default
        for field in fields(group):
            annotation = annotations[field.name]
            if "help" in field.metadata:
                annotation = Annotated[annotation, declared(field)]
            default = field.default if defaults is parameter.empty else getattr(defaults, field.name)
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if default is MISSING else default,
                    annotation=annotation,
                )
            )

    def called(**values: Any) -> None:
        group_values = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **group_values)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True)
class DeviceOptions:
    """A model, its device, dtype and threads."""

    model: Model
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = _loading(
        None, "Data type of the weights; default float32 on a CPU, else auto: that of the checkpoint."
    )
    device: str | None = _loading(None, "cpu, cuda, cuda:1, ...; default the accelerator, if there is one.")
    threads: int | None = _loading(None, "CPU threads; default torch's choice.", 1)

    def load(self) -> Loaded:
        """Load model and tokenizer; raises ValueError or OSError if loading fails."""
        from ..model import loading

        return loading.load(self.model, self.dtype, self.device, self.threads)


@dataclass(frozen=True)
class ModelOptions(DeviceOptions):
    """Model options of commands that decode."""

    device_map: str | None = _loading(
        None,
        "Distribute the model over several devices: auto, balanced, sequential or a device; needs accelerate.",
        metavar="MAP",
    )
    prepack: Prepack = None

    def load(self, reproducible: bool = False) -> Loaded:
        from ..model import loading

        return loading.load(
            self.model, self.dtype, self.device, self.threads, self.prepack, reproducible, self.device_map
        )


@dataclass(frozen=True)
class DecodingOptions:
    """Options for the drafter and the output length."""

    drafter: Drafting = "recycling"
    max_new_tokens: int = option(256, "Maximum number of new tokens.", 1)
    fast: Literal["auto", "on", "off"] = option(
        "auto", "Capture forward passes as CUDA graphs. auto: if possible; on: fail if impossible; off: never."
    )


@dataclass(frozen=True)
class SamplingOptions:
    """Options for token selection."""

    temperature: float = option(0, "Sampling temperature; 0 is greedy.", 0)
    top_p: float | None = option(None, "Nucleus (top-p) sampling threshold.", 0, max=1)
    top_k: int | None = option(None, "Number of most probable tokens to sample from.", 1)
    seed: int | None = option(None, "Random seed for sampling.", callback=checked_seed)
    reproducible: bool = option(False, "Equal requests give equal outputs in 16 bits too, whatever ran before.")

    def arguments(self) -> dict[str, Any]:
        """Return sampling arguments of `model.generate`. Settings without an option, such as a repetition penalty, stay
        those of the model's own configuration, as in `model.generate` itself.
        """
        if not self.temperature:
            if (self.top_p, self.top_k, self.seed) != (None, None, None):
                raise ValueError("--top-p, --top-k and --seed need --temperature > 0, got 0, which is greedy decoding")
            return {}
        if self.seed is not None:
            import torch

            torch.manual_seed(self.seed)
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or 0,
        }
