"""The notebook runs, and shows in a fresh kernel what it was saved with."""

import json
import re

import pytest
from support.pages_of_docs import ROOT


def shown(notebook):
    """Kinds of output by cell, and the texts."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[(each["output_type"], sorted(each.get("data", []))) for each in cell["outputs"]] for cell in cells]


def pages(notebook):
    """The HTML that cells show, and what they print, in order."""
    outputs = [each for cell in notebook["cells"] for each in cell.get("outputs", [])]
    return ["".join(each.get("text") or each["data"]["text/html"]) for each in outputs]


@pytest.fixture(scope="module")
def fresh():
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from support.notebook import executed

    return executed()


@pytest.mark.slow
def test_it_runs_and_shows_what_was_saved(fresh):
    saved = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert shown(fresh) == shown(saved), "run `make notebook`"
    stats, text, tree, template, mat, drafters = pages(fresh)
    assert "tokens a step</div>" in stats
    assert text.count("<span title=") > 10
    assert 'stroke-dasharray="4 3"' in tree
    assert "a draft tree of 17 nodes" in template
    assert re.search(r"cold: MAT [\d.]+", mat)
    assert re.search(r"hot: MAT [\d.]+", mat)
    assert len(drafters.splitlines()) == 5


def test_it_was_saved_with_what_it_shows():
    saved = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert sum("text/html" in kinds for cell in shown(saved) for _, kinds in cell) == 5
    assert "<script" not in "".join(pages(saved))
