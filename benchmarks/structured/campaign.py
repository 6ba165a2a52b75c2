"""Random schemas, greedy and sampled, against `generate` with the same processor.

    python -m benchmarks.structured.campaign --schemas 500

Nested objects, arrays, enums, references, unions, numbers with bounds. Each text must be `generate`'s, token for token;
one that ended by itself must parse and be valid (`jsonschema`). The model is random, of two small layers with the words
of the shipped one, unless `--model` names another. A schema and its seed are printed where something is wrong.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import torch
import transformers
import typer

import token_recycling as tr
from token_recycling.hf.constrain import tokenizer_info
from token_recycling.hf.forms import compiled
from token_recycling.loop.matchers import GrammarProcessor
from token_recycling.model.inspection import vocabulary_size

Schema = dict[str, Any]
_SHIPPED = Path(__file__).parents[2] / "models" / "target"
_WORDS = ("name", "size", "color", "city", "items", "id", "kind", "tag", "level", "note", "active", "price")
_TOKENS = 80


def random_schema(seed: int) -> Schema:
    """A strict object; half of them have a definition that properties refer to."""
    draw = random.Random(seed)
    refers = draw.random() < 0.5

    def one(depth: int) -> Schema:
        kinds = ["string", "integer", "number", "boolean", "enum", "const", "null"]
        kinds += ["object", "array", "union", *(["reference"] if refers else [])] if depth else []
        kind = draw.choice(kinds)
        if kind == "string":
            forms = [{"maxLength": draw.randint(1, 8)}, {"pattern": "^[a-c]{1,4}$"}, {"format": "date"}]
            return {"type": "string", **draw.choice(forms)}
        if kind in ("integer", "number"):
            low = draw.randint(-50, 50)
            return {"type": kind, "minimum": low, "maximum": low + draw.randint(0, 400)}
        if kind == "enum":
            return {"enum": draw.sample(["red", "green", "blue", "dark red", 1, 2.5, None, True], draw.randint(1, 4))}
        if kind == "const":
            return {"const": draw.choice(["fixed", 7, None, False, {"a": [1, 2]}])}
        if kind == "object":
            return an_object(depth - 1)
        if kind == "array":
            least = draw.randint(0, 2)
            return {"type": "array", "items": one(depth - 1), "minItems": least, "maxItems": least + draw.randint(0, 2)}
        if kind == "union":
            return {"anyOf": [one(depth - 1) for _ in range(draw.randint(2, 3))]}
        return {"$ref": "#/$defs/part"} if kind == "reference" else {"type": kind}

    def an_object(depth: int) -> Schema:
        properties = {name: one(depth) for name in draw.sample(_WORDS, draw.randint(1, 5))}
        required = [name for name in properties if draw.random() < 0.8]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    schema = an_object(3)
    return {**schema, "$defs": {"part": an_object(0)}} if refers else schema


def _random_model(tokenizer: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def main(
    schemas: Annotated[int, typer.Option(help="how many")] = 500,
    first: Annotated[int, typer.Option(help="seed of the first one")] = 0,
    model: Annotated[Path | None, typer.Option(help="folder of another model")] = None,
) -> None:
    """Exits with 1 if a text was another, or not valid."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    import xgrammar

    tokenizer = transformers.AutoTokenizer.from_pretrained(model or _SHIPPED)
    target = _random_model(tokenizer) if model is None else transformers.AutoModelForCausalLM.from_pretrained(model)
    stop = target.generation_config.eos_token_id
    compiler = xgrammar.GrammarCompiler(tokenizer_info(tokenizer, vocabulary_size(target), stop))
    drafter, stats, counts = tr.make_drafter("recycling"), tr.Stats(), Counter[str]()
    for seed in range(first, first + schemas):
        schema = random_schema(seed)
        form = compiled(compiler, "json_schema", schema)
        ids = tokenizer(f"{seed}: An example of {', '.join(schema['properties'])} as JSON: ", return_tensors="pt")
        for sample in (False, True):
            how = {**ids, "max_new_tokens": _TOKENS, "do_sample": sample, "pad_token_id": 0}
            texts = []
            for call in (target.generate, lambda **given: tr.generate(target, drafter=drafter, stats=stats, **given)):
                torch.manual_seed(seed)
                texts.append(call(**how, logits_processor=[GrammarProcessor(form)])[0, ids["input_ids"].shape[1] :])
            plain, ours = texts
            counts["texts"] += 1
            if not torch.equal(plain, ours):
                counts["others"] += 1
                typer.echo(f"seed {seed}, sampled {sample}: another text: {json.dumps(schema)}")
            said = tokenizer.decode(ours, skip_special_tokens=True)
            if int(ours[-1]) == stop and "\ufffd" in said:
                counts["not UTF-8"] += 1  # a random model writes halves of surrogate pairs, which xgrammar allows
            elif int(ours[-1]) == stop:
                counts["ended"] += 1
                try:
                    jsonschema.validate(json.loads(said), schema)
                except (ValueError, jsonschema.ValidationError) as error:
                    counts["wrong"] += 1
                    typer.echo(f"seed {seed}, sampled {sample}: {str(error).splitlines()[0]}: {json.dumps(schema)}")
    typer.echo(f"{dict(counts)}, {stats.mat:.2f} tokens a step")
    raise typer.Exit(bool(counts["others"] or counts["wrong"]))


if __name__ == "__main__":
    typer.run(main)
