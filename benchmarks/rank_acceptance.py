"""How often the candidate of each rank is right where it is tried: what the small default tree is grown from.

Decodes the shipped prompts with the paper's tree, whose breadth tries every rank, and prints the acceptance by rank
and the trees that `templates.grow` makes of it. `templates.RANK_ACCEPTANCE` holds the figures of the shipped target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import Stats, generate, make_drafter
from token_recycling.templates import grow

ROOT = Path(__file__).parent.parent


def main(
    model: Annotated[Path, typer.Argument(help="a local model folder")] = ROOT / "models" / "target",
    prompts: Annotated[Path, typer.Option(help="a folder of prompts, one a file")] = ROOT / "models" / "prompts",
    max_new_tokens: Annotated[int, typer.Option(help="tokens generated for each prompt")] = 128,
) -> None:
    """Prints acceptance by rank and the trees grown from it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    drafter, stats = make_drafter("recycling:tree=paper"), Stats()
    for path in track(sorted(path for path in prompts.iterdir() if path.is_file()), "decoding"):
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids
        generate(target, ids, drafter=drafter, stats=stats, max_new_tokens=max_new_tokens, do_sample=False)
    shares = list(stats.acceptance_by_rank.values())
    print(f"MAT {stats.mat:.2f} over {stats.steps} steps; by rank:", " ".join(f"{share:.3f}" for share in shares))
    for nodes in (7, 8, 15, 16):
        print(nodes, " ".join("".join(map(str, path)) for path in grow(shares, nodes).paths[1:]))


if __name__ == "__main__":
    typer.run(main)
