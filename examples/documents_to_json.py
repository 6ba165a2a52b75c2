"""Convert documents to JSON: one object per document that follows a schema, with one drafter for all documents.

python examples/documents_to_json.py [MODEL]

Objects of one schema resemble each other, so later objects need fewer steps. The shipped model is tiny: its objects
follow the schema, but their contents mean little.
"""

import argparse
import json
from pathlib import Path

from transformers import BatchEncoding

from token_recycling import accelerate, constrain, load

SHIPPED = Path(__file__).parent.parent / "models" / "target"
DOCUMENTS = (
    "Maria Lopez, 34, is a nurse from Madrid.",
    "Tom Baker, 51, works as a carpenter in Leeds.",
    "Kenji Sato, 58, is a pilot and lives in Osaka.",
    "Anna Weiss, 29, teaches chemistry in Graz.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12} [A-Z][a-z]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["nurse", "carpenter", "pilot", "teacher", "other"]},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"},
    },
    "required": ["name", "age", "occupation", "city"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(SHIPPED), help="a local folder, .gguf file or hub name")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model, dtype="float32")
    accelerate(model)
    for document in DOCUMENTS:
        inputs = encoded(tokenizer, f"{document}\nThe person as JSON: ").to(model.device)
        output = model.generate(
            **inputs,
            max_new_tokens=96,
            do_sample=False,
            logits_processor=[constrain(tokenizer, json_schema=SCHEMA)],  # each output needs a new processor
        )
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        stats = model.acceleration.stats
        print(f"{json.dumps(json.loads(text))}   ({stats.tokens} tokens in {stats.steps} steps)")
    stats = model.acceleration.total
    print(f"{stats.tokens} tokens in {stats.steps} steps: {stats.mat:.2f} tokens per step")


def encoded(tokenizer, text) -> BatchEncoding:
    """Return the arguments of `generate` for a message, with the model's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


if __name__ == "__main__":
    main()
