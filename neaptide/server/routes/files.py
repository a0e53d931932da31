"""Routes of ``/v1/files``."""

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, BinaryIO, Literal

from anyio import AsyncFile, wrap_file
from fastapi import APIRouter, Path, Query, Request, Response
from starlette.responses import FileResponse, JSONResponse
from starlette.types import Receive, Scope, Send

from neaptide.server.batches.multipart import read_upload
from neaptide.server.batches.objects import file_list, file_object
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.faults import storage_faults
from neaptide.server.batches.storing.files import MAX_EXPIRY_S, MIN_EXPIRY_S, PURPOSES
from neaptide.server.http.audit import note_object
from neaptide.server.http.auth import principal_of
from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.openai.openapi import IDEMPOTENCY_KEY, body_schema, replies
from neaptide.server.openai.stored_replies import File, FileDeleted, FileList

MAX_IDEMPOTENCY_KEY_CHARS = 255
_ONE_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


def lifetime_schema() -> dict[str, Any]:
    """Schema of a file's lifetime in seconds."""
    return {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S}


def _upload_schema() -> dict[str, Any]:
    properties = {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": lifetime_schema(),
    }
    schema = {"type": "object", "required": ["file", "purpose"], "properties": properties}
    return body_schema("multipart/form-data", schema) | {"parameters": [IDEMPOTENCY_KEY]}


_CONTENT_REPLIES = replies(None, 404, 503, raw={"application/octet-stream": "The bytes of the file."})
FileId = Annotated[str, Path()]


def idempotency_key(request: Request) -> str | None:
    """The client's ``Idempotency-Key``. Raises InvalidRequestError if it is too long or not printable."""
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isprintable()):
        raise InvalidRequestError("The Idempotency-Key is not valid.", code="invalid_value")
    return key


def _keep_one_range(request: Request, num_bytes: int) -> None:
    """Drops a ``Range`` header that is not one part of the file: many parts are expensive, and odd ones get no error
    body."""
    headers = request.scope["headers"]
    found = _ONE_RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or int(found[1]) >= num_bytes or (found[2] and int(found[2]) < int(found[1])):
        request.scope["headers"] = [(name, value) for name, value in headers if name != b"range"]


class OpenFileResponse(FileResponse):
    """A file that is already open, so that it is served even if it is deleted or descriptors run out."""

    def __init__(self, file: BinaryIO, filename: str) -> None:
        super().__init__(
            f"/proc/self/fd/{file.fileno()}",
            media_type="application/octet-stream",
            filename=filename,
            stat_result=os.fstat(file.fileno()),
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the file like ``FileResponse``, and closes it."""
        with self._file:
            await super().__call__(scope, receive, send)

    @asynccontextmanager
    async def _open_file(self) -> AsyncIterator[AsyncFile[bytes]]:
        # Versions of Starlette without this hook open the path, which is the same file.
        yield wrap_file(self._file)


def files_router(service: BatchService) -> APIRouter:
    """Routes of the files API for one service."""
    router = APIRouter(prefix="/v1/files", tags=["files"])
    files = service.files

    @router.post("", openapi_extra=_upload_schema(), responses=replies(File, 400, 408, 409, 413, 503, 507))
    async def upload_file(request: Request) -> Response:
        service.check_open()
        owner, key = principal_of(request).tenant, idempotency_key(request)
        with storage_faults(service.health):
            async with files.upload() as upload:
                form = await read_upload(request, upload, files.max_file_bytes)
                record = await files.commit(upload, form, owner, key)
        note_object(request.scope, record.id)
        return JSONResponse(file_object(record))

    @router.get("", responses=replies(FileList, 400, 503))
    async def list_files(
        request: Request,
        purpose: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=128)] = None,
    ) -> Response:
        owner = principal_of(request).tenant
        with storage_faults(service.health):
            records, has_more = await files.list_page(
                owner, purpose=purpose, limit=limit, after=after, ascending=order == "asc"
            )
        return JSONResponse(file_list(records, has_more))

    @router.get("/{file_id}", responses=replies(File, 404, 503))
    async def get_file(request: Request, file_id: FileId) -> Response:
        with storage_faults(service.health):
            return JSONResponse(file_object(await files.get(file_id, principal_of(request).tenant)))

    @router.get(
        "/{file_id}/content",
        responses=_CONTENT_REPLIES | {206: _CONTENT_REPLIES[200]},
        response_class=Response,
    )
    async def get_content(request: Request, file_id: FileId) -> Response:
        with storage_faults(service.health):
            record = await files.get(file_id, principal_of(request).tenant)
            file = await files.open(record)
        _keep_one_range(request, record.num_bytes)
        return OpenFileResponse(file, record.filename)

    @router.delete("/{file_id}", responses=replies(FileDeleted, 404, 409, 503, 507))
    async def delete_file(request: Request, file_id: FileId) -> Response:
        with storage_faults(service.health):
            await files.delete(file_id, principal_of(request).tenant)
        return JSONResponse(FileDeleted(id=file_id, object="file", deleted=True))

    return router
