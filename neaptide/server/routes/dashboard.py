"""Routes ``GET /dashboard``, a page that tells what is wrong, and ``GET /dashboard/data``, which it shows.

The page is self-contained: it requests only ``/dashboard/data`` and ``/v1/batches`` of this server. It is the same for
every caller. It shows the batches of the key that its reader enters. ``/`` is the same page.
"""

import base64
import hashlib
from functools import cache
from html import escape
from importlib import resources

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import State
from starlette.responses import HTMLResponse, Response

from neaptide.engine.messages import DeadlineStatus, Occupancy
from neaptide.server.batches.metrics import BatchMetrics
from neaptide.server.batches.service import BatchService
from neaptide.server.context import ServingContext
from neaptide.server.counterfactual.service import Shadow
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.http.auth import KeyRing
from neaptide.server.observe.facts import facts_of
from neaptide.server.observe.history import LateChat
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.observe.overview import OncePerSecond, Report, ShownComparison, encoder, view
from neaptide.server.why.desk import WhyDesk

SCRIPTS = ("dashboard_figures.js", "dashboard.js")

router = APIRouter()


@router.get("/", include_in_schema=False)
@router.get("/dashboard", include_in_schema=False)
async def dashboard(request: Request) -> HTMLResponse:
    keys: KeyRing = request.app.state.keys
    content, policy = page(keys.required, tuple(request.app.state.profiles))
    return HTMLResponse(content, headers={"Content-Security-Policy": policy})


@router.get("/dashboard/data", include_in_schema=False)
async def data(request: Request, raw: bool = False) -> Response:
    """What the page shows; with ``raw=true`` the report that a gateway merges with those of other servers."""
    overview: DashboardData = request.app.state.overview
    made = overview.raw if raw else overview.shown
    return Response(await made.get(), media_type="application/json")


class DashboardData:
    """The server's overview, for people and for a gateway."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.raw = OncePerSecond(self._raw)
        self.shown = OncePerSecond(self._shown)

    async def _raw(self) -> bytes:
        return encoder.encode(await report_of(self._state))

    async def _shown(self) -> bytes:
        return encoder.encode(view(await report_of(self._state)))


async def report_of(state: State) -> Report:
    """The report of this moment.

    Args:
        state: the app's state.
    """
    context: ServingContext = state.context
    metrics: ServerMetrics = state.metrics
    engine: EngineState = state.engine
    batches: BatchService | None = state.batches
    totals: BatchMetrics | None = state.batch_totals
    await metrics.refresh()
    silent, oldest_silent_s = metrics.silent(context.clock())
    report = Report(
        at_s=context.wall_clock(),
        facts=facts_of(context),
        is_up=engine.is_up,
        has_started=engine.num_ready > 0,
        has_given_up=context.client.has_given_up,
        engine_age_s=engine.age_s,
        last_end=context.client.last_end,
        is_draining=context.draining,
        is_paused=context.client.offline_paused,
        oldest_silent_s=oldest_silent_s,
        silent=silent,
        occupancy=tuple(getattr(engine.occupancy, name) for name in Occupancy.__struct_fields__),
        in_flight=dict(metrics.num_in_flight),
        intervals=metrics.history.intervals,
        absences=metrics.history.absences,
        late=[await _explained(one, state.why) for one in list(metrics.late)],
    )
    if batches is not None and totals is not None:
        report.storage_failing = batches.storage_failing
        report.pending_lines = totals.overview.pending_requests
        report.waiting_batches = sum(totals.overview.waiting.values())
        report.outlooks = {one.value: batches.outlooks.count(one) for one in DeadlineStatus}
    shadow: Shadow | None = state.shadow
    report.replays = shadow is not None
    if shadow is not None and shadow.gauge.shown is not None:
        report.comparison = ShownComparison(answer=shadow.gauge.shown, age_s=shadow.gauge.age_s)
    return report


async def _explained(late: LateChat, desk: WhyDesk) -> LateChat:
    return msgspec.structs.replace(late, why=await desk.sentence_of(late.request))


@cache
def page(wants_key: bool, profiles: tuple[str, ...] = ()) -> tuple[str, str]:
    """The page, and its content security policy: only its own script may run, and nothing is loaded from elsewhere.

    Args:
        profiles: names of the device profiles that a what-if question may name.
    """
    options = "".join(f"<option>{escape(name)}</option>" for name in profiles)
    parts = {"css": _part("dashboard.css"), "js": script(), "profiles": options}
    text = _part("dashboard.html")
    for name, content in parts.items():
        text = text.replace(f"<!-- {name} -->", content)
    if wants_key:
        text = text.replace('<form id="key" hidden>', '<form id="key">')
    digest = base64.b64encode(hashlib.sha256(parts["js"].encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    return text, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def script() -> str:
    """The page's script, joined from its parts."""
    return "".join(map(_part, SCRIPTS))


def _part(name: str) -> str:
    return resources.files("neaptide.server.routes").joinpath(name).read_text(encoding="utf-8")
