"""Arguments and options shared by several commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..drafters._registry import check_spec, drafter_names

if TYPE_CHECKING:
    from ..model.loading import Loaded


def completed_drafters(typed: str) -> list[str]:
    """Return completions of a drafter's name."""
    return [name for name in drafter_names() if name.startswith(typed)]


def checked_drafter(spec: str) -> str:
    """Return a drafter spec whose name and options are right."""
    check_spec(spec)
    return spec


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, .gguf file, or name on the hub.")]
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
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Type of the weights; default float32 on a CPU, else auto, the file's."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default the accelerator if there is one.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="MAP",
        help="Distribute the model over several devices: auto, balanced, sequential or a device; needs accelerate.",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default torch's choice.")]
Prepack = Annotated[
    bool | None,
    typer.Option(
        help="Prepack CPU weights (doubles weight memory); default where the copy takes a quarter of memory at most."
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Apply the chat template; default if the tokenizer has one."),
]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus (top-p) sampling threshold.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from this many most probable tokens.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the samples.")]
Reproducible = Annotated[
    bool,
    typer.Option("--reproducible", help="Give equal requests equal outputs in 16 bits too, whatever came before."),
]
FastOption = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        "--fast", help="Capture forward passes as CUDA graphs: auto where possible on CUDA, on or an error, off never."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@dataclass(frozen=True)
class ModelOptions:
    """How a command loads its model."""

    name: str
    """Folder, .gguf file, or name on the hub."""
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    threads: int | None = None
    prepack: bool | None = None
    reproducible: bool = False

    def load(self) -> Loaded:
        """Load model and tokenizer; raises ValueError or OSError for what cannot be loaded."""
        from ..model import loading

        return loading.load(
            self.name, self.dtype, self.device, self.threads, self.prepack, self.reproducible, self.device_map
        )
