"""Decode step by step: print the tokens of each step, and the draft tree of the step with the most tokens.

    python examples/stream_steps.py [MODEL] [--max-new-tokens N]

`stream` works on token ids only. Each step has the draft, the logits at its nodes, the accepted nodes and new tokens.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling import Step, stream

SHIPPED = Path(__file__).parent.parent / "models" / "target"
PROMPT = "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder or a hub name")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids

    best: Step | None = None
    for number, step in enumerate(stream(model, prompt, max_new_tokens=arguments.max_new_tokens), start=1):
        print(f"{number:>4}  {len(step.tokens)}  " + " | ".join(quoted(tokenizer, token) for token in step.tokens))
        if best is None or len(step.tokens) > len(best.tokens):
            best = step

    assert best is not None, "stream yields one step or more"
    print(f"\nThe tree of the step with the most tokens, {len(best.tokens)}; * marks the accepted nodes:\n")
    for node, path in enumerate(best.draft.lineages):
        mark = "*" if node in best.accepted else " "
        print(f"{mark} {'  ' * (len(path) - 1)}{quoted(tokenizer, best.draft.tokens[node])}")
    print(f"\nAfter the last accepted node the model selected {quoted(tokenizer, best.tokens[-1])}")


def quoted(tokenizer, token: int) -> str:
    return repr(tokenizer.decode([token]))


if __name__ == "__main__":
    main()
