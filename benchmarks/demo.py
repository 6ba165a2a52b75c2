"""`make demo`: six questions of different kinds to a real chat model, plain and recycled side by side.

The questions are those of `examples/demo`, the model SmolLM2-135M-Instruct. Where it cannot be had, the small model of
the repository completes code instead, and a line says so. All else is `token-recycling compare`.
"""

from __future__ import annotations

from pathlib import Path

from token_recycling.cli.app import app
from token_recycling.cli.console import note

from .real_model import NoRealModelError, fetched

ROOT = Path(__file__).parent.parent
MODEL = "SmolLM2-135M-Instruct"
NEW_TOKENS = 64


def arguments() -> list[str]:
    """Those of `token-recycling`."""
    try:
        model, prompts = fetched(), ROOT / "examples" / "demo"
        note(f"the model is {MODEL}, in {model}")
    except NoRealModelError as error:
        note(
            f"{MODEL} cannot be had ({error}): the repository's own small model, models/target, completes code instead"
        )
        model, prompts = ROOT / "models" / "target", ROOT / "models" / "prompts"
    options = {"--prompts": prompts, "--limit": 6, "--max-new-tokens": NEW_TOKENS, "--dtype": "float32"}
    return ["compare", str(model), *(str(word) for option in options.items() for word in option)]


if __name__ == "__main__":
    app(arguments())
