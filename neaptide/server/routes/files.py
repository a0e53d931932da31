"""``/v1/files``: parse, call, shape."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, JSONResponse

from neaptide.server.auth import principal_of
from neaptide.server.batches.faults import storage_faults
from neaptide.server.batches.multipart import read_upload
from neaptide.server.batches.objects import file_object, list_object
from neaptide.server.batches.service import BatchService
from neaptide.server.errors import InvalidRequestError

MAX_IDEMPOTENCY_KEY_CHARS = 255

_UPLOAD_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch", "user_data"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}

FileId = Annotated[str, Path()]


def idempotency_key(request: Request) -> str | None:
    """The client's ``Idempotency-Key``. Raises InvalidRequestError if it is too long or not printable."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isprintable()):
        raise InvalidRequestError("The Idempotency-Key is not valid.", code="invalid_value")
    return key


def files_router(service: BatchService) -> APIRouter:
    """Routes of the files API on one service."""
    router = APIRouter(prefix="/v1/files", tags=["files"])
    files = service.files

    @router.post("", openapi_extra=_UPLOAD_SCHEMA)
    async def upload_file(request: Request) -> Response:
        owner, key = principal_of(request).tenant, idempotency_key(request)
        with storage_faults():
            async with files.upload() as upload:
                form = await read_upload(request, upload, files.max_file_bytes)
                record = await files.commit(upload, form, owner, key)
        return JSONResponse(file_object(record))

    @router.get("")
    async def list_files(
        request: Request,
        purpose: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=128)] = None,
    ) -> Response:
        owner = principal_of(request).tenant
        with storage_faults():
            records, has_more = await files.list_page(
                owner, purpose=purpose, limit=limit, after=after, ascending=order == "asc"
            )
        return JSONResponse(list_object([file_object(record) for record in records], has_more))

    @router.get("/{file_id}")
    async def get_file(request: Request, file_id: FileId) -> Response:
        with storage_faults():
            return JSONResponse(file_object(await files.get(file_id, principal_of(request).tenant)))

    @router.get("/{file_id}/content")
    async def get_content(request: Request, file_id: FileId) -> Response:
        with storage_faults():
            record = await files.get(file_id, principal_of(request).tenant)
        return FileResponse(files.path(record.id), media_type="application/octet-stream", filename=record.filename)

    @router.delete("/{file_id}")
    async def delete_file(request: Request, file_id: FileId) -> Response:
        with storage_faults():
            await files.delete(file_id, principal_of(request).tenant)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router
