"""What is replayed: turns of recorded conversations, each a prompt and what was answered, as tokens.

Known are InstructCoder's edits (`edit_eval/edit_eval.jsonl`), tau-bench's conversations
(`historical_trajectories/*.json`) and SWE-agent's demonstrations (`trajectories/demonstrations`, .traj). They are read
from where the user has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Tokenizer = Any
Message = dict[str, Any]


class Turn(NamedTuple):
    """One answer."""

    conversation: str
    kind: str
    """tool call, code, prose, or that of an edit."""
    prompt: list[int]
    answer: list[int]
    prediction: list[int] | None = None
    """What a client would expect to be answered."""


def recorded(path: Path, tokenizer: Tokenizer, conversations: int | None = None) -> Iterator[Turn]:
    """The turns of a file or a folder of them, in order; of the first `conversations` alone where that is given. Raises
    ValueError for what is not known.
    """
    found = (item for file in _files(path) for item in _read(file))
    for number, (name, messages, prediction) in enumerate(found):
        if number == conversations:
            return
        yield from _turns(name, messages, tokenizer, prediction)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(
            f"expected recorded conversations at {path}, got nothing there; fetch them from their repository"
        )
    return sorted(path.rglob("*.traj")) if path.is_dir() else [path]


def _read(file: Path) -> Iterator[tuple[str, list[Message], str | None]]:
    """Conversations: a name, messages, and what the last answer is expected to be."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        for item in map(json.loads, text.splitlines()):
            asked = f"{item['instruction'].strip()}\n\n```python\n{item['input']}\n```"
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": item["output"]}]
            yield item["task_id"], said, item["input"]
        return
    held = json.loads(text)
    if isinstance(held, dict) and "history" in held:
        yield file.stem, held["history"], None
    elif isinstance(held, list) and held and "traj" in held[0]:
        yield from ((f"{item['task_id']}.{item['trial']}", item["traj"], None) for item in held)
    else:
        raise ValueError(f"expected edits, trajectories of tau-bench or of SWE-agent, got something else in {file}")


def _turns(name: str, messages: list[Message], tokenizer: Tokenizer, prediction: str | None) -> Iterator[Turn]:
    written = [{"role": message["role"], "content": _content(message)} for message in messages]
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or not place:
            continue
        prompt = tokenizer.apply_chat_template(written[:place], add_generation_prompt=True, return_dict=True)
        answer = tokenizer(written[place]["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        expected = None if prediction is None else tokenizer(prediction, add_special_tokens=False)["input_ids"]
        yield Turn(name, _kind(message), prompt["input_ids"], answer, expected)


def _content(message: Message) -> str:
    """A message as text: what was said, then each call of a tool."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in (one["function"] for one in message.get("tool_calls") or ())
    ]
    return "\n".join(filter(None, [content, *calls]))


def _kind(message: Message) -> str:
    if message.get("tool_calls"):
        return "tool call"
    return "code" if "```" in (message.get("content") or "") or "\n    " in (message.get("content") or "") else "prose"
