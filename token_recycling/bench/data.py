"""Benchmark data: questions, and the options of a run or of a scenario file with several runs.

Questions come from Spec-Bench, MBPP, a file of JSON lines or a folder of text files. A line of JSON has one of three
fields: `turns`, the user's turns of a conversation; `prompt`, a single user message; `text`, raw text to continue. A
text file is a `text`, or a `prompt` for a model with a chat template. Replay uses a known answer: `reference` (one for
all turns or one per turn), `answer`, `completion` or `code`; for a `text`, its second half. A `json_schema`, `regex` or
`grammar` constrains outputs; a `prediction` is the predicted output, such as the file to edit.

Named data sets are downloaded once from a fixed commit into `$TOKEN_RECYCLING_CACHE`, or `token_recycling` in the
user's cache folder, and accepted only with the SHA-256 below. This module imports neither torch nor transformers, so
that invalid files are refused immediately.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._util.files import cache_folder, replacing, sha256
from .._util.options import options_of, read_options
from ..drafters._registry import check_spec

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""Categories of MT-bench: a set that contains all of them counts them as one category, as Spec-Bench does."""
Form = Literal["turns", "prompt", "text"]
_FORMS: tuple[Form, ...] = ("turns", "prompt", "text")
_REFERENCES = ("reference", "answer", "completion", "code")
_IDS = ("question_id", "task_id", "id")
_GRAMMARS = ("json_schema", "regex", "grammar")

BASELINE, REPLAY_BASELINE = BASELINES = "generate", "plain"
"""Baselines of speedups: transformers' own decoding; in replay, plain decoding in our loop."""
HINDSIGHT = "oracle"
"""The method that drafts with hindsight: an upper bound, never ranked as the fastest."""
OWN_METHODS = "assisted", "generate", "oracle", "prompt_lookup_hf"
"""Methods that are not drafters: transformers' own, and the oracle."""
COLD = "cold:"
"""Prefix of a method that is reset after every prompt."""
FORCED = "forced:"
"""Prefix of a method that decodes the tokens of `generate` instead of its own."""
_TIMEOUT = 30


@dataclass(frozen=True)
class Question:
    """One prompt, or one conversation of several turns."""

    name: str
    """Unique name: the name of the set and the id of the question."""
    category: str
    turns: tuple[str, ...]
    form: Form
    references: tuple[str, ...] = ()
    """Known answers of the first turns."""
    grammar: tuple[str, str] | None = None
    """The grammar of outputs, if any: `json_schema`, `regex` or `grammar`, and its text."""
    prediction: str | None = None
    """The predicted output, from which drafters may copy."""


@dataclass(frozen=True)
class RunOptions:
    """Options of one run; see `token-recycling bench --help`."""

    data: tuple[str, ...] = ()
    limit: int | None = None
    """Questions per category."""
    methods: tuple[str, ...] = ()
    warm_up: int = 0
    """Number of first questions of every category that methods decode to learn, without being measured."""
    repeats: int = 3
    max_new_tokens: int = 128
    generate: bool = True
    """Whether to generate outputs; if False, reference text is only replayed."""
    replay: bool | None = None
    """Whether to replay reference text; None: if there is any."""
    batches: tuple[int, ...] = ()
    temperature: float = 0.0
    dtype: str | None = None
    threads: int | None = None
    prepack: bool | None = None
    chat: bool | None = None
    """Whether to use the chat template; None: if there is one."""

    def __post_init__(self) -> None:
        for name, minimum in (("repeats", 1), ("max_new_tokens", 1), ("warm_up", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be >= {minimum}, got {getattr(self, name)}")
        if not self.data:
            raise ValueError(
                "no data to measure with: give --data, such as spec_bench, mbpp, a .jsonl file or a folder"
            )
        for spec, times in Counter(self.methods).items():
            if times > 1:
                raise ValueError(f"a method may be given only once, got {spec!r} {times} times")
            own = spec.removeprefix(FORCED).removeprefix(COLD)
            if own.partition(":")[0] not in OWN_METHODS:
                check_spec(own, "method", OWN_METHODS)
        if self.batches and self.replay:
            raise ValueError("--replay and --batch cannot be combined: sequences are replayed one at a time")
        forced = next((spec for spec in self.methods if spec.startswith(FORCED)), None)
        if forced is not None and (self.temperature or self.batches or not self.generate):
            raise ValueError(
                f"{forced} decodes generate's greedy output: it needs generation, and neither temperature nor batches"
            )


def read_scenario(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each run of a YAML file by run name (empty for a single run); raises ValueError.

    Top-level keys are options of every run; `runs` maps names of runs to further options.
    """
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold options such as `data` and `methods`, got {type(options).__name__}")
    runs = options.pop("runs", {"": {}})
    if not isinstance(runs, dict) or not all(isinstance(own, dict) for own in runs.values()):
        raise ValueError(f"`runs` of {path} must hold names with options, got {str(runs)[:60]!r}")
    return {
        str(name): _run_options({**options, **own}, f"{path}, run {name}" if name else str(path))
        for name, own in runs.items()
    }


def _run_options(stated: dict[str, Any], owner: str) -> dict[str, Any]:
    try:
        options = read_options(RunOptions, owner, given=stated)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def runs_of(path: Path | None, given: dict[str, Any]) -> dict[str, RunOptions]:
    """Return the runs of a scenario, or a single run without a name. The user's options `given` override the file's."""
    chosen = {name: value for name, value in given.items() if value is not None and name in options_of(RunOptions)}
    runs = {"": {}} if path is None else read_scenario(path)
    return {name: RunOptions(**{**options, **chosen}) for name, options in runs.items()}


def load(specs: Sequence[str], limit: int | None = None, files: Form = "text") -> list[Question]:
    """Return the first `limit` questions of every category of all sets, interleaved by category, so that an interrupted
    run has measured all categories alike. Raises ValueError or OSError.

    A set is a name in `SOURCES`, which is downloaded, a path, or NAME=PATH. `files` is the form of text files.
    """
    questions = [question for spec in specs for question in _read(*_source(spec), files)]
    for name, times in Counter(question.name for question in questions).items():
        if times > 1:
            raise ValueError(f"question names must be unique, got {name!r} {times} times; name the sets with NAME=PATH")
    return _interleaved(questions, limit)


def _interleaved(questions: Sequence[Question], limit: int | None = None) -> list[Question]:
    """Interleave questions by category, and keep the first `limit` of each category."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = zip_longest(*(members[:limit] for members in by_category.values()))
    return [question for members in rounds for question in members if question is not None]


def digest(questions: Iterable[Question]) -> str:
    """Return a short digest of all questions."""
    text = json.dumps([astuple(question) for question in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(spec: str) -> tuple[str, Path]:
    """Return the name and path of a set."""
    path = Path(spec).expanduser()
    if path.exists():
        # Spec-Bench, MT-bench and their derivatives all name their file question.jsonl.
        return (path.resolve().parent.name if path.stem == "question" else path.resolve().stem), path
    if spec in SOURCES:
        return spec, download(spec)
    name, equals, written = spec.partition("=")
    if equals and name and written and Path(written).expanduser().exists():
        return name, Path(written).expanduser()
    raise ValueError(f"there is no data {spec!r}: give {' or '.join(SOURCES)}, a path or NAME=PATH")


def _read(name: str, path: Path, form: Form) -> list[Question]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        questions = [Question(f"{name}/{file.name}", name, (_text(file),), form) for file in files]
    elif path.suffix == ".jsonl":
        questions = [
            _question(name, number, line, f"{path}, line {number}")
            for number, line in enumerate(_text(path).split("\n"), start=1)
            if line.strip()
        ]
        questions = _numbered(questions)
    else:
        questions = [Question(f"{name}/{path.name}", name, (_text(path),), form)]
    if not questions:
        raise ValueError(f"there are no questions in {path}")
    empty = next((question for question in questions if not all(turn.strip() for turn in question.turns)), None)
    if empty is not None:
        raise ValueError(f"every turn must have text, got an empty one ({empty.name})")
    return _categorized(name, questions)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _question(name: str, number: int, line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"a line must be JSON, got {line[:40]!r} ({where}: {error})") from None
    form = next((form for form in _FORMS if isinstance(fields, dict) and fields.get(form)), None)
    if form is None:
        got = f"the object {line[:40]!r}" if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"a line must be an object with text in one of {', '.join(_FORMS)}, got {got} ({where})")
    turns = fields[form] if form == "turns" else [fields[form]]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{form} must be text, or a list of texts in turns, got {str(fields[form])[:40]!r} ({where})")
    prediction = fields.get("prediction") or None
    if prediction is not None and not isinstance(prediction, str):
        raise ValueError(f"prediction must be text, got {str(prediction)[:40]!r} ({where})")
    grammar = next(((kind, fields[kind]) for kind in _GRAMMARS if fields.get(kind)), None)
    return Question(
        name=f"{name}/{next((str(fields[key]) for key in _IDS if fields.get(key) is not None), str(number))}",
        category=str(fields.get("category") or name),
        turns=tuple(turns),
        form=form,
        references=tuple(_references(fields, len(turns))),
        grammar=grammar and (grammar[0], grammar[1] if isinstance(grammar[1], str) else json.dumps(grammar[1])),
        prediction=prediction,
    )


def _numbered(questions: list[Question]) -> list[Question]:
    """Number repeated names, as in a file with several models' answers to the same questions."""
    times, numbers = Counter(question.name for question in questions), Counter[str]()
    numbered = []
    for question in questions:
        numbers[question.name] += 1
        repeated = times[question.name] > 1
        name = f"{question.name}/{numbers[question.name]}" if repeated else question.name
        numbered.append(replace(question, name=name))
    return numbered


def _references(fields: dict[str, Any], turns: int) -> list[str]:
    """Return the known answers of the first turns; if a turn has several, its first answer."""
    answers: Any = next((fields[key] for key in _REFERENCES if fields.get(key)), [])
    references = []
    for answer in (answers if isinstance(answers, list) else [answers])[:turns]:
        text = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(text, str) or not text.strip():
            break
        references.append(text)
    return references


def _categorized(name: str, questions: list[Question]) -> list[Question]:
    """Merge MT-bench's categories into one, and name a single category after the set."""
    categories = {question.category for question in questions}
    if len(categories) == 1:
        return [replace(question, category=name) for question in questions]
    if categories >= MT_BENCH:
        turns = _interleaved(questions)
        return [replace(q, category="mt_bench") if q.category in MT_BENCH else q for q in turns]
    return questions


class DataSource(NamedTuple):
    """URL and checksum of a data set."""

    url: str
    sha256: str


SOURCES = {
    "spec_bench": DataSource(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
        "66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    "mbpp": DataSource(
        "https://raw.githubusercontent.com/Luowaterbi/TokenRecycling/"
        "8560e99c54220657b2121160340cb241b82f91aa/data/mbpp/question.jsonl",
        "4ef443d46893b3c806247b8b074da1f4f2d04cd97f64b7934549dad16d292399",
    ),
}
"""Spec-Bench (Xia et al., 2401.07851) with 480 questions, and MBPP (Austin et al., 2108.07732) with 399 questions, as
in the program of Token Recycling's authors. A mirror, a proxy's error page or a changed file is refused.
"""


def download(name: str) -> Path:
    """Return the file of a data set from the cache, or download it; raises ValueError or OSError with the fix."""
    source, path = SOURCES[name], cache_folder().expanduser() / f"{name}.jsonl"
    if path.is_file():
        if (digest := sha256(path)) != source.sha256:
            raise ValueError(
                f"{path} was changed or damaged: its SHA-256 must be {source.sha256}, got {digest}; delete the file to "
                "download it again"
            )
        return path
    import urllib.request  # imports http and ssl, which takes tens of milliseconds

    try:
        with urllib.request.urlopen(source.url, timeout=_TIMEOUT) as answer:
            data = answer.read()
    except OSError as error:  # includes URLError and HTTPError: no network, unknown host, refused
        raise OSError(
            f"cannot download {name} from {source.url}: {error}; without a network, fetch the file elsewhere and give "
            f"its path: --data {name}=FILE"
        ) from error
    with replacing(path) as temporary:
        Path(temporary).write_bytes(data)
        if (digest := sha256(Path(temporary))) != source.sha256:
            raise ValueError(
                f"{name} from {source.url} must have SHA-256 {source.sha256}, got {len(data):,} bytes with {digest}; "
                "nothing was saved: does a proxy change downloads?"
            )
    return path
