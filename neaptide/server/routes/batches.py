"""Routes of ``/v1/batches``."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import JSONResponse

from neaptide.server.batches.checking.create import (
    LAST_UNIX_S,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARS,
)
from neaptide.server.batches.checking.validate import ENDPOINTS
from neaptide.server.batches.objects import batch_list, batch_object
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.faults import storage_faults
from neaptide.server.http.audit import note_object
from neaptide.server.http.auth import principal_of
from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.http.jsonbody import read_object
from neaptide.server.openai.openapi import IDEMPOTENCY_KEY, JSON_BODY_ERRORS, body_schema, replies, request_body
from neaptide.server.openai.prepare import parse_body
from neaptide.server.openai.schemas import QuoteBody
from neaptide.server.openai.stored_replies import Batch, BatchList, BatchQuote, BatchReceipt, ReceiptCheck
from neaptide.server.quotes.desk import QuoteDesk
from neaptide.server.quotes.shown import quote_object
from neaptide.server.quotes.work import BatchSize
from neaptide.server.routes.files import idempotency_key, lifetime_schema


def _create_schema(windows: tuple[str, ...]) -> dict[str, Any]:
    properties = {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string", "enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "enum": list(windows)},
        "metadata": {
            "type": "object",
            "maxProperties": MAX_METADATA_PAIRS,
            "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
        },
        "output_expires_after": {
            "type": "object",
            "required": ["anchor", "seconds"],
            "properties": {"anchor": {"type": "string", "enum": ["created_at"]}, "seconds": lifetime_schema()},
        },
        "accept_by": {"type": "integer", "minimum": 1, "maximum": LAST_UNIX_S},
    }
    required = ["input_file_id", "endpoint", "completion_window"]
    schema = {"type": "object", "required": required, "properties": properties}
    return body_schema("application/json", schema) | {"parameters": [IDEMPOTENCY_KEY]}


BatchId = Annotated[str, Path()]


def batches_router(service: BatchService, desk: QuoteDesk | None = None) -> APIRouter:
    """Routes of the batches API for one service; quotes and ``accept_by`` need a desk."""
    router = APIRouter(prefix="/v1/batches", tags=["batches"])

    @router.post(
        "",
        openapi_extra=_create_schema(service.settings.completion_windows),
        responses=replies(Batch, *JSON_BODY_ERRORS, *(404, 409, 503, 507)),
    )
    async def create_batch(request: Request) -> Response:
        principal, key = principal_of(request), idempotency_key(request)
        body = await read_object(request, principal.share)
        with storage_faults(service.health):
            record = await service.create_batch(
                principal.tenant,
                body,
                salt=principal.salt,
                idempotency_key=key,
                promise=None if desk is None else desk.promise(principal),
            )
        note_object(request.scope, record.id)
        return JSONResponse(batch_object(record, service.outlooks))

    if desk is not None:
        router.add_api_route(
            "/quote",
            _quote_endpoint(service, desk),
            methods=["POST"],
            openapi_extra=request_body(QuoteBody),
            responses=replies(BatchQuote, *JSON_BODY_ERRORS, 404, 409, 503),
            response_model=None,
            name="quote_batch",
        )

    @router.post(
        "/check_receipt",
        openapi_extra=body_schema("application/json", {"type": "object", "required": ["hash"]}),
        responses=replies(ReceiptCheck, *JSON_BODY_ERRORS, 409),
        response_model=None,
    )
    async def check_receipt(request: Request) -> ReceiptCheck:
        """Whether this server has made the receipt in the body as it is."""
        body = await read_object(request, principal_of(request).share)
        if body.get("object") != "batch.receipt" or not isinstance(body.get("hash"), str):
            raise InvalidRequestError("The body is no receipt of a batch.", code="invalid_value")
        return {"object": "batch.receipt.check", "confirmed": service.seal.confirms(body)}

    @router.get("", responses=replies(BatchList, 400, 503))
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=128)] = None,
    ) -> Response:
        with storage_faults(service.health):
            records, has_more = await service.list_batches(principal_of(request).tenant, limit, after)
            shown = await service.shown(*records)
        return JSONResponse(batch_list(records, has_more, shown))

    @router.get("/{batch_id}", responses=replies(Batch, 404, 503))
    async def get_batch(request: Request, batch_id: BatchId) -> Response:
        with storage_faults(service.health):
            (shown,) = await service.shown(await service.get_batch(batch_id, principal_of(request).tenant))
        return JSONResponse(shown)

    @router.get("/{batch_id}/receipt", responses=replies(BatchReceipt, 404, 409, 503), response_model=None)
    async def get_receipt(request: Request, batch_id: BatchId) -> BatchReceipt:
        """Costs of an ended batch and the uses of its time. Its hash is confirmed by `check_receipt`."""
        with storage_faults(service.health):
            return await service.receipt(batch_id, principal_of(request).tenant)

    @router.post("/{batch_id}/cancel", responses=replies(Batch, 404, 409, 503, 507))
    async def cancel_batch(request: Request, batch_id: BatchId) -> Response:
        with storage_faults(service.health):
            record = await service.cancel_batch(batch_id, principal_of(request).tenant)
        return JSONResponse(batch_object(record, service.outlooks))

    return router


def _quote_endpoint(service: BatchService, desk: QuoteDesk) -> Callable[[Request], Awaitable[BatchQuote]]:
    async def quote_batch(request: Request) -> BatchQuote:
        """When a batch would end that is created now, for several completion windows. Changes nothing."""
        principal = principal_of(request)
        body = parse_body(QuoteBody, await read_object(request, principal.share))
        if (body.input_file_id is None) == (body.lines is None):
            raise InvalidRequestError("Give either 'input_file_id' or 'lines'.", param="input_file_id")
        with storage_faults(service.health):
            if body.input_file_id is not None:
                size = await desk.size_of_file(body.input_file_id, principal)
            else:
                size = _told_size(body)
            return quote_object(await desk.quote(size, principal, answer_tokens=body.output_tokens))

    return quote_batch


def _told_size(body: QuoteBody) -> BatchSize:
    lines = body.lines or 0
    if body.shared_tokens >= body.input_tokens:
        raise InvalidRequestError("'shared_tokens' must be less than 'input_tokens'.", param="shared_tokens")
    new_tokens = lines * (body.input_tokens - body.shared_tokens) + body.shared_tokens
    return BatchSize(lines, lines, lines * body.input_tokens, new_tokens, (body.max_tokens,))
