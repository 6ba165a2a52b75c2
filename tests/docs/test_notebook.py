"""The notebook runs in a fresh kernel, shows what it explains, and is stored without outputs."""

import json
import os
import re

import pytest
from support.pages_of_docs import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
_QUIET = {"PYTHONWARNINGS": "ignore:IProgress", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""Progress bars are not part of the outputs."""


def outputs(notebook):
    """The HTML and the printed text of all cells, in order."""
    shown = [each for cell in notebook["cells"] for each in cell.get("outputs", [])]
    return ["".join(each.get("text") or each["data"]["text/html"]) for each in shown]


@pytest.mark.nightly
def test_it_runs_and_shows_what_it_explains():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=300)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(cwd=str(NOTEBOOK.parent), env={**os.environ, **_QUIET, "PYTHONPATH": path})
    stats, text, tree, template, mat, drafters = outputs(notebook)
    assert "tokens a step</div>" in stats
    assert text.count("<span title=") > 10
    assert 'stroke-dasharray="4 3"' in tree
    assert "a draft tree of 17 nodes" in template
    assert re.search(r"cold: MAT [\d.]+", mat)
    assert re.search(r"hot: MAT [\d.]+", mat)
    assert len(drafters.splitlines()) == 5


def test_it_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * 7
