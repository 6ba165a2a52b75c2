"""Questions to measure with: Spec-Bench, MBPP, any JSON lines or folder of texts.

A line of JSON has one of three fields: `turns`, the user's turns of a conversation; `prompt`, a single user message;
`text`, a text to continue as it is. A text file is a `text`, or a `prompt` for a model with a chat template. A known
answer serves for replay: `reference` (one for all turns or one per turn), `answer`, `completion` or `code`; of a `text`
its own second half. A `json_schema`, `regex` or `grammar` constrains outputs; a `prediction` is the predicted output,
such as the file to edit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from .download import SOURCES, download

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""The categories of MT-bench: a set with all of them counts them as one, as Spec-Bench does."""
Form = Literal["turns", "prompt", "text"]
_FORMS: tuple[Form, ...] = ("turns", "prompt", "text")
_REFERENCES = ("reference", "answer", "completion", "code")
_IDS = ("question_id", "task_id", "id")
_GRAMMARS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True)
class Question:
    """One prompt, or one conversation of several."""

    name: str
    """Unique: the set's name and the question's id."""
    category: str
    turns: tuple[str, ...]
    form: Form
    references: tuple[str, ...] = ()
    """Known answers of the first turns."""
    grammar: tuple[str, str] | None = None
    """The grammar of outputs, if any: `json_schema`, `regex` or `grammar`, and its text."""
    prediction: str | None = None
    """The predicted output, which drafters may copy."""


def load(specs: Sequence[str], limit: int | None = None, files: Form = "text") -> list[Question]:
    """Return the questions of all sets, the first `limit` of every category, interleaved by category, so that an
    interrupted run has measured as many of each. Raises ValueError or OSError.

    A set is a name in `SOURCES`, which is downloaded, a path, or NAME=PATH. `files` is the form of a text file.
    """
    found = [question for spec in specs for question in _read(*_place(spec), files)]
    for name, times in Counter(question.name for question in found).items():
        if times > 1:
            raise ValueError(f"names of questions must be unique, got {name!r} {times} times; name sets with NAME=PATH")
    return _in_turns(found, limit)


def _in_turns(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """Interleave questions by category, and keep the first `limit` of each."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = zip_longest(*(members[:limit] for members in by_category.values()))
    return [question for each in rounds for question in each if question is not None]


def digest(questions: Iterable[Question]) -> str:
    """Return a short digest of all questions."""
    text = json.dumps([astuple(question) for question in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _place(spec: str) -> tuple[str, Path]:
    """Return name and path of a set."""
    path = Path(spec).expanduser()
    if path.exists():
        # Spec-Bench, MT-bench and their relatives all name their file question.jsonl.
        return (path.resolve().parent.name if path.stem == "question" else path.resolve().stem), path
    if spec in SOURCES:
        return spec, download(spec)
    name, equals, given = spec.partition("=")
    if equals and name and Path(given).expanduser().exists():
        return name, Path(given).expanduser()
    raise ValueError(f"there is no data {spec!r}: give {' or '.join(SOURCES)}, a path or NAME=PATH")


def _read(name: str, path: Path, form: Form) -> list[Question]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        found = [Question(f"{name}/{file.name}", name, (_text(file),), form) for file in files]
    elif path.suffix == ".jsonl":
        found = [
            _question(name, number, line, f"{path}, line {number}")
            for number, line in enumerate(_text(path).split("\n"), start=1)
            if line.strip()
        ]
        found = _numbered(found)
    else:
        found = [Question(f"{name}/{path.name}", name, (_text(path),), form)]
    if not found:
        raise ValueError(f"there are no questions in {path}")
    empty = next((question for question in found if not all(turn.strip() for turn in question.turns)), None)
    if empty is not None:
        raise ValueError(f"every turn must have text, got an empty one ({empty.name})")
    return _categorised(name, found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None


def _question(name: str, number: int, line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"a line must be JSON, got {line[:40]!r} ({where}: {error})") from None
    form = next((form for form in _FORMS if isinstance(row, dict) and row.get(form)), None)
    if form is None:
        fields = f"the fields {', '.join(map(str, row))}" if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"a line must be an object with one of {', '.join(_FORMS)}, got {fields} ({where})")
    turns = row[form] if form == "turns" else [row[form]]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{form} must be text, or a list of texts in turns, got {str(row[form])[:40]!r} ({where})")
    own = next((str(row[field]) for field in _IDS if row.get(field) is not None), str(number))
    category = str(row.get("category") or name)
    held = next(((kind, row[kind]) for kind in _GRAMMARS if row.get(kind)), None)
    grammar = None if held is None else (held[0], held[1] if isinstance(held[1], str) else json.dumps(held[1]))
    known, prediction = tuple(_known(row, len(turns))), row.get("prediction") or None
    if prediction is not None and not isinstance(prediction, str):
        raise ValueError(f"prediction must be a text, got {str(prediction)[:40]!r} ({where})")
    return Question(f"{name}/{own}", category, tuple(turns), form, known, grammar, prediction)


def _numbered(questions: list[Question]) -> list[Question]:
    """Number repeated names, as in a file of several models' answers to the same questions."""
    times, seen = Counter(question.name for question in questions), Counter[str]()
    numbered = []
    for question in questions:
        seen[question.name] += 1
        one = f"{question.name}/{seen[question.name]}" if times[question.name] > 1 else question.name
        numbered.append(replace(question, name=one))
    return numbered


def _known(row: dict[str, Any], turns: int) -> list[str]:
    """Return the known answers of the first turns; the first one where a turn has several."""
    given: Any = next((row[field] for field in _REFERENCES if row.get(field)), [])
    known = []
    for answer in (given if isinstance(given, list) else [given])[:turns]:
        one = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(one, str) or not one.strip():
            break
        known.append(one)
    return known


def _categorised(name: str, questions: list[Question]) -> list[Question]:
    """Count MT-bench's categories as one, and name a single category after the set."""
    categories = {question.category for question in questions}
    if len(categories) == 1:
        return [replace(question, category=name) for question in questions]
    if categories >= MT_BENCH:
        turns = _in_turns(questions)
        return [replace(q, category="mt_bench") if q.category in MT_BENCH else q for q in turns]
    return questions
