"""A scenario: what to measure, as a YAML file that `token-recycling bench --scenario` reads.

Top-level keys are the options of every run; `runs` names several runs, each with its own. Without `runs` there is one.

    methods: [generate, recycling]
    runs:
      float32: {dtype: float32}
      bfloat16: {dtype: bfloat16}

Imports neither torch nor transformers, so that a wrong file is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._util.options import options_of, read_options
from ..drafters._declared import check_spec

OWN_METHODS = "assisted", "generate", "oracle", "prompt_lookup_hf"
"""Methods that are no drafters: transformers' own, and the oracle."""
COLD = "cold:"
"""Prefix of a method that forgets everything after every prompt."""


@dataclass(frozen=True)
class RunOptions:
    """Options of one run; see `token-recycling bench --help`."""

    data: tuple[str, ...] = ()
    limit: int | None = None
    """Questions per category."""
    methods: tuple[str, ...] = ()
    warm_up: int = 0
    """First questions of every category, decoded unmeasured by methods that learn."""
    repeats: int = 3
    max_new_tokens: int = 128
    generate: bool = True
    """Whether to generate outputs; without it reference text is only replayed."""
    replay: bool | None = None
    """Whether to replay reference text; None: where there is any."""
    cold: bool = False
    """Whether methods forget everything after every prompt."""
    batches: tuple[int, ...] = ()
    temperature: float = 0.0
    dtype: str | None = None
    threads: int | None = None
    prepack: bool | None = None
    chat: bool | None = None
    """Whether to use the chat template; None: if there is one."""

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("max_new_tokens", 1), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not self.data:
            raise ValueError(
                "no data to measure with: give --data, such as spec_bench, mbpp, a .jsonl file or a folder"
            )
        doubled = next((spec for place, spec in enumerate(self.methods) if spec in self.methods[:place]), None)
        if doubled is not None:
            raise ValueError(f"every method may be given once, got {doubled!r} twice")
        for spec in self.methods:
            own = spec.removeprefix(COLD)
            if own.partition(":")[0] not in OWN_METHODS:
                check_spec(own, "method", OWN_METHODS)
        if self.batches and self.replay:
            raise ValueError("--replay and --batch cannot be combined: texts are replayed one at a time")


def read_scenario(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each run of a file by the run's name, empty for a single run; raises ValueError."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold options such as `data` and `methods`, got {type(found).__name__}")
    runs = found.pop("runs", {"": {}})
    if not isinstance(runs, dict) or not all(isinstance(own, dict) for own in runs.values()):
        raise ValueError(f"`runs` of {path} must hold names with options, got {str(runs)[:60]!r}")
    return {
        str(name): _options({**found, **own}, f"{path}, run {name}" if name else str(path))
        for name, own in runs.items()
    }


def _options(given: dict[str, Any], owner: str) -> dict[str, Any]:
    try:
        read = read_options(RunOptions, owner, given=given)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}


def runs_of(path: Path | None, given: dict[str, Any]) -> dict[str, RunOptions]:
    """Return the runs of a scenario, or one without a name; the user's options `given` take precedence over the
    file's.
    """
    chosen = {name: value for name, value in given.items() if value is not None and name in options_of(RunOptions)}
    runs = {"": {}} if path is None else read_scenario(path)
    return {name: RunOptions(**{**options, **chosen}) for name, options in runs.items()}
