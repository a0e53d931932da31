"""Route ``GET /admin/why/{id}``: why a request was late."""

from fastapi import APIRouter, Request

from neaptide.engine.messages import HeldStep
from neaptide.engine.params import Tier
from neaptide.engine.row_id import RowId
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.faults import storage_faults
from neaptide.server.http.auth import KeyRing, principal_of
from neaptide.server.http.errors import NotFoundError, local_callers_only
from neaptide.server.http.hosts import is_loopback
from neaptide.server.openai.openapi import replies
from neaptide.server.openai.replies import WhyReply, WhyStep, WhyWait
from neaptide.server.why.batches import batch_wait
from neaptide.server.why.desk import Explained, WhyDesk, told
from neaptide.server.why.parts import TokenWait
from neaptide.server.why.requests import EndedRequest

BATCH = "batch_"
MAX_ID_CHARS = 128
SHOWN_STEPS = 20
router = APIRouter()


@router.get("/admin/why/{id}", responses=replies(WhyReply, 403, 404, 503), response_model=None)
async def why(id: str, request: Request) -> WhyReply:
    """Says why a chat of the last 15 minutes was late. The id is the reply's, or its `X-Request-Id`. A key gets
    answers about its own requests, one with the mark `admin` about all. Without keys only callers on this machine
    may ask."""
    keys: KeyRing = request.app.state.keys
    principal = principal_of(request)
    if not keys.required and not (request.client is not None and is_loopback(request.client.host)):
        raise local_callers_only()
    desk: WhyDesk = request.app.state.why
    if id.startswith(BATCH) and len(id) <= MAX_ID_CHARS:
        return await _why_batch(id, request)
    found = [one for one in desk.requests.find(id) if principal.is_admin or one.key == principal.key_id]
    if not found:
        raise NotFoundError(
            "No chat with this id has ended in the last 15 minutes, as far as this key may know.",
            param="id",
            code="request_not_found",
        )
    explained = await desk.explain(found[0])
    return _reply(found[0], explained)


def _reply(request: EndedRequest, explained: list[Explained]) -> WhyReply:
    return {
        "id": request.name,
        "tier": request.tier,
        "outcome": request.outcome,
        "sentence": told(request, explained),
        "waits": [_wait(one) for one in explained],
        "parts_s": {},
    }


async def _why_batch(name: str, request: Request) -> WhyReply:
    """The wait of a batch of the caller, or of one of its lines, in parts."""
    service: BatchService | None = request.app.state.batches
    keys: KeyRing = request.app.state.keys
    desk: WhyDesk = request.app.state.why
    principal, row = principal_of(request), RowId.parse(name)
    if service is None:
        raise NotFoundError("This server has no batches.", param="id", code="request_not_found")
    with storage_faults(service.health):
        record = await service.get_batch(name if row is None else row.batch_id, principal.tenant)
    if row is not None and row.row >= record.num_total:
        raise NotFoundError("The batch has no such line.", param="id", code="request_not_found")
    now_s = request.app.state.context.wall_clock()
    ends = (record.completed_at, record.failed_at, record.expired_at, record.cancelled_at)
    ended_s = next((float(one) for one in ends if one is not None), None)
    begun_s = record.in_progress_at or ended_s or now_s
    until_s = ended_s if row is None else desk.lines.started_s(name)
    names = {one.share: f"turn of key {one.label}" for one in keys.principals} if principal.is_admin else {}
    wait = batch_wait(
        desk.device.between(begun_s, max(now_s if until_s is None else until_s, begun_s)),
        principal.share,
        begun_s - record.created_at,
        lambda share: names.get(share, "turns of other keys"),
        is_line=row is not None,
        is_over=until_s is not None,
    )
    return {
        "id": name,
        "tier": Tier.BATCH.value,
        "outcome": record.status.value,
        "sentence": wait.sentence,
        "waits": [],
        "parts_s": {what: round(seconds, 3) for what, seconds in wait.parts_s.items()},
    }


def _wait(one: Explained) -> WhyWait:
    wait, parts = one.wait, one.parts
    longest = sorted(parts.steps, key=lambda step: -step.busy_s)[:SHOWN_STEPS]
    return {
        "what": "longest_gap" if wait.first_token_s is None else "first_token",
        "sentence": one.sentence,
        "took_ms": _ms(wait.end_s - wait.start_s),
        "target_ms": _ms(wait.target_s),
        "late_ms": _ms(wait.late_s),
        "without_batch_work_ms": _ms(parts.without_batch_s),
        "parts_ms": {cause.value: _ms(seconds) for cause, seconds in parts.seconds.items()},
        "late_parts_ms": {cause.value: _ms(seconds) for cause, seconds in parts.lateness(wait.late_s).items()},
        "num_steps": len(parts.steps),
        "steps": [_step(step, wait) for step in sorted(longest, key=lambda step: step.step)],
    }


def _step(step: HeldStep, wait: TokenWait) -> WhyStep:
    return {
        "step": step.step,
        "at_ms": _ms(step.end_s - step.busy_s - wait.start_s),
        "busy_ms": _ms(step.busy_s),
        "predicted_ms": _ms(step.predicted_s),
        "prompt_tokens": sum(num_tokens for _, num_tokens, _ in step.chunks),
        "prompts": len(step.chunks),
        "streams": len(step.streams) // 4,
        "batch_tokens": step.offline_prefill_tokens + step.offline_decode_tokens,
        "waiting": step.waiting_online,
        "online_blocks": step.online_blocks,
        "batch_blocks": step.offline_blocks,
        "available_blocks": step.available_blocks,
        "forecast_blocks": step.reserved_blocks,
        "judgement": _judgement(step),
    }


def _judgement(step: HeldStep) -> str:
    """The step lengths that the policy chose, who would be late by them, and what ended batch work."""
    told = [
        f"{_ms(length_s):.1f} ms for {kind}, {num_late:.2f} late" + (f", most of them {term}" if term else "")
        for kind, length_s, num_late, term in step.lengths
    ]
    if step.offline_limit:
        told.append(f"batch work ended by {step.offline_limit}")
    return "; ".join(told)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
