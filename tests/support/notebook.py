"""The notebook examples/first_steps.ipynb, executed; as a program (`make notebook`) it keeps what the cells show."""

from __future__ import annotations

import os

import nbformat
from nbclient import NotebookClient
from support.pages_of_docs import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
# Bars that fill up are no part of what a notebook shows.
_QUIET = {"PYTHONWARNINGS": "ignore:IProgress", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}


def executed() -> nbformat.NotebookNode:
    """Every cell run in a kernel of its own; raises with the trace of a cell that fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, record_timing=False, coalesce_streams=True, timeout=300)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(cwd=str(NOTEBOOK.parent), env={**os.environ, **_QUIET, "PYTHONPATH": path})
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
