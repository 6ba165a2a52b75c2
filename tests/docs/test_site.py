"""The site: errors that fail its build, and completeness. `make lint` builds the whole site."""

import re
import runpy

import pytest
import typer
from support.cases import thinned
from support.drafter_table import with_tables
from support.pages_of_docs import ROOT

import token_recycling
from token_recycling.cli.app import app
from token_recycling.drafters._registry import own_names

DOCS = ROOT / "docs"


def build_page(folder, page):
    """Build a site of one page, with this site's settings; mkdocs raises errors in strict mode."""
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    (folder / "pages").mkdir()
    (folder / "pages" / "index.md").write_text(page, encoding="utf-8")
    where = {"docs_dir": str(folder / "pages"), "site_dir": str(folder / "site"), "nav": [{"Page": "index.md"}]}
    loaded = config.load_config(str(ROOT / "mkdocs.yml"), strict=True, **where)
    loaded.validation.nav.omitted_files = 0  # the pages of the repository's own files
    loaded.plugins.on_startup(command="build", dirty=False)
    build.build(loaded)
    return (folder / "site" / "index.html").read_text(encoding="utf-8")


def test_page_with_links_and_references_is_built(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    links = "[here](#page) [changes](../CHANGELOG.md) [a test](../tests/conftest.py)"
    page = build_page(tmp_path, f"# Page\n\n{links}\n\n::: token_recycling.Stats")
    assert '<a href="CHANGELOG.html">changes</a>' in page
    assert "a test (<code>tests/conftest.py</code>)" in page
    assert "Mean accepted tokens per step" in page


@pytest.mark.parametrize(
    "wrong", thinned(["[gone](#gone)", "[gone](gone.md)", "::: token_recycling.Gone", "[gone](../gone.py)"], every=2)
)
def test_dead_link_or_missing_reference_fails(tmp_path, monkeypatch, wrong):
    exceptions = pytest.importorskip("mkdocs.exceptions")
    monkeypatch.chdir(ROOT)
    with pytest.raises((exceptions.Abort, exceptions.MkDocsException)):
        build_page(tmp_path, f"# Page\n\n{wrong}\n")


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "first_steps.md",
    }
    assert listed == there


def test_tables_of_drafters_are_up_to_date():
    page = (DOCS / "drafters.md").read_text(encoding="utf-8")
    assert all(f"\n## {name}\n" in page for name in own_names())
    assert with_tables(page) == page, "run `nox -s tables`"


def test_tables_and_plot_of_jobs_are_up_to_date():
    pytest.importorskip("pandas")
    made, page = runpy.run_path(str(ROOT / "scripts" / "job_tables.py")), (DOCS / "benchmarks.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| chat |" in page
    assert "| **`recycling`, the default** |" in readme
    assert made["with_tables"](page) == page, "run `python -m scripts.job_tables`"
    assert made["with_methods"](readme) == readme, "run `python -m scripts.job_tables`"
    before = made["PICTURE"].read_bytes()
    assert made["picture"]() == before


def test_every_command_is_on_its_page():
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z]\w*)` \|", page, re.M)) == set(typer.main.get_command(app).commands)


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: token_recycling\.(\w+)$", pages, re.M))
    assert set(token_recycling.__all__) - shown == set()
