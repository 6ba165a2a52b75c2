"""The notebook runs in a fresh kernel, shows the explained outputs, and is stored without outputs."""

import json
import os
import re

import pytest
from support.pages_of_docs import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
_QUIET = {"PYTHONWARNINGS": "ignore:IProgress", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""Progress bars are not part of the outputs."""


@pytest.mark.nightly
def test_notebook_runs_and_shows_the_explained_outputs():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=300)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(cwd=str(NOTEBOOK.parent), env={**os.environ, **_QUIET, "PYTHONPATH": path})
    shown = [each for cell in notebook["cells"] for each in cell.get("outputs", [])]
    texts = ["".join(each.get("text") or each["data"]["text/html"]) for each in shown]
    assert len(texts) == 6
    assert "tokens a step</div>" in texts[0]
    assert re.search(r"cold: MAT [\d.]+", texts[4])


def test_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * 7
