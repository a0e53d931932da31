"""Request bodies in ``/openapi.json``: routes read them by hand, so FastAPI cannot see their schemas."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from neaptide.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OfflineSwitchBody,
    TokenizeChatBody,
    TokenizeTextBody,
)

BODIES: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
    OfflineSwitchBody,
)

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {"4XX": "The request cannot be served as it is.", "5XX": "The server cannot serve it now."}


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads one of these bodies."""
    references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Completes the generated document: body schemas, and the one error shape instead of FastAPI's own."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in BODIES], ref_template="#/components/schemas/{model}"
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas |= definitions["$defs"] | {"Error": _ERROR_SCHEMA}
            for operations in document["paths"].values():
                for operation in operations.values():
                    _describe_errors(operation["responses"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_errors(responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, description in _ERRORS.items():
        responses.setdefault(status, {"description": description, "content": content})
