"""Route ``GET /dashboard``: a page that shows the server's state and updates every two seconds.

The page is self-contained: it requests only ``/metrics`` and ``/v1/batches`` of this server. It is the same for every
caller. It shows the batches of the key that its reader enters.
"""

import base64
import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from neaptide.server.http.auth import KeyRing

SCRIPTS = ("dashboard_figures.js", "dashboard.js")

router = APIRouter()


@router.get("/dashboard", include_in_schema=False)
async def dashboard(request: Request) -> HTMLResponse:
    keys: KeyRing = request.app.state.keys
    page, policy = _page(keys.required)
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


@cache
def _page(wants_key: bool) -> tuple[str, str]:
    """The page, and its content security policy: only its own script may run, and nothing is loaded from elsewhere."""
    parts = {"css": _part("dashboard.css"), "js": script()}
    page = _part("dashboard.html")
    for name, content in parts.items():
        page = page.replace(f"<!-- {name} -->", content)
    if wants_key:
        page = page.replace('<form id="key" hidden>', '<form id="key">')
    digest = base64.b64encode(hashlib.sha256(parts["js"].encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return page, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def script() -> str:
    """The page's script, joined from its parts."""
    return "".join(map(_part, SCRIPTS))


def _part(name: str) -> str:
    return resources.files("neaptide.server.routes").joinpath(name).read_text(encoding="utf-8")
