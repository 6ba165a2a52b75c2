"""Run an agent loop: the model calls a tool with JSON that follows a schema, and gets the result in its next turn.

python examples/agent.py [MODEL] [--turns N]

Calls resemble earlier calls, and the drafter learns from them, so later turns need fewer steps. The shipped model is
tiny, and its calls mean little; give a chat model for sensible calls.
"""

import argparse
import json
from pathlib import Path

from transformers import BatchEncoding

from token_recycling import accelerate, constrain, load

SHIPPED = Path(__file__).parent.parent / "models" / "target"
STOCK = {"lamp": 4, "desk": 0, "chair": 11}
TOOLS = {
    "stock": lambda item: {"item": item, "pieces": STOCK[item]},
    "order": lambda item: {"item": item, "ordered": True},
}
SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, "item": {"enum": sorted(STOCK)}},
            "required": ["tool", "item"],
            "additionalProperties": False,
        }
        for name in TOOLS
    ]
}
TASK = (
    "You manage a shop. Answer every message with one call of a tool as JSON, such as "
    '{"tool": "stock", "item": "lamp"}. The tools are stock and order. Order what is not in stock.\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder, .gguf file or hub name")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model, dtype="float32")
    accelerate(model)
    messages = [{"role": "user", "content": f"{TASK}What about the desk?"}]
    for _ in range(arguments.turns):
        inputs = encoded(tokenizer, messages).to(model.device)
        output = model.generate(
            **inputs,
            max_new_tokens=64,
            do_sample=False,
            logits_processor=[constrain(tokenizer, json_schema=SCHEMA)],  # each output needs a new processor
        )
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        call = json.loads(text)
        result = TOOLS[call["tool"]](call["item"])
        stats = model.acceleration.stats
        print(f"{json.dumps(call)} -> {json.dumps(result)}   ({stats.tokens} tokens in {stats.steps} steps)")
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"{json.dumps(result)} What next?"},
        ]


def encoded(tokenizer, messages) -> BatchEncoding:
    """Return the arguments of `generate` for a conversation, with the model's chat template if it has one."""
    if tokenizer.chat_template is None:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return tokenizer("".join(lines) + "assistant: ", return_tensors="pt")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


if __name__ == "__main__":
    main()
