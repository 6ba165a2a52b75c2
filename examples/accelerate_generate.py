"""Accelerate a model's own `generate()`: text streams as before, and statistics show the gain.

python examples/accelerate_generate.py [MODEL] [--max-new-tokens N]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from token_recycling import accelerate

SHIPPED = Path(__file__).parent.parent / "models" / "target"
PROMPT = 'class Stack:\n    """A list with a limit on its length."""\n\n    def __init__(self, limit):'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder or a hub name")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)

    accelerate(model)
    streamer = TextStreamer(tokenizer)
    recycled = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False, streamer=streamer)

    stats = model.acceleration.stats
    print(f"\n{stats.drafter}")
    print(f"{stats.tokens} tokens in {stats.steps} steps: {stats.mat:.2f} tokens per step (MAT)")
    print(f"{stats.tokens_per_second:.0f} tokens/s")
    for part, seconds in stats.seconds.items():
        print(f"  {part:<14} {1000 * seconds / stats.steps:6.2f} ms per step")
    print(f"identical to plain generate: {'yes' if torch.equal(plain, recycled) else 'no'}")


if __name__ == "__main__":
    main()
