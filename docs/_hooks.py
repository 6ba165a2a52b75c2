"""What mkdocs does not do by itself: pages of the repository's own files, and links out of docs/.

The changelog, the contributor's guide and the notebook stand above docs/, where people look for them, and are pages of
the site too. A link to any other file above docs/ is of use in the repository alone: the site shows where the file is.
A link to a file that is not there fails the build.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "examples/first_steps.ipynb": "first_steps.md",
}
"""Files of the repository, and the pages that they are."""
_FILES = {page: path for path, page in PAGES.items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files above docs/."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_notebook(text) if path.endswith(".ipynb") else text))
    return files


def _notebook(text: str) -> str:
    """Return a notebook as Markdown; the outputs of its cells are not kept in the repository."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between docs/ and what stands above it."""
    at = page.file.src_uri
    folder = posixpath.dirname(_FILES.get(at, posixpath.join("docs", at)))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            raise PluginError(f"{at}: expected a file of the repository, got a link to {target}: there is none")
        known = files.get_file_from_path(PAGES.get(path, path.removeprefix("docs/")))
        if known is None or known.inclusion.is_excluded():
            return f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(known.src_uri, posixpath.dirname(at) or '.')}{anchor or ''})"

    return _LINK.sub(link, markdown)
