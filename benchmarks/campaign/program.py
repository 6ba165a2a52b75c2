"""A case as source code: what `run` executes, and the script that it can be pasted as."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import dimensions as dim
from .case import Call, Case

_PARTS = Path(__file__).with_name("parts.py").read_text(encoding="utf-8")
_IMPORTS = ["copy", "functools", "pickle", "tempfile", "threading"]
_MAIN = """
model = new_model()
wanted = list(calls(model, model.generate))
found = list(calls(*accelerated(new_model())))
difference = first_difference(wanted, found)
assert difference is None, "call {}, tensor {}: {}".format(*difference)
print("same as transformers' own generate")
"""
_MAIN_THREADS = """
model = new_model()
wanted = list(calls(model, model.generate, in_turn))
for _ in range(50):  # what threads do is another thing every time
    found = list(calls(*accelerated(new_model()), at_once))
    difference = first_difference(wanted, found)
    assert difference is None, "call {}, tensor {}: {}".format(*difference)
print("same as transformers' own generate")
"""


class Program(NamedTuple):
    """The parts of the script that are a case's own."""

    model: str
    """Defines `new_model()`."""
    accelerated: str
    """Defines `accelerated(model)`: a model and a function that is called as its `generate`."""
    calls: str
    """Defines `calls(model, generate)`, or `calls(model, generate, together)` where there are threads: yields a list of
    tensors a call.
    """


def program(case: Case) -> Program:
    """The source code of a case."""
    return Program(_model(case), _accelerated(case), _calls(case))


def script(case: Case, about: str) -> str:
    """A case as a script that fails where the case does."""
    main = _MAIN_THREADS if case.threads else _MAIN
    own = "\n\n".join(program(case))
    body = f"{_definitions(own + main)}\n\n\n{own}\n{main}"
    imports = [f"import {name}" for name in _IMPORTS if re.search(rf"\b{name}\.", body)]
    imports += ["from pathlib import Path"] * bool(re.search(r"\bPath\(", body))
    lines = "\n".join(f"# {line}" for line in about.splitlines())
    others = ["import tokenizers"] * ("tokenizers." in body) + ["import torch", "import transformers"]
    both = "\n".join([*imports, "", *others, "", "import token_recycling as tr"])
    return f"{lines}\n{both}\n\n\n{body}"


@cache
def _sources() -> dict[str, str]:
    tree = ast.parse(_PARTS)
    made = (ast.FunctionDef, ast.ClassDef)
    return {node.name: ast.get_source_segment(_PARTS, node) or "" for node in tree.body if isinstance(node, made)}


def _definitions(text: str) -> str:
    """The sources of all parts that a text names, and of those that these name, in the order of the file."""
    needed: set[str] = set()
    while True:
        more = {name for name in _sources() if re.search(rf"\b{name}\b", text)}
        if more == needed:
            return "\n\n\n".join(source for name, source in _sources().items() if name in needed)
        needed = more
        text += "\n".join(_sources()[name] for name in needed)


def _model(case: Case) -> str:
    config = dict(dim.FAMILIES[case.family])
    if case.positions != 256:
        config["max_position_embeddings"] = case.positions
    family = config.pop("model_type")
    settings = "".join(f"\n        {name}={value!r}," for name, value in config.items())
    weights = f"    {dim.WEIGHTS[case.weights]}\n" * bool(dim.WEIGHTS[case.weights])
    return (
        f"def new_model():\n    model = build({case.seed}, {case.attention!r}, {case.repeats}, {family!r},{settings}\n"
        f"    )\n{weights}    return model\n"
    )


def _accelerated(case: Case) -> str:
    copied = dim.COPIES[case.copied].format(fast=case.fast)
    surface = dim.SURFACES[case.surface].format(drafter=case.drafter.code, fast=case.fast, copied=copied)
    return f"def accelerated(model):\n    fixed_costs(model, {case.costs}){surface}"


def _calls(case: Case) -> str:
    shared = dim.CACHES[case.cache]
    held = shared.startswith("transformers.")
    lines = [f"held = {shared}"] if held else []
    for number, call in enumerate(case.calls):
        lines += ["", *_call(call, number, shared)]
    body = "\n".join(f"    {line}" if line else "" for line in lines).strip("\n")
    return f"def calls(model, generate{', together' * case.threads}):\n{body}\n"


def _call(call: Call, number: int, shared: str) -> list[str]:
    kind, error = dim.INTERRUPTIONS.get(call.event, ("", ""))
    arguments = _arguments(call, shared)
    cache = ", held" if shared.startswith("transformers.") else ""
    before = [dim.BEFORE[call.event]] if call.event in dim.BEFORE else []
    if "streamer=given" in arguments:
        before.append("given = Given()")
    if call.choice != "greedy":
        before.append(f"torch.manual_seed({number})")
    if call.event == "in threads":
        return [
            *before,
            f"texts = {[[list(row)] for row in call.rows]}",
            "texts = [torch.tensor(text) for text in texts]",
            f"jobs = [lambda ids=ids: generate(ids, {arguments}) for ids in texts]",
            "for ids, output in zip(texts, together(jobs)):",
            f"    yield parts(output, torch.ones_like(ids){_repeated(call)})",
        ]
    masked = call.masked or call.continues or len(call.rows) > 1
    made = f"output = generate(ids, {'attention_mask=mask, ' * masked}{arguments})"
    if kind:
        made = ["try:", f"    {made}", f"except {error}:", "    output = torch.empty(0, 1)"]
    elif call.event == "in inference mode":
        made = ["with torch.inference_mode():", f"    {made}"]
    else:
        made = [made]
    after = ["yield [torch.tensor(given.tokens)]"] * ("streamer=given" in arguments)
    if call.choice == "seeded" and kind != "streamer":
        after.append("yield [torch.rand(2)]  # what is drawn next is the same too")
    return [*_texts(call), *before, *made, f"yield parts(output, mask{_repeated(call)}{cache})", *after]


def _repeated(call: Call) -> str:
    return ".repeat_interleave(3, 0)" if "three samples" in call.options else ""


def _texts(call: Call) -> list[str]:
    if call.continues:
        more = f"torch.tensor({[list(row) for row in call.rows]})"
        return [
            "ids = output if isinstance(output, torch.Tensor) else output.sequences",
            "mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)",
            f"ids = torch.cat([ids, {more}], dim=1)",
            "mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)",
        ]
    masked = call.masked or len(call.rows) > 1
    width = max(map(len, call.rows)) + call.spare * masked
    padded = [[0] * (width - len(row)) + list(row) for row in call.rows]
    return [f"ids = torch.tensor({padded})", "mask = (ids != 0).long()"]


def _arguments(call: Call, shared: str) -> str:
    """The arguments of a call after its prompt."""
    chosen = [dim.OPTIONS[name] for name in call.options]
    found = [f"max_new_tokens={call.new}"]
    if call.choice != "greedy":
        found.append(f"do_sample=True, top_k={1 if call.choice == 'one choice' else 0}")
    else:
        found.append("do_sample=False")
    kind, error = dim.INTERRUPTIONS.get(call.event, ("", ""))
    # A streamer is given the prompt first, then here several tokens at once.
    raising = f"Interrupt({1 if kind == 'streamer' else min(3, call.new // 2)}, {error})"
    objects = {one: [option.code for option in chosen if option.kind == one] for one in ("criterion", "processor")}
    if kind in objects:
        objects[kind].append(f"{raising}.{kind}")
    elif kind:
        found.append(f"streamer={raising}")
    if objects["criterion"]:
        found.append(f"stopping_criteria=transformers.StoppingCriteriaList([{', '.join(objects['criterion'])}])")
    if objects["processor"]:
        found.append(f"logits_processor=transformers.LogitsProcessorList([{', '.join(objects['processor'])}])")
    if shared:
        found.append("past_key_values=held" if shared.startswith("transformers.") else shared)
    return ", ".join([*found, *(option.code for option in chosen if option.kind == "argument")])
