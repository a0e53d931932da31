"""Exception handlers of the app, which turn errors into replies."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.http.errors import (
    ApiError,
    InvalidRequestError,
    NotFoundError,
    engine_lost,
    engine_unavailable,
    from_parameter_error,
)

logger = logging.getLogger(__name__)


def error_response(error: ApiError) -> Response:
    """The reply with the error's JSON."""
    content = json.dumps(error.body()).encode()
    return Response(content, error.status, headers=error.headers, media_type="application/json")


async def _on_api_error(request: Request, exc: Exception) -> Response:
    return error_response(exc if isinstance(exc, ApiError) else ApiError("Internal server error."))


async def _on_engine_unavailable(request: Request, exc: Exception) -> Response:
    return error_response(engine_lost(exc) if isinstance(exc, EngineUnavailableError) else engine_unavailable())


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    headers = exc.headers if isinstance(exc, HTTPException) else None
    error: ApiError
    if status == 404:
        error = NotFoundError(_unknown_url(request), code="unknown_url", headers=headers)
    elif status == 405:
        allow = {"Allow": ", ".join(_allowed_methods(request))}
        error = InvalidRequestError("Method not allowed for this URL.", code="method_not_allowed", headers=allow)
    elif status < 500:
        error = InvalidRequestError("The request is invalid.", headers=headers)
    else:
        error = ApiError("Internal server error.", headers=headers)
    error.status = status
    return error_response(error)


def _unknown_url(request: Request) -> str:
    text = "Unknown request URL."
    if "/v1/" in request.url.path[1:]:
        text += " Paths begin with /v1: a proxy in front must remove its own prefix."
    return text


def _allowed_methods(request: Request) -> list[str]:
    """Methods of all routes on the path; the router names only those of the first route. GET routes answer HEAD too
    (``HeadMiddleware``)."""
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "POST", "DELETE")}
    routes = request.app.routes
    found = [method for method in scopes if any(route.matches(scopes[method])[0] is Match.FULL for route in routes)]
    return found if "GET" not in found else ["GET", "HEAD", *found[1:]]


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    """Handles FastAPI's own checks of query and path parameters; ``from_validation_error`` handles bodies."""
    errors: Sequence[Any] = getattr(exc, "errors", list)()
    return error_response(from_parameter_error(errors[0] if errors else {}))


async def _on_client_disconnect(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)


async def _on_unexpected(request: Request, exc: Exception) -> Response:
    # Logs the route's template, because text of the caller must not be logged.
    logger.error("unhandled error on %s", getattr(request.scope.get("route"), "path", "no route"), exc_info=exc)
    response = error_response(ApiError("Internal server error.", code="internal_error"))
    # This reply bypasses the middleware that adds the id to all others.
    response.headers["x-request-id"] = str(request.scope.get("state", {}).get("request_id", ""))
    return response


def install_handlers(app: Starlette, parameter_error: type[Exception] | None = None) -> None:
    """Registers the handlers; every non-2xx reply of the app passes through one of these.

    Args:
        parameter_error: exception of the app's framework for query and path parameters. Passed in, because the gateway
            runs without FastAPI.
    """
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineUnavailableError, _on_engine_unavailable)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if parameter_error is not None:
        app.add_exception_handler(parameter_error, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
