"""mkdocs hooks: add pages for files outside docs/, and convert links to files outside docs/.

The changelog, the contributor's guide and the notebook are outside docs/, where people expect them, and are also pages
of the site. A link to any other file outside docs/ works only in the repository; the site shows the file's path
instead. A link to a missing file fails the build.
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
"""Files of the repository, and their pages on the site."""
_FILES = {page: path for path, page in PAGES.items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/."""
    for path, page in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_notebook(text) if path.endswith(".ipynb") else text))
    return files


def _notebook(text: str) -> str:
    """Return a notebook as Markdown; notebooks are stored without cell outputs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert links between docs/ and files outside docs/."""
    at = page.file.src_uri
    folder = posixpath.dirname(_FILES.get(at, posixpath.join("docs", at)))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        if ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            raise PluginError(f"{at}: the link to {target} is dead: the repository has no such file")
        known = files.get_file_from_path(PAGES.get(path, path.removeprefix("docs/")))
        if known is None or known.inclusion.is_excluded():
            return f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(known.src_uri, posixpath.dirname(at) or '.')}{anchor or ''})"

    return _LINK.sub(link, markdown)
