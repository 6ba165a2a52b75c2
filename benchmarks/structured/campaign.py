"""Random schemas, greedy and sampled, against `generate` with the same processor.

    python -m benchmarks.structured.campaign --schemas 500
    python -m benchmarks.structured.campaign --schemas 60 --tokens 32 --model MODEL --output rows.jsonl

Nested objects, arrays, enums, references, unions, numbers with bounds. In float32 each text must be `generate`'s, token
for token; one that ended by itself must parse and be valid (`jsonschema`). The model is random, of two small layers
with the words of the shipped one, unless `--model` names another. A schema and its seed are printed where something is
wrong. What is slower than 0.97 of `generate` in processor time is measured again. A file of rows is gone on with.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
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
_SLOW, _AGAIN = 0.97, 3
"""The speed below which a text is measured again, and how often."""
Row = dict[str, Any]


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


class _Campaign:
    """One model, what compiles for it, and one drafter for all texts."""

    def __init__(self, path: Path | None, dtype: str, tokens: int) -> None:
        import xgrammar

        if path is None:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(_SHIPPED)
            self.model = _random_model(self.tokenizer)
        else:
            self.model, self.tokenizer = tr.load(path, dtype=dtype, device="cpu")
        self.stop = self.model.generation_config.eos_token_id
        self._compiler = xgrammar.GrammarCompiler(
            tokenizer_info(self.tokenizer, vocabulary_size(self.model), self.stop)
        )
        self._drafter, self._tokens = tr.make_drafter("recycling"), tokens

    def _accelerated(self, stats: tr.Stats) -> Callable[..., torch.Tensor]:
        return lambda **given: tr.generate(self.model, drafter=self._drafter, stats=stats, **given)

    def row(self, seed: int, sample: bool) -> Row:
        """One schema, greedy or sampled: what is wrong with the text, if anything, and the times of both."""
        schema = random_schema(seed)
        form = compiled(self._compiler, "json_schema", schema)
        asked = f"{seed}: An example of {', '.join(schema['properties'])} as JSON: "
        ids = self.tokenizer(asked, return_tensors="pt")
        how = {**ids, "max_new_tokens": self._tokens, "do_sample": sample, "pad_token_id": 0}

        def timed(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, float]:
            torch.manual_seed(seed)
            began = time.process_time()
            text = call(**how, logits_processor=[GrammarProcessor(form)])[0, ids["input_ids"].shape[1] :]
            return text, time.process_time() - began

        stats = tr.Stats()
        (plain, of_plain), (ours, of_ours) = timed(self.model.generate), timed(self._accelerated(stats))
        speeds = [of_plain / len(plain) / (of_ours / len(ours))]
        while speeds[0] < _SLOW and len(speeds) <= _AGAIN:
            (plain_again, of_plain), (again, of_ours) = (
                timed(self.model.generate),
                timed(self._accelerated(tr.Stats())),
            )
            speeds.append(of_plain / len(plain_again) / (of_ours / len(again)))
        same, ended, wrong = torch.equal(plain, ours), int(ours[-1]) == self.stop, ""
        said = self.tokenizer.decode(ours, skip_special_tokens=True)
        if ended and "\ufffd" not in said:  # a random model writes halves of surrogate pairs, which xgrammar allows
            try:
                jsonschema.validate(json.loads(said), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong = str(error).splitlines()[0]
        about = {"seed": seed, "sample": sample, "same": same, "ended": ended, "wrong": wrong, "text": said}
        return {**about, "tokens": len(ours), "steps": stats.steps, "speeds": speeds}


def _summary(rows: list[Row], compared: bool) -> str:
    """What came of the texts, and which were slow at first and once more."""
    others = sum(not row["same"] for row in rows)
    slow = [row for row in rows if row["speeds"][0] < _SLOW]
    again = [row for row in slow if statistics.median(row["speeds"][1:]) < _SLOW]
    first = sorted(row["speeds"][0] for row in rows)
    said = [
        f"{len(rows)} texts, {others} others than generate's{'' if compared else ' (16 bits)'}",
        f"{sum(row['ended'] for row in rows)} ended by themselves, {sum(bool(row['wrong']) for row in rows)} not valid",
        f"{sum(row['tokens'] for row in rows) / sum(row['steps'] for row in rows):.2f} tokens a step",
        f"speed {statistics.median(first):.2f} (median), {first[0]:.2f} at least",
        f"{len(slow)} below {_SLOW}, {len(again)} when measured again",
    ]
    return "; ".join(said)


def main(
    schemas: Annotated[int, typer.Option(help="how many")] = 500,
    first: Annotated[int, typer.Option(help="seed of the first one")] = 0,
    tokens: Annotated[int, typer.Option(help="of a text at most")] = 80,
    model: Annotated[Path | None, typer.Option(help="another model: a folder or a GGUF file")] = None,
    dtype: Annotated[str, typer.Option(help="of that model; texts may part in 16 bits")] = "float32",
    output: Annotated[Path | None, typer.Option(help="file of rows, gone on with")] = None,
) -> None:
    """Exits with 1 if a text was another in float32, or not valid."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rows: list[Row] = []
    if output is not None and output.exists():
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    done, campaign = {(row["seed"], row["sample"]) for row in rows}, _Campaign(model, dtype, tokens)
    campaign.row(first + schemas, sample=False)  # a model's first call tests it, and is no measure
    for seed, sample in itertools.product(range(first, first + schemas), (False, True)):
        if (seed, sample) in done:
            continue
        rows.append(row := campaign.row(seed, sample))
        if row["wrong"] or (not row["same"] and dtype == "float32"):
            what = row["wrong"] or "another text"
            typer.echo(f"seed {seed}, sampled {sample}: {what}: {json.dumps(random_schema(seed))}")
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    typer.echo(_summary(rows, dtype == "float32"))
    raise typer.Exit(any(row["wrong"] or (not row["same"] and dtype == "float32") for row in rows))


if __name__ == "__main__":
    typer.run(main)
