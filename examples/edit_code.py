"""Edit code with the old file as the `prediction`: unchanged parts are verified in long drafts.

python examples/edit_code.py [MODEL] [--file FILE] [--instruction TEXT]

The prediction is a hint: the output is the same with and without it, but needs fewer steps with it. The shipped model
is too small to edit code; give a chat model.
"""

import argparse
from pathlib import Path

import torch
from transformers import BatchEncoding

from token_recycling import Stats, generate, load

SHIPPED = Path(__file__).parent.parent / "models" / "target"
FILE = '''\
def mean(values):
    """Return the mean of some values."""
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    """Return the variance of some values."""
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder, .gguf file or hub name")
    parser.add_argument("--file", type=Path, help="the file to edit; default: a small sample file")
    parser.add_argument("--instruction", default="Rename `total` to `result`.")
    parser.add_argument("--max-new-tokens", type=int, help="default: the tokens of the file plus 64")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model, dtype="float32")
    file = FILE if arguments.file is None else arguments.file.read_text(encoding="utf-8")
    request = f"{arguments.instruction} Answer with the whole file and nothing else.\n\n{file}\n"
    inputs = encoded(tokenizer, request).to(model.device)
    longest = arguments.max_new_tokens or len(tokenizer(file)["input_ids"]) + 64
    outputs, steps = [], {}
    for name, prediction in (("without", None), ("with", file)):
        stats = Stats()
        outputs.append(
            generate(
                model,
                **inputs,
                drafter="recycling:tree=16",  # a fixed tree size gives the same number of steps on every machine
                prediction=prediction,
                tokenizer=tokenizer,
                stats=stats,
                max_new_tokens=longest,
                do_sample=False,
            )
        )
        steps[name] = stats.steps
    print(tokenizer.decode(outputs[1][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"steps without prediction {steps['without']}, with prediction {steps['with']}")
    print(f"identical: {'yes' if torch.equal(*outputs) else 'no'}")


def encoded(tokenizer, text) -> BatchEncoding:
    """Return the arguments of `generate` for a message, with the model's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


if __name__ == "__main__":
    main()
