"""Each drafter can be deleted without another one noticing: what two of them share is in `drafters/_shared`.

A command that is there for one drafter (`datastore`) goes with it, so that `cli` is left out.
"""

import ast
from pathlib import Path

import pytest

import token_recycling
from token_recycling.drafters._registry import own_names

PACKAGE = Path(token_recycling.__file__).parent


def modules():
    """Every module of the package, by its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name, path):
    """What a module imports, wherever in its source; of `from a import b` both `a` and `a.b`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def is_part(name, of):
    return name == of or name.startswith(f"{of}.")


IMPORTS = {name: set(imported(name, path)) for name, path in modules()}


@pytest.mark.parametrize("drafter", own_names())
def test_without_it_everything_else_can_be_imported(drafter):
    deleted = f"token_recycling.drafters.{drafter}"
    assert any(is_part(name, deleted) for name in IMPORTS), f"expected a module of {drafter}"
    broken = {
        name: sorted(what for what in used if is_part(what, deleted))
        for name, used in IMPORTS.items()
        if not is_part(name, deleted) and not is_part(name, "token_recycling.cli")
    }
    assert {name: used for name, used in broken.items() if used} == {}


def test_imports_are_resolved():
    assert "token_recycling.drafters.eagle.formats" in IMPORTS["token_recycling.drafters.eagle"]
    assert "token_recycling.drafters._shared.base" in IMPORTS["token_recycling.drafters.draft_model"]
    assert "token_recycling.trees.draft" in IMPORTS["token_recycling.drafters.suffix"]
