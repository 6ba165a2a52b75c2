"""Measures answers of a given form: `python -m benchmarks.structured MODEL --output docs/results/structured`.

Each question is answered in turn by `generate` with xgrammar's own processor; by the default drafter with the same
processor, new for each question and kept from question to question; and by it with a processor that does not say what
it is, as drafts knew no grammar. Processor time of one thread, the reading of the question included. Where a text is
another than `generate`'s, its row says how near the two tokens are (`ties`). A folder with rows is gone on with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import token_recycling as tr
from token_recycling.drafters.recycling import RecyclingText
from token_recycling.hf.constrain import tokenizer_info
from token_recycling.hf.forms import compiled
from token_recycling.loop import matchers
from token_recycling.model.inspection import vocabulary_size
from token_recycling.model.tree_model import TreeModel

from .cases import CASES, FREE, Case
from .report import markdown
from .ties import Ties

_TOKENS = 128
"""Of an answer at most."""
_FIRST = "Name three colors."


class _Hidden(transformers.LogitsProcessor):
    """A processor that nobody recognises."""

    def __init__(self, processor: transformers.LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._processor(input_ids, scores)


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    """Add up processor seconds of passes, of drafting and learning, and of masks, which are a part of these."""
    own = matchers._Xgrammar
    places: list[tuple[str, type, str]] = [
        ("forward", TreeModel, "forward"),
        ("drafting", RecyclingText, "draft"),
        ("drafting", RecyclingText, "observe"),
        ("masks", own, "fill"),
        ("masks", own, "after"),
    ]
    before = [vars(owner)[name] for _, owner, name in places]

    def timing(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                spent[what] = spent.get(what, 0.0) + time.process_time() - began

        return call

    for (what, owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, timing(what, function))
    try:
        yield
    finally:
        for (_, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


class _Bench:
    """One model and what it is asked."""

    def __init__(self, path: Path, dtype: str) -> None:
        import xgrammar

        self.model, self.tokenizer = tr.load(path, dtype=dtype, device="cpu")
        stop = self.model.generation_config.eos_token_id
        self._compiler = xgrammar.GrammarCompiler(tokenizer_info(self.tokenizer, vocabulary_size(self.model), stop))
        self._ties = Ties(path, dtype)
        self._kept = {name: tr.make_drafter("recycling") for name in ("kept", "unaware")}

    def rows(self, kind: str, case: Case | str) -> Iterator[dict[str, Any]]:
        """A row for each way to answer."""
        from xgrammar.contrib.hf import LogitsProcessor

        form = None if isinstance(case, str) else compiled(self._compiler, *next(iter(case.form.items())))
        inputs = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": case if isinstance(case, str) else case.question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        plain, logits = torch.empty(0), torch.empty(0)
        for way in ("generate", "new") if form is None else ("generate", "new", "kept", "unaware"):
            processors = [] if form is None else [LogitsProcessor(form)]
            if way == "unaware":
                processors = [_Hidden(processors[0])]
            stats, spent = tr.Stats(), dict[str, float]()
            given = {**inputs, "max_new_tokens": _TOKENS, "do_sample": False, "logits_processor": processors}
            drafter = self._kept.get(way) or tr.make_drafter("recycling")
            began = time.process_time()
            with _timed(spent):
                if way == "generate":
                    said = self.model.generate(**given, output_logits=True, return_dict_in_generate=True)
                    plain = found = said.sequences
                else:
                    found = tr.generate(self.model, drafter=drafter, stats=stats, **given)
            seconds = time.process_time() - began
            logits = torch.cat(said.logits) if way == "generate" else logits
            same = torch.equal(found, plain)
            parting = {} if same else {"parting": self._ties.parting(plain, found, logits)}
            for one in parting.values():
                one["tokens"] = [self.tokenizer.decode([token]) for token in one["tokens"]]
            new = found[0, inputs["input_ids"].shape[1] :].tolist()
            name = case[:20] if isinstance(case, str) else case.name
            about = {"kind": kind, "case": name, "way": way, "seconds": seconds, "tokens": len(new), **spent}
            ended = new[-1] == self.model.generation_config.eos_token_id
            steps = stats.steps or len(new)
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            yield {**about, "steps": steps, "ended": ended, "same": same, **parting, "text": text}


def main(
    model: Annotated[Path, typer.Argument(help="a folder or a GGUF file")],
    output: Annotated[Path, typer.Option(help="folder of the rows and of table.md; gone on with")],
    dtype: Annotated[list[str], typer.Option(help="may be given again")] = ["bfloat16", "float32"],  # noqa: B006
    report: Annotated[bool, typer.Option("--report", help="measures nothing, reports on the folder")] = False,
) -> None:
    """Measures what is missing, and writes and prints the report."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    output.mkdir(parents=True, exist_ok=True)
    for name in [] if report else dtype:
        path = output / f"{name}.jsonl"
        done = {(row["kind"], row["case"]) for row in map(json.loads, path.open())} if path.exists() else set()
        bench = _Bench(model, name)
        [*bench.rows("first", _FIRST)]  # a model's first call tests it, and is no measure
        for kind, cases in {**CASES, "free text": FREE}.items():
            for case in cases:
                if (kind, case[:20] if isinstance(case, str) else case.name) in done:
                    continue
                rows = [*bench.rows(kind, case)]
                with path.open("a") as file:
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = markdown(output)
    (output / "table.md").write_text(text, encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
