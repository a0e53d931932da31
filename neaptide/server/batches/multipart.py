"""Reads a multipart upload as it arrives: fields into memory, the file into its temporary place."""

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from neaptide.server.batches.storing.files import Upload, UploadForm
from neaptide.server.http.errors import InvalidRequestError, PayloadTooLargeError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 4_096
MAX_PARTS = 32
MAX_OVERHEAD_BYTES = 1 << 20
"""Largest size of part headers and other fields, in addition to the file."""


class _Parts:
    """Collects the parser's callbacks; ``pending`` is file content that is not written yet."""

    def __init__(self) -> None:
        self.pending: list[bytes] = []
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self.complete = False
        self._num_parts = 0
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._field: str | None = None

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._on_part_begin,
            "on_part_data": self._on_part_data,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError("The form has too many parts.")
        self._disposition = b""

    def _on_header_end(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if self.filename is not None:
                raise InvalidRequestError("The form has more than one file.", param="file")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self._field = None
        else:
            self._field = name
            self.fields[name] = b""

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.pending.append(data[start:end])
            return
        self.fields[self._field] += data[start:end]
        if len(self.fields[self._field]) > MAX_FIELD_BYTES:
            raise InvalidRequestError("A form field is too long.")

    def _on_end(self) -> None:
        self.complete = True


async def read_upload(request: Request, upload: Upload, max_file_bytes: int) -> UploadForm:
    """Writes the request's file part to ``upload`` and returns the other fields of the form.

    Raises:
        InvalidRequestError: not a complete multipart form with ``file`` and ``purpose``.
        PayloadTooLargeError: the file is too large.
        ClientDisconnect: the client disconnected before the end.
    """
    length = request.headers.get("content-length", "")
    too_large = f"The file is larger than {max_file_bytes} bytes."
    if length.isascii() and length.isdigit() and int(length[:18]) > max_file_bytes + MAX_OVERHEAD_BYTES:
        raise PayloadTooLargeError(too_large)
    content_type, options = parse_options_header(request.headers.get("content-type"))
    if content_type != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequestError("Content-Type must be multipart/form-data.", code="invalid_content_type")
    parts = _Parts()
    num_bytes = 0
    try:
        parser = MultipartParser(options[b"boundary"], parts.callbacks())
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_file_bytes + MAX_OVERHEAD_BYTES:
                raise PayloadTooLargeError(too_large)
            parser.write(chunk)
            for data in parts.pending:
                await upload.write(data)
            parts.pending.clear()
    except FormParserError:
        raise InvalidRequestError("The request body is not a valid multipart form.") from None
    if not parts.complete:
        raise InvalidRequestError("The multipart form is not complete.")
    return _form(parts)


def _form(parts: _Parts) -> UploadForm:
    if parts.filename is None:
        raise InvalidRequestError(
            "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
        )
    if "purpose" not in parts.fields:
        raise InvalidRequestError(
            "Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter"
        )
    return UploadForm(
        filename=parts.filename.replace("\\", "/").rsplit("/", 1)[-1],
        purpose=parts.fields["purpose"].decode("utf-8", "replace"),
        expires_after_s=_expires_after_s(parts.fields),
    )


def _expires_after_s(fields: dict[str, bytes]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != b"created_at":
        raise InvalidRequestError(
            "Invalid value for 'expires_after[anchor]': must be created_at.",
            param="expires_after[anchor]",
            code="invalid_value",
        )
    if seconds is None or not seconds.isdigit() or len(seconds) > 12:
        raise InvalidRequestError(
            "Invalid value for 'expires_after[seconds]': must be a number of seconds.",
            param="expires_after[seconds]",
            code="invalid_type",
        )
    return int(seconds)
