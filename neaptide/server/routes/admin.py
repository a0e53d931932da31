"""Operators' routes: ``POST /admin/offline`` switches offline work, ``POST /admin/what-if`` runs a simulation."""

from textwrap import shorten

from fastapi import APIRouter, Request

from neaptide.server.context import ServingContext
from neaptide.server.counterfactual.frames import SimulatedFigures, WhatIfAnswer, WhatIfTask
from neaptide.server.counterfactual.ring import NoAnswerError
from neaptide.server.counterfactual.service import Shadow
from neaptide.server.counterfactual.what_if import TooMuchError, WhatIfBusyError
from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.http.auth import KeyRing, principal_of
from neaptide.server.http.errors import (
    MAX_MESSAGE_CHARS,
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
    UnavailableError,
    engine_unavailable,
    local_callers_only,
)
from neaptide.server.http.hosts import is_loopback
from neaptide.server.http.jsonbody import read_object
from neaptide.server.http.sse import unless_disconnected
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.openai.openapi import JSON_BODY_ERRORS, replies, request_body
from neaptide.server.openai.prepare import parse_body
from neaptide.server.openai.replies import OfflineSwitch, WhatIfReply, WhatIfShares
from neaptide.server.openai.schemas import OfflineSwitchBody, WhatIfBody

router = APIRouter()


def _is_local(request: Request) -> bool:
    return request.client is not None and is_loopback(request.client.host)


def _check_operator(request: Request) -> None:
    """Raises PermissionDeniedError for other callers."""
    keys: KeyRing = request.app.state.keys
    if keys.required and not principal_of(request).is_admin:
        raise PermissionDeniedError("Only keys with the admin mark may do this.", code="admin_key_required")
    if not keys.required and not _is_local(request):
        raise local_callers_only()


@router.post(
    "/admin/offline",
    openapi_extra=request_body(OfflineSwitchBody),
    responses=replies(OfflineSwitch, *JSON_BODY_ERRORS, 403),
    response_model=None,
)
async def switch_offline(request: Request) -> OfflineSwitch:
    """Pauses or resumes offline work. Needs a key with the mark `admin`, or, without keys, a caller on this machine."""
    _check_operator(request)
    body = parse_body(OfflineSwitchBody, await read_object(request, principal_of(request).share))
    context: ServingContext = request.app.state.context
    metrics: ServerMetrics = request.app.state.metrics
    paused = body.state == "paused"
    context.client.set_offline(paused)
    metrics.paused.set(paused)
    return {"state": body.state}


@router.post(
    "/admin/what-if",
    openapi_extra=request_body(WhatIfBody),
    responses=replies(WhatIfReply, *JSON_BODY_ERRORS, 403, 409, 503),
    response_model=None,
)
async def what_if(request: Request) -> WhatIfReply:
    """Simulates the recorded traffic of this server with other targets, more of it, or on another device. Needs the
    same rights as `/admin/offline`."""
    _check_operator(request)
    body = parse_body(WhatIfBody, await read_object(request, principal_of(request).share))
    shadow: Shadow | None = request.app.state.shadow
    if shadow is None:
        raise ConflictError("This server records no traffic (--shadow off).", code="shadow_off")
    context: ServingContext = request.app.state.context
    task = WhatIfTask([], body.traffic, _seconds(body.ttft_ms), _seconds(body.tpot_ms), body.profile, body.attainment)
    try:
        asking = shadow.desk.ask(task, context.clock() - 60 * body.minutes)
        answer = await unless_disconnected(request.receive, asking)
    except WhatIfBusyError:
        raise ConflictError("Another question is being answered; one at a time.", code="what_if_busy") from None
    except TooMuchError:
        message = "The simulation takes too much time or memory; ask about fewer minutes or less traffic."
        raise InvalidRequestError(message, param="minutes", code="what_if_too_large") from None
    except EngineUnavailableError:
        raise engine_unavailable() from None
    except NoAnswerError:
        raise UnavailableError("The engine did not report its present requests; try again in a few seconds.") from None
    return _reply(answer)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _reply(answer: WhatIfAnswer) -> WhatIfReply:
    if answer.refusal:
        # The list of all device profiles may exceed the longest message.
        words = shorten(f"{answer.refusal[:1].upper()}{answer.refusal[1:]}", MAX_MESSAGE_CHARS, placeholder=" ...")
        raise InvalidRequestError(words, code="what_if_refused")
    today = answer.today
    return {
        "recorded_seconds": answer.recorded_s,
        "requests": answer.changed.requests,
        "attainment": _shares(answer.changed),
        "offline_tokens_per_second": answer.changed.offline_tokens_per_s,
        "replicas": answer.replicas,
        "today": {
            "requests": today.requests,
            "attainment": _shares(today),
            "offline_tokens_per_second": today.offline_tokens_per_s,
        },
    }


def _shares(found: SimulatedFigures) -> WhatIfShares:
    shares = found.attainment
    return WhatIfShares(ttft=shares["ttft"], tpot=shares["tpot"], both=shares["both"])
