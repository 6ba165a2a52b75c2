"""Private names of transformers and torch: few, used only in `compat`, and present in the installed releases."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from support import tiny
from transformers import DynamicCache, GenerationConfig, GenerationMixin

from token_recycling.model.compat import PRIVATE

PACKAGE = Path(__file__).parents[2] / "token_recycling"
HOME = PACKAGE / "model" / "compat.py"
ELSEWHERE = {("hf/acceleration.py", "_sample")}
"""The method that overrides transformers'."""
KEYS = {"_name_or_path", "_from_model_config"}
"""Keys of configuration files."""
NO_LIBRARY = {"engines", "_util/compiled.py"}
"""Other libraries' names: vLLM, SGLang, mlx and numba."""


@cache
def private_names():
    """Return the private names of the libraries' most used classes and of their instances."""
    model = tiny.llama()
    cache = DynamicCache(config=model.config)
    things = [GenerationMixin, GenerationConfig(), torch.nn.Module(), torch.zeros(1), model, model.config, cache]
    layers = list(model.modules())
    names = {name for thing in (*things, *cache.layers, *layers) for name in (*dir(thing), *vars_of(thing))}
    return {name for name in names if name.startswith("_") and not name.startswith("__") and name != "_"}


def vars_of(thing):
    return getattr(thing, "__dict__", {})


def uses(nodes):
    """Yield attributes of objects other than `self`, strings and imported names, among which are the private ones."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("torch", "transformers"):
            yield from (*(alias.name for alias in node.names), *node.module.split("."))


def test_private_names_are_few():
    assert 0 < len(PRIVATE) <= 10


@pytest.mark.parametrize("name", PRIVATE)
def test_private_name_exists_in_the_installed_release(name):
    path, _, last = name.rpartition(".")
    if name == "transformers.Cache._is_user_defined":
        model, ids = tiny.llama(), tiny.prompt(0, 3)
        cache = DynamicCache(config=model.config)
        model.generate(ids, past_key_values=cache, max_new_tokens=1)
        assert getattr(cache, last) is True or tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17)
    elif name.startswith("torch.ops."):
        assert hasattr(torch.ops.mkldnn, last)
    elif name.startswith(("torch.overrides", "torch.utils")):
        assert hasattr(import_module(path), last)
    else:
        holder = {"torch.nn.Module": torch.nn.Module(), "transformers.PretrainedConfig": tiny.llama().config}
        library, _, kind = path.partition(".")
        assert hasattr(holder.get(path) or getattr({"torch": torch, "transformers": transformers}[library], kind), last)


def test_no_other_module_uses_private_names():
    private = private_names() | {name.rpartition(".")[2] for name in PRIVATE}
    own = KEYS | {"_replace", "_asdict", "_fields"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if path == HOME or any(where.startswith(one) for one in NO_LIBRARY):
            continue
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        left = private - own - {node.name for node in nodes if hasattr(node, "name")}
        found |= {(where, name) for name in uses(nodes) if name in left}
    assert found <= ELSEWHERE


def test_compat_lists_the_private_names_that_it_uses():
    names = {*uses(ast.walk(ast.parse(HOME.read_text())))}
    used = names & private_names() | {name for name in names if name.startswith("_get_current")}
    assert used <= {part for name in PRIVATE for part in name.split(".")}
