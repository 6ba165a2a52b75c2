"""Save learned state: keep the adjacency matrix in a file, and compare outputs from a cold and from a hot start.

    python examples/keep_the_matrix.py [MODEL] [--matrix FILE] [--max-new-tokens N]

The first run of the script starts with an empty matrix, later runs with the saved one.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import Stats, fingerprint, generate, make_drafter
from token_recycling.model.target import Target

SHIPPED = Path(__file__).parent.parent / "models" / "target"
PROMPTS = [
    "def read_lines(path):\n    with open(path) as f:",
    "def write_lines(path, lines):\n    with open(path, 'w') as f:",
    "def copy_lines(source, target):\n    with open(source) as f:",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder or a hub name")
    parser.add_argument("--matrix", type=Path, default=Path(tempfile.gettempdir()) / "example.matrix.safetensors")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    # A matrix contains token ids, so the file includes a fingerprint of the tokenizer and is refused with another one.
    digest = fingerprint(tokenizer)

    drafter = make_drafter("recycling")
    matrix = drafter.prepare(Target(model))
    if arguments.matrix.exists():
        matrix.load(arguments.matrix, tokenizer=digest)
    print(f"before  {matrix}")

    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        cold, hot = Stats(), Stats()
        settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
        first = generate(model, **inputs, **settings, drafter="recycling", stats=cold)
        second = generate(model, **inputs, **settings, drafter=drafter, stats=hot)
        same = "yes" if torch.equal(first, second) else "no"
        print(f"{prompt.splitlines()[0]:<38} MAT cold {cold.mat:.2f}, hot {hot.mat:.2f}; identical: {same}")

    matrix.save(arguments.matrix, tokenizer=digest)
    print(f"after   {matrix}\nkept in {arguments.matrix}, {arguments.matrix.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
