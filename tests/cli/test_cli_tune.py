"""`token-recycling tune`: curves that are saved and found, sizes that pay, templates and primed rows."""

import re

import pytest
from support.commandline import PROMPT, assert_refused, run, run_json

from token_recycling import make_drafter
from token_recycling.cli.cost_picture import picture
from token_recycling.drafters.recycling.priming import primed_file
from token_recycling.model.cost_store import load, setting
from token_recycling.model.pass_costs import CPU_SIZES, PassCosts
from token_recycling.model.tree_model import TreeModel

QUICK = ("--seconds", 0, "--device", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(folder))
    return folder


@pytest.fixture
def prompt_folder(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, text in (("a.py", f"{PROMPT}\n"), ("b.py", "import os\n")):
        (folder / name).write_text(text)
    return folder


def test_curves_are_saved_and_found(tiny_model_dir, loaded, cache):
    found = run_json("tune", tiny_model_dir, *QUICK)
    target = TreeModel(loaded.model)
    (saved,) = load(target)
    assert found["setting"] == setting(target)
    assert found["file"].startswith(str(cache))
    (shown,) = found["curves"]
    assert (shown["length"], saved.length) == (32, 32)
    assert [size["nodes"] for size in shown["sizes"]] == list(CPU_SIZES)
    assert [size["relative"] for size in shown["sizes"]] == pytest.approx(
        [saved.relative()[n - 1] for n in saved.sizes]
    )
    assert PassCosts(TreeModel(loaded.model)).curve(50) == saved
    assert {"template", "primed", "grown", "fixed"}.isdisjoint(found)


def test_without_prompts_it_shows_what_would_pay(tiny_model_dir):
    found = run_json("tune", tiny_model_dir, *QUICK)["forecast"]
    assert [row["chance"] for row in found] == [0.5, 0.7, 0.9]
    for row in found:
        for shape in (row["chain"], row["tree"]):
            assert shape["times_plain"] == pytest.approx(shape["tokens"] / shape["cost"])
        assert row["tree"]["times_plain"] >= row["chain"]["times_plain"] >= 1
    text = run("tune", tiny_model_dir, *QUICK)
    assert text.exit_code == 0
    for words in ("after 32 tokens", "t(n) / t(1)", "each candidate is right with one chance", "curves:   "):
        assert words in text.stdout


def test_prompts_show_the_sizes_chosen_and_make_a_template(tiny_model_dir, prompt_folder, tmp_path):
    file = tmp_path / "grown.txt"
    options = ("--prompts", prompt_folder, "--max-new-tokens", 40, "--template", file, "--nodes", 5)
    found = run_json("tune", tiny_model_dir, *QUICK, *options)
    grown, fixed = found["grown"], found["fixed"]
    assert sum(grown["steps_by_drafted"].values()) == grown["steps"]
    assert grown["mat"] == pytest.approx(grown["tokens"] / grown["steps"])
    assert grown["times_plain"] == pytest.approx(grown["mat"] / grown["mean_cost"])
    assert len(fixed["acceptance_by_rank"]) == 8
    assert fixed["best"]["times_plain"] >= fixed["times_plain"]
    assert fixed["nodes"] == len(fixed["paths"]) == 5
    assert file.read_text().split() == fixed["paths"]
    assert found["template"] == str(file)
    for drafter in ("recycling", "published"):
        made = make_drafter(f"{drafter}:tree={file}")
        run_json("generate", tiny_model_dir, PROMPT, "--drafter", f"{drafter}:tree={file}", "--max-new-tokens", 8)
        assert "5 nodes" in made.describe()


def test_the_tree_is_drawn_and_explained(tiny_model_dir, prompt_folder, tmp_path):
    file = tmp_path / "grown.txt"
    options = ("--prompts", prompt_folder, "--limit", 1, "--max-new-tokens", 20, "--template", file, "--nodes", 2)
    text = run("tune", tiny_model_dir, *QUICK, *options).stdout
    for words in ("trees grown at each step", "acceptance by rank", "fixed tree that pays most", "root\n"):
        assert words in text
    assert "as asked for: 2 nodes" in text or "pays most after 32 tokens: 2 nodes" in text
    assert "└─ " in text
    assert f"published:tree={file}" in text


def test_candidates_of_another_drafter_are_recorded(tiny_model_dir, prompt_folder):
    options = ("--prompts", prompt_folder, "--max-new-tokens", 20, "--drafter", "published:tree=0 1 2")
    found = run_json("tune", tiny_model_dir, *QUICK, *options)["fixed"]
    assert len(found["acceptance_by_rank"]) == 3
    assert found["drafter"].startswith("published")


def test_no_template_is_written_where_none_pays(tiny_model_dir, prompt_folder, tmp_path, monkeypatch):
    from token_recycling.model import pass_costs as measuring

    slow = measuring.CostCurve(32, (1, 2), (1.0, 100.0))
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: slow)
    file = tmp_path / "grown.txt"
    options = ("--prompts", prompt_folder, "--max-new-tokens", 20)
    result = run("tune", tiny_model_dir, *QUICK, *options, "--template", file, "--json")
    assert_refused(result, "plain decoding is faster", "--nodes")
    assert not file.exists()
    beyond = run_json("tune", tiny_model_dir, *QUICK, *options, "--template", file, "--nodes", 3)
    assert beyond["grown"]["steps_by_drafted"].keys() == {"0"}
    assert beyond["fixed"]["cost"] is None
    assert len(file.read_text().split()) == 3


def test_primed_rows_are_made_where_the_drafter_finds_them(tiny_model_dir, loaded):
    found = run_json("tune", tiny_model_dir, *QUICK, "--prime")
    file = primed_file(loaded.model, 8)
    assert found["primed"] == str(file)
    before = file.stat().st_mtime_ns
    assert make_drafter("recycling:primed=true").prepare(TreeModel(loaded.model)).filled.all()
    assert file.stat().st_mtime_ns == before


def test_options_that_would_do_nothing_are_refused(tiny_model_dir, prompt_folder, tmp_path):
    for option in (
        ("--template", "t"),
        ("--limit", 1),
        ("--max-new-tokens", 8),
        ("--drafter", "published"),
        ("--raw",),
    ):
        assert_refused(run("tune", tiny_model_dir, *option), "--prompts")
    assert_refused(run("tune", tiny_model_dir, "--prompts", prompt_folder, "--nodes", 3), "--template")
    assert_refused(run("tune", tiny_model_dir, "--prompts", prompt_folder, "--template", tmp_path), "folder")


def test_the_curve_is_drawn_with_the_sizes_that_pay():
    assert picture({1: 1.0, 4: 1.0, 8: 3.0}, {8, 4}).split("\n") == [
        "     3 │       █",
        "   2.5 │      ██",
        "     2 │     ███",
        "   1.5 │    ████",
        "     1 │████████",
        "   0.5 │████████",
        "       └────────",
        "     n  12 4 6 8",
        "           ▲   ▲",
    ]


def test_a_column_stands_for_several_of_many_sizes():
    *columns, axis, names, arrows = picture({1: 1.0, 128: 1.0, 256: 5.0}, {128}).split("\n")
    assert {len(line) for line in (columns[-1], axis)} == {8 + 64}
    assert columns[0] == f"     5 │{' ' * 56}▁▂▃▄▅▆▇█"
    assert names.split() == ["n", "1", "64", "128", "192", "256"]
    assert arrows.index("▲") == 8 + 31 == names.index("128")


def test_a_curve_of_one_size_is_drawn():
    assert picture({1: 1.0}, {1}).endswith("n  1\n        ▲")


def test_the_curves_shown_say_which_tree_pays(tiny_model_dir):
    shown = run("tune", tiny_model_dir, *QUICK).stdout
    (best,) = re.findall(r"root included, by the chance of each candidate: (.*)", shown)
    trees = [f"{row['tree'] + 1} at {row['chance']}" for row in _forecast(shown)]
    assert best == ", ".join(trees)


def _forecast(shown):
    """The rows of the table of forecasts: the chance, and the nodes of the best tree."""
    rows = re.findall(r"│ +32 │ +(0\.\d) │ +\d+ │.*?│.*?│ +(\d+) │", shown)
    return [{"chance": chance, "tree": int(nodes)} for chance, nodes in rows]
