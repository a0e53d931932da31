"""Additions to ``/openapi.json``: FastAPI does not see the bodies, which routes read and write themselves.

The fuzz test sends what the document describes, and more. It reports every reply that is not described.
"""

from collections.abc import Mapping
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from neaptide.server.http.auth import OPEN_PATHS, KeyRing
from neaptide.server.openai.replies import ChatCompletionChunk, CompletionChunk, ErrorReply
from neaptide.server.openai.responses.bodies import ResponsesBody
from neaptide.server.openai.responses.replies import ResponseEvent
from neaptide.server.openai.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OfflineSwitchBody,
    QuoteBody,
    TokenizeChatBody,
    TokenizeTextBody,
    WhatIfBody,
)

BODIES: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
    OfflineSwitchBody,
    WhatIfBody,
    QuoteBody,
)
JSON_BODY_ERRORS = (400, 408, 413, 415)
"""Errors of any route that reads a JSON body."""

_ERRORS = {
    400: "The request is malformed or asks for something that is not offered.",
    401: "The API key is missing or unknown.",
    403: "The caller has no right to do this.",
    404: "There is no such model, file or batch.",
    408: "The body arrived too slowly.",
    409: "The state of the object does not allow this.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Best-effort work is shed under load; try again after `Retry-After`.",
    431: "The headers are too many or too large.",
    500: "A failure of the server.",
    503: "Starting, restarting, stopping or overloaded; try again after `Retry-After`.",
    507: "The server has no space left for files; try again after `Retry-After`.",
}
_ANYWHERE = (400, 431, 500)
"""Errors of every route: an unknown ``Host``, too many headers, a server error."""
_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Returned in the reply and logged, if it has at most 64 letters, digits, `_` and `-`.",
    "schema": {"type": "string"},
}
_REQUEST_ID_REPLY = {
    "description": "The id of this exchange, also in the server's log.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A repeat with the same key and content returns the object that the first one made.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads one of these bodies."""
    references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return body_schema("application/json", references[0] if len(references) == 1 else {"anyOf": references})


def body_schema(media_type: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads a body of this media type."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def replies(
    shape: type[Any] | None,
    *errors: int,
    events: Any = None,
    raw: Mapping[str, str] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route: the body of its 200, and its errors in addition to those of every route.

    Args:
        events: content of the events of a streamed 200.
        raw: media types of a 200 other than JSON, with a description.
    """
    success: dict[str, Any] = {"description": "Done."}
    if shape is not None:
        success["model"] = shape
    content = {name: {"schema": {"type": "string", "description": what}} for name, what in (raw or {}).items()}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(events)}
    if content:
        success["content"] = content
    return {200: success, **{status: {"model": ErrorReply, "description": _ERRORS[status]} for status in errors}}


def _event_schema(chunks: Any) -> dict[str, Any]:
    bodies = [
        {"$ref": f"#/components/schemas/{shape.__name__}"} for shape in (*(get_args(chunks) or (chunks,)), ErrorReply)
    ]
    as_json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
    data = {"anyOf": [{"const": "[DONE]"}, as_json]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def install_openapi(app: FastAPI) -> None:
    """Completes the generated document: request bodies, keys, request ids, and the error format."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, bodies = models_json_schema(
        [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
    )
    shapes: tuple[Any, ...] = (ErrorReply, ChatCompletionChunk, CompletionChunk, *get_args(ResponseEvent))
    _, others = TypeAdapter.json_schemas(
        [(shape.__name__, "serialization", TypeAdapter(shape)) for shape in shapes],
        ref_template="#/components/schemas/{model}",
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own schemas, which no reply uses.
        schemas.pop(name, None)
    schemas |= others["$defs"] | bodies["$defs"]
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
    }
    keys: KeyRing = app.state.keys
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_open = path in OPEN_PATHS
            operation["security"] = [{"key": []}, {"api_key": []}] if keys.required and not is_open else []
            operation.setdefault("parameters", []).append(_REQUEST_ID)
            _complete_responses(operation["responses"], _ANYWHERE if is_open else (*_ANYWHERE, 401))
    return document


def _complete_responses(responses: dict[str, Any], errors: tuple[int, ...]) -> None:
    responses.pop("422", None)
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
    for status in errors:
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    for response in responses.values():
        response["headers"] = {"x-request-id": _REQUEST_ID_REPLY}
