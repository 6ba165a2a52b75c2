"""The page at `/`: text as it is made, a race against plain decoding, and the draft tree of any step.

Plain HTML, CSS and JavaScript modules beside this file, served as they are. The page asks the server alone: nothing is
loaded from elsewhere, and the headers forbid it. Its texts are set as text, never as markup; the headers forbid that
too (`require-trusted-types-for`). The page itself needs no API key; whatever it asks for does.

| file | has |
|---|---|
| `main.js` | what happens when something is generated, raced, stopped or chosen |
| `api.js`, `form.js` | what is asked of the server, and of the user |
| `run.js`, `verdict.js` | one text with its figures; two of them compared |
| `lane.js`, `explorer.js`, `tree.js`, `replay.js` | the text, the strip of steps, the draft tree, the race replayed |
| `dom.js` | elements and texts |
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import FileResponse

from ... import __version__
from ..app import User
from ..errors import ApiError

if TYPE_CHECKING:
    from ..service import Service

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


def router(service: Service) -> APIRouter:
    """The page, its parts, and what it is told about the server."""
    made = APIRouter()

    @made.get("/")
    async def page() -> FileResponse:
        return _file("index.html")

    @made.get("/playground/{name}")
    async def part(name: str) -> FileResponse:
        if name not in _FILES:
            raise ApiError(404, f"the playground has no file {name!r}", "not_found")
        return _file(name)

    @made.get("/v1/token_recycling/about")
    async def about(key: User) -> dict[str, Any]:
        return _about(service)

    return made


def _file(name: str) -> FileResponse:
    return FileResponse(_FILES[name], media_type=_KINDS[_FILES[name].suffix], headers=HEADERS)


def _about(service: Service) -> dict[str, Any]:
    """What the page is told: the model, what it was made with, limits, and the drafters there are."""
    settings, model = service.settings, service.loaded.model
    limits = [limit for limit in (settings.max_new_tokens, service.loaded.context) if limit is not None]
    return {
        "version": __version__,
        "model": settings.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(service.target.device),
        "chat": bool(getattr(service.loaded.tokenizer, "chat_template", None)),
        "max_new_tokens": min(limits, default=None),
        "isolation": settings.isolation.value,
        "drafter_name": settings.drafter.partition(":")[0],
        "drafter": service.drafters.describe,
        "drafters": service.offers.described(),
    }
