"""The page at `/`: streams generated text, races drafting against plain decoding, and shows the draft tree of any step.

Static HTML, CSS and JavaScript modules next to this file. The page loads nothing from other servers, and never inserts
text as markup; its headers enforce both (`Content-Security-Policy`). The page itself needs no API key; its requests do.

| file | contents |
|---|---|
| `main.js` | the actions: generate, race, stop, choose a step |
| `api.js`, `form.js` | requests to the server; the form |
| `run.js`, `verdict.js` | one generated text with its metrics; the comparison of two |
| `lane.js`, `explorer.js`, `tree.js`, `replay.js` | a text, the strip of steps, the draft tree, the replay of a race |
| `dom.js` | helpers for elements and text |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse

from ... import __version__
from ..access import User
from ..engine import Engine
from ..errors import ApiError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {path.name: path for path in Path(__file__).parent.iterdir() if path.suffix in _KINDS}


def router(engine: Engine) -> APIRouter:
    """Return the routes of the page, its files, and its description of the server."""
    routes = APIRouter()

    @routes.get("/")
    async def page() -> FileResponse:
        return _file("index.html")

    @routes.get("/playground/{name}")
    async def part(name: str) -> FileResponse:
        if name not in _FILES:
            raise ApiError(404, f"the playground has no file {name!r}", "not_found")
        return _file(name)

    @routes.get("/v1/token_recycling/about")
    async def about(key: User) -> dict[str, Any]:
        """Return the model, its limits, and the available drafters."""
        settings, model = engine.settings, engine.loaded.model
        limits = [limit for limit in (settings.max_new_tokens, engine.loaded.context) if limit is not None]
        return {
            "version": __version__,
            "model": settings.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(engine.target.device),
            "chat": bool(getattr(engine.loaded.tokenizer, "chat_template", None)),
            "max_new_tokens": min(limits, default=None),
            "isolation": settings.isolation.value,
            "drafter_name": settings.drafter.partition(":")[0],
            "drafter": engine.pool.base.describe(),
            "drafters": engine.pool.described(),
        }

    return routes


def _file(name: str) -> FileResponse:
    return FileResponse(_FILES[name], media_type=_KINDS[_FILES[name].suffix], headers=HEADERS)
