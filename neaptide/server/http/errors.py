"""Errors that callers see.

ApiError                          any status; has message, type, param and code
├── InvalidRequestError           400  the request is malformed or asks for something that is not offered
│   ├── ContextLengthError        400  the prompt alone does not fit the model's context
│   └── UnsupportedParameterError 400  a valid OpenAI parameter that this server does not enforce
├── AuthenticationError           401  key missing or unknown
├── PermissionDeniedError         403  a known caller without the right
├── NotFoundError                 404  model, file, batch or route
├── RequestTimeoutError           408  the request did not arrive in time
├── ConflictError                 409  wrong state for the request; retrying does not help
├── PayloadTooLargeError          413
├── UnsupportedEncodingError      415  compressed bodies
├── HeadersTooLargeError          431
├── RateLimitError                429  the limits of the caller's key are used up
├── OverloadedError               429  flex work that is shed, or 503 for online work; retrying later helps
├── EngineFailedError             500  the engine could not complete this request
└── UnavailableError              503  starting, restarting or shutting down

Messages are fixed texts and never repeat the caller's text. An echoed body would let a small request cause a large
reply, and would bring secrets into logs.

This module imports no web framework: the process that checks batch files raises these errors too, and importing one
would take most of its start time. ``error_replies`` turns errors into replies.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from neaptide.engine.params import GRAMMAR_ERROR, INTERNAL_ERROR, NUMERICAL_ERROR, OUT_OF_MEMORY
from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.openai.replies import ErrorReply

MAX_MESSAGE_CHARS = 300
MAX_PARAM_CHARS = 96


class ApiError(Exception):
    """An error reply: ``{"error": {"message", "type", "param", "code"}}``, always with all four keys."""

    status = 500
    type = "server_error"
    code: str | None = None
    is_passing = False
    """Whether the error is temporary and not the request's fault; see ``is_passing``."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param[:MAX_PARAM_CHARS] if param is not None else None
        self.code = code if code is not None else type(self).code
        self.headers = dict(headers or {})

    def body(self) -> ErrorReply:
        """The error's JSON object; also the data of an SSE error event and the body of a failed batch line."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """The request is malformed or asks for something that is not offered."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt alone does not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    """A valid OpenAI parameter that this server does not enforce."""

    code = "unsupported_parameter"


class AuthenticationError(ApiError):
    """The key is missing or unknown."""

    status = 401
    type = "invalid_request_error"


class PermissionDeniedError(ApiError):
    """The caller is known but lacks the right."""

    status = 403
    type = "permission_error"


class NotFoundError(ApiError):
    """No such model, file, batch or route."""

    status = 404
    type = "invalid_request_error"


class RequestTimeoutError(ApiError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConflictError(ApiError):
    """The request conflicts with the state. The header keeps the SDK from retrying, as it does after a plain 409."""

    status = 409
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code, headers={"x-should-retry": "false"})


class PayloadTooLargeError(ApiError):
    """The body is above the limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncodingError(ApiError):
    """The body is compressed; a small one could unpack to any size."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


class HeadersTooLargeError(ApiError):
    """Too many request headers, or too long ones."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class OverloadedError(ApiError):
    """Too much work is queued. Online: 503, so that a load balancer tries another replica. Flex: 429."""

    is_passing = True

    def __init__(self, *, online: bool, retry_after_s: int) -> None:
        self.status = 503 if online else 429
        self.type = "server_error" if online else "rate_limit_error"
        text = "The server is overloaded; try again shortly." if online else "Resource Unavailable; try again later."
        code = "overloaded" if online else "resource_unavailable"
        super().__init__(text, code=code, headers={"Retry-After": str(retry_after_s)})


class RateLimitError(ApiError):
    """The limits of the caller's key are used up.

    Args:
        type: "requests" or "tokens".
    """

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, type: str, headers: Mapping[str, str]) -> None:
        self.type = type
        super().__init__(message, headers=headers)


class EngineFailedError(ApiError):
    """The engine could not complete this request: 500, or 400 if the request's own grammar is at fault.

    ``reason`` comes from the engine. The caller sees it only if it is a known code.
    """

    code = "engine_error"

    def __init__(self, reason: str | None = None) -> None:
        code = reason if reason in (GRAMMAR_ERROR, NUMERICAL_ERROR, INTERNAL_ERROR, OUT_OF_MEMORY) else None
        text = "The engine could not complete this request."
        if code == GRAMMAR_ERROR:
            # The cause is the request alone, with the tokens that it led to.
            self.status, self.type = 400, InvalidRequestError.type
            text = "The output could not follow the schema or grammar to its end: it is too complex or has no end."
        if code == OUT_OF_MEMORY:
            text = "This request needs more memory than the device has."
        # A retry would fail again, and might take other requests with it.
        headers = {"x-should-retry": "false"}
        super().__init__(text, code=code, headers=headers)


class UnavailableError(ApiError):
    """The server is starting, restarting or shutting down."""

    status = 503
    code = "engine_unavailable"
    is_passing = True

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int = 2) -> None:
        super().__init__(message, code=code, headers={"Retry-After": str(retry_after_s)})


def is_passing(error: BaseException) -> bool:
    """Whether the error is temporary and not the request's fault, so that the same request may succeed later.

    An online caller is told so and may retry. A line of an accepted batch is not ended by it: its step is repeated. A
    missing file counts as temporary, too; a missing file record is another error (``NotFoundError``).
    """
    return error.is_passing if isinstance(error, ApiError) else isinstance(error, OSError)


NOT_BEGUN = "x-neaptide-not-begun"
"""Header of a refusal before any work was done, after which any request may be sent to another server."""


def server_stops() -> UnavailableError:
    """Error for new work while the server shuts down. It ends the connection: through a load balancer the client's next
    one leads to another server."""
    error = UnavailableError("The server is shutting down.", code="server_shutdown")
    error.headers |= {NOT_BEGUN: "true", "Connection": "close"}
    return error


def model_not_found(served: str) -> NotFoundError:
    """Error for an unknown model; names the served one."""
    message = f"The requested model is not served here; this server serves {served!r}."
    return NotFoundError(message, param="model", code="model_not_found")


def local_callers_only() -> PermissionDeniedError:
    """Error for an operator's request from another machine to a server without keys. Requests through a container's
    bridge or a proxy look like that, too."""
    message = (
        "This server has no API keys, so only callers on its own machine may do this. "
        "Start it with an admin key (--api-key KEY:admin) to allow that key's holders."
    )
    return PermissionDeniedError(message, code="local_callers_only")


def engine_unavailable() -> UnavailableError:
    """Error while no engine is attached."""
    return UnavailableError("The engine is starting or restarting; try again in a few seconds.")


def engine_lost(error: EngineUnavailableError) -> UnavailableError:
    """Error for a request whose engine has died. Tells the SDK not to retry a request that may have killed it."""
    reply = engine_unavailable()
    if error.may_have_caused_it:
        reply.headers["x-should-retry"] = "false"
    return reply


# ---- validation errors -----------------------------------------------------------------------------------


def from_validation_error(exc: ValidationError, body: object) -> InvalidRequestError:
    """The most specific error of a pydantic failure, in OpenAI's words.

    A union reports every branch. The caller meant the branch that reached deepest into the body; among equals, the one
    with the right type.
    """
    found = [(_path_in_body(error["loc"], body, error["type"]), error) for error in exc.errors(include_url=False)]
    path, error = max(found, key=lambda item: (len(item[0]), _code(item[1]["type"]) != "invalid_type"))
    param = ".".join(path) or None
    return InvalidRequestError(_message(error["type"], error["msg"], param), param=param, code=_code(error["type"]))


def from_parameter_error(error: Mapping[str, Any]) -> InvalidRequestError:
    """The error of one entry of FastAPI's own checks of query and path parameters."""
    param = ".".join(printable(str(part)) for part in error.get("loc", ())[1:]) or None
    kind = str(error.get("type", ""))
    return InvalidRequestError(_message(kind, str(error.get("msg", "")), param), param=param, code=_code(kind))


def _path_in_body(loc: tuple[int | str, ...], body: object, error_type: str) -> list[str]:
    """The part of ``loc`` with keys of the body; the rest are names of union branches."""
    path: list[str] = []
    current = body
    for place, part in enumerate(loc):
        if isinstance(current, dict) and isinstance(part, str):
            if part in current:
                current = current[part]
            elif error_type != "missing" or place < len(loc) - 1:
                continue
            path.append(printable(part))
        elif isinstance(current, list) and isinstance(part, int) and part < len(current):
            current = current[part]
            path.append(str(part))
    return path


def printable(key: str) -> str:
    """The key of a caller without what a message must not repeat."""
    return "".join(c for c in key[:64] if c.isascii() and (c.isalnum() or c in "_-."))


def _code(error_type: str) -> str:
    if error_type == "missing":
        return "missing_required_parameter"
    if error_type.endswith("_type") or error_type in ("int_from_float", "model_attributes_type"):
        return "invalid_type"
    return "invalid_value"


def _message(error_type: str, text: str, param: str | None) -> str:
    if error_type == "missing":
        return f"Missing required parameter: '{param}'."
    # Only these texts come from the schema alone; others may quote the input.
    safe = error_type.endswith(("_type", "_than", "_than_equal", "too_short", "too_long", "literal_error"))
    safe = safe or error_type in ("finite_number", "int_from_float", "int_parsing", "string_pattern_mismatch")
    detail = text if safe else "Invalid value"
    return f"Invalid value for '{param}': {detail}." if param else f"Invalid request body: {detail}."
