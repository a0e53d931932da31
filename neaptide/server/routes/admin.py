"""``POST /admin/offline``: the operator's switch for offline work."""

from fastapi import APIRouter, Request

from neaptide.server.context import ServingContext
from neaptide.server.edge.auth import KeyRing, principal_of
from neaptide.server.edge.errors import PermissionDeniedError
from neaptide.server.edge.hosts import is_loopback
from neaptide.server.edge.jsonbody import read_object
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.prepare import parse_body
from neaptide.server.openai.replies import OfflineSwitch
from neaptide.server.openai.schemas import OfflineSwitchBody

router = APIRouter()


def _is_local(request: Request) -> bool:
    return request.client is not None and is_loopback(request.client.host)


@router.post(
    "/admin/offline",
    openapi_extra=request_body(OfflineSwitchBody),
    responses=replies(OfflineSwitch, *JSON_BODY_ERRORS, 403),
    response_model=None,
)
async def switch_offline(request: Request) -> OfflineSwitch:
    """Pauses offline work or lets it go on. Needs a key with the mark `admin`, or without keys a caller on this
    machine."""
    keys: KeyRing = request.app.state.keys
    if keys.required and not principal_of(request).is_admin:
        raise PermissionDeniedError("Only keys with the admin mark may do this.", code="admin_key_required")
    if not keys.required and not _is_local(request):
        raise PermissionDeniedError("Only callers on the server's own machine may do this.")
    body = parse_body(OfflineSwitchBody, await read_object(request))
    context: ServingContext = request.app.state.context
    metrics: ServerMetrics = request.app.state.metrics
    paused = body.state == "paused"
    context.client.set_offline(paused)
    metrics.paused.set(paused)
    return {"state": body.state}
