"""Whole-file edits of our own making: a name replaced, a parameter added, a docstring inserted.

The files are pieces of this package's source of 300 to 600 tokens, the edits are made on its syntax tree, so that what
must be answered is known exactly. The order and the choice are fixed by a seed.
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from keyword import iskeyword
from pathlib import Path

import token_recycling

from .turns import Tokenizer, Turn

_LENGTHS = range(300, 601)
_NEW_NAMES = ("candidate_pool", "found_before", "seen_so_far", "chosen_item", "held_back", "wanted_part", "next_place")
_PARAMETERS = (("strict", "bool", "True"), ("limit", "int", "16"), ("label", "str", '"usual"'))
_DOCSTRING = "Return what is asked for; see the module for what it costs and for the errors that it raises."
_ASK = "{what} Answer with the whole file and nothing else.\n\n```python\n{file}```"


def edits(tokenizer: Tokenizer, count: int, seed: int = 0) -> Iterator[Turn]:
    """`count` edits of each kind, each of another file."""
    draws = random.Random(seed)
    files = [file for file in _files() if len(tokenizer(file)["input_ids"]) in _LENGTHS]
    draws.shuffle(files)
    left: list[str] = files
    for kind, edit in _KINDS.items():
        made = 0
        while made < count and left:
            file = left.pop()
            done = edit(file, draws)
            if done is None:
                continue
            what, edited = done
            made += 1
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": _ASK.format(what=what, file=file)}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            yield Turn(f"{kind} {made}", kind, prompt, tokenizer(edited)["input_ids"], tokenizer(file)["input_ids"])


def _files() -> list[str]:
    """Pieces of source, each some definitions of a module in order, as long as a file may be."""
    found = []
    for path in sorted(Path(token_recycling.__file__).parent.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines, piece = source.splitlines(keepends=True), ""
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
            piece += "".join(lines[first : node.end_lineno]) + "\n\n"
            if len(piece) > 1200:
                found.append(piece.rstrip() + "\n")
                piece = ""
    return found


def _rename(file: str, draws: random.Random) -> tuple[str, str] | None:
    names = Counter(token.string for token in _tokens(file) if token.type == tokenize.NAME)
    usual = [name for name, times in names.items() if 4 <= times <= 12 and len(name) > 3 and not iskeyword(name)]
    usual = [name for name in usual if name not in ("self", "None", "True", "False", "list", "tuple", "float")]
    if not usual:
        return None
    old, new = draws.choice(sorted(usual)), draws.choice(_NEW_NAMES)
    return f"Rename `{old}` to `{new}` in this file.", _replaced(file, old, new)


def _parameter(file: str, draws: random.Random) -> tuple[str, str] | None:
    functions = [node for node in ast.walk(ast.parse(file)) if isinstance(node, ast.FunctionDef) and node.args.args]
    name, kind, default = draws.choice(_PARAMETERS)
    if not functions:
        return None
    function = draws.choice(functions)
    last = function.args.args[-1]
    if function.args.kwonlyargs or function.args.vararg or function.args.kwarg or function.args.defaults:
        return None
    lines = file.splitlines(keepends=True)
    end, column = (last.end_lineno or 1) - 1, last.end_col_offset or 0
    if not lines[end].isascii():
        return None
    lines[end] = f"{lines[end][:column]}, {name}: {kind} = {default}{lines[end][column:]}"
    edited = "".join(lines)
    return f"Add the parameter `{name}: {kind} = {default}` to `{function.name}`.", edited


def _docstring(file: str, draws: random.Random) -> tuple[str, str] | None:
    functions = [
        node
        for node in ast.walk(ast.parse(file))
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is None and node.body[0].lineno > node.lineno
    ]
    if not functions:
        return None
    function = draws.choice(functions)
    first, lines = function.body[0], file.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f'{" " * first.col_offset}"""{_DOCSTRING}"""\n')
    return f"Add a docstring to `{function.name}`.", "".join(lines)


_KINDS: dict[str, Callable[[str, random.Random], tuple[str, str] | None]] = {
    "rename": _rename,
    "parameter": _parameter,
    "docstring": _docstring,
}


def _tokens(file: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(file).readline))


def _replaced(file: str, old: str, new: str) -> str:
    lines = file.splitlines(keepends=True)
    for token in reversed(_tokens(file)):
        if token.type == tokenize.NAME and token.string == old:
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return "".join(lines)
