"""The published package: files of wheel and sdist, and the extras named in messages."""

import ast
import functools
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "token_recycling"


def tracked_files(*folders):
    """Return the files tracked by git, as paths in the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout: the files of the project are not known")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def built_files(kind):
    """Return the paths of the files that a build would contain."""
    builders = pytest.importorskip(f"hatchling.builders.{kind}", reason="no hatchling, which builds the package")
    builder = getattr(builders, f"{kind.capitalize()}Builder")(str(ROOT))
    return {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}


def test_wheel_contains_the_package_and_all_its_data():
    held, wanted = built_files("wheel"), tracked_files("token_recycling")
    assert wanted <= held
    assert {name.partition("/")[0] for name in held} == {"token_recycling"}
    assert {Path(name).suffix for name in wanted} >= {".py", ".html", ".js", ".css", ".svg", ".typed"}


def test_sdist_contains_the_project_without_weights_and_results():
    held, wanted = built_files("sdist"), tracked_files()
    left_out = {name for name in wanted if name.startswith(("models/", "docs/results/"))}
    assert wanted - left_out <= held
    assert left_out
    assert not left_out & held


def test_commands_and_plugins_are_declared():
    found = {
        point.name: point.load() for point in metadata.entry_points(group="console_scripts", name="token-recycling")
    }
    assert callable(found["token-recycling"])
    assert metadata.entry_points(group="sglang.srt.plugins", name="token_recycling")


@functools.cache
def sources():
    return [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]


def named_extras():
    """Return every extra that a message names, with the modules it is named for."""
    trees = [ast.parse(source) for source in sources() if "lacking(" in source]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", "") == "lacking"]
    return sorted([ast.literal_eval(argument) for argument in call.args] for call in calls)


def modules_of(extra):
    """Return the modules that an extra installs."""
    marked = [line for line in metadata.requires("token-recycling") if re.search(rf"extra == .{extra}.$", line)]
    return {re.match(r"[\w.-]+", line)[0].replace("-", "_").removesuffix("_python") for line in marked}


def test_named_extra_installs_the_missing_module():
    assert named_extras()
    for extra, *modules in named_extras():
        assert modules, extra
        assert set(modules) <= modules_of(extra), extra


def test_every_imported_extra_is_named_in_a_message():
    imported = {name for source in sources() for name in re.findall(r"^ *(?:from|import) (\w+)", source, re.M)}
    extras = set(metadata.metadata("token-recycling").get_all("Provides-Extra")) - {"dev", "test"}
    assert {extra for extra in extras if modules_of(extra) & imported} <= {extra for extra, *_ in named_extras()}
