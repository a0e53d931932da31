"""Strict JSON parser, for every JSON route and every line of a batch file.

The standard parser accepts input that fails later: NaN, lone surrogates (no tokenizer or database encodes them),
numbers beyond 64 bits, and duplicate keys, of which it keeps the last.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from starlette.requests import Request

from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedEncodingError,
    printable,
)
from neaptide.server.http.refusals import Cost

MAX_BODY_BYTES = 20 << 20
MAX_DEPTH = 96
MAX_STRUCTURE = 1 << 20
_WEIGHTS = {b",": 1, b":": 8, b"[": 16, b"{": 16}
"""Relative parse time of what each character begins. The parser blocks all other threads meanwhile."""
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
_INLINE_BYTES = 16 << 10
_INTEGER_CHARS = 400
"""Longest integer that is read exactly; longer ones exceed the range of a double."""


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _any_integer(text: str) -> int | float:
    return int(text) if len(text) <= _INTEGER_CHARS else _any_real(text)


def _any_real(text: str) -> float:
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


class _Suspicion:
    """Records problems while parsing; their paths are found afterwards."""

    def __init__(self) -> None:
        self.bad_number = self.no_number = False

    def constant(self, text: str) -> float:
        self.no_number = True
        return math.nan

    def real(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.bad_number = True
        return value

    def integer(self, text: str) -> int | float:
        # int() refuses very long digit strings with another error; 20 characters hold any int64.
        value = int(text) if len(text) <= 20 else INT64_MAX + 1
        if not INT64_MIN <= value <= INT64_MAX:
            self.bad_number = True
        return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _DuplicateKeyError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return result


def parse_json(raw: bytes, *, of_a_model: bool = False) -> object:
    """Parses a document with UTF-8, finite 64-bit numbers, unique keys, bounded depth and no lone surrogates.

    ``of_a_model`` also accepts what models write: numbers of any size (clamped to a double's range) and repeated keys,
    of which the last counts.

    Raises:
        InvalidRequestError: any other document; ``param`` names the place if it is known.
    """
    _check_structure(raw)
    suspicion = _Suspicion()
    try:
        document: object = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=None if of_a_model else _unique_keys,
            parse_constant=suspicion.constant,
            parse_float=_any_real if of_a_model else suspicion.real,
            parse_int=_any_integer if of_a_model else suspicion.integer,
        )
    except UnicodeDecodeError:
        raise InvalidRequestError("The request body is not valid UTF-8.", code="invalid_json") from None
    except _DuplicateKeyError as error:
        raise InvalidRequestError(
            "The JSON body has an object with duplicate keys.", param=printable(error.key) or None, code="invalid_json"
        ) from None
    except RecursionError:
        _refuse_depth()
    except ValueError:
        raise InvalidRequestError("The request body is not valid JSON.", code="invalid_json") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(document)
    if suspicion.no_number or suspicion.bad_number:
        _refuse_where(document, _is_bad_number, "The number is not finite or does not fit 64 bits.")
    if b"\\u" in raw:
        _refuse_where(document, _is_bad_text, "The text has a lone surrogate.")
    return document


def parse_object(raw: bytes, *, of_a_model: bool = False) -> dict[str, Any]:
    """``parse_json`` for a document that must be an object."""
    document = parse_json(raw, of_a_model=of_a_model)
    if not isinstance(document, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    return document


async def read_object(request: Request, tenant: str) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        PayloadTooLargeError: more than 20 MiB, by ``Content-Length`` or by count.
        InvalidRequestError: not JSON, or not an object.
    """
    return await parse_aside(await read_json(request), request.app.state.context.bodies, tenant)


async def read_json(request: Request) -> bytes:
    """The body of a request whose headers declare JSON.

    Raises:
        PayloadTooLargeError, InvalidRequestError: as ``read_object``.
    """
    _check_headers(request)
    return await read_body(request)


async def parse_aside(raw: bytes, threads: BodyThreads, tenant: str, cost: Cost | None = None) -> dict[str, Any]:
    """``parse_object``, in a thread if the body is long; adds the time to ``cost``."""
    work = (cost or Cost()).of(partial(parse_object, raw))
    if len(raw) <= _INLINE_BYTES:
        return work()
    return await threads.run(work, len(raw), tenant)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises PayloadTooLargeError as soon as it exceeds the limit."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
    return bytes(body)


def _check_headers(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedEncodingError("Compressed request bodies are not accepted.")
    # This also keeps other origins' pages out: a browser must ask before it sends this content type.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError("Content-Type must be application/json.", code="invalid_content_type")


# ---- checks after parsing -------------------------------------------------------------------------------


def _refuse_depth() -> NoReturn:
    raise InvalidRequestError("The JSON body is nested too deeply.", code="invalid_json")


def _check_structure(raw: bytes) -> None:
    """Refuses bodies with more values, keys and lists than any route could use."""
    if len(raw) * max(_WEIGHTS.values()) <= MAX_STRUCTURE or _weight(raw) <= MAX_STRUCTURE:
        return
    # The marks may be inside one long text. Without escapes, every second part between quotes is text.
    parts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * MAX_STRUCTURE)
    if len(parts) > 2 * MAX_STRUCTURE or _weight(b"".join(parts[::2])) > MAX_STRUCTURE:
        raise InvalidRequestError("The JSON body has too many values.", code="invalid_json")


def _weight(raw: bytes) -> int:
    return sum(raw.count(mark) * weight for mark, weight in _WEIGHTS.items())


def _check_depth(document: object) -> None:
    level: list[object] = [document]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
        if not level:
            return
    _refuse_depth()


def _children(node: object) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _is_bad_number(node: object) -> bool:
    if isinstance(node, float):
        return not math.isfinite(node)
    return isinstance(node, int) and not INT64_MIN <= node <= INT64_MAX


def _is_bad_text(node: object) -> bool:
    texts = node.keys() if isinstance(node, dict) else (node,)
    return any(isinstance(t, str) and not t.isascii() and any("\ud800" <= c <= "\udfff" for c in t) for t in texts)


def _refuse_where(document: object, is_bad: Callable[[object], bool], message: str) -> None:
    """Raises for the first bad node. The depth is bounded by now, so the stack of (path, node) stays small."""
    stack: list[tuple[tuple[str, ...], object]] = [((), document)]
    while stack:
        path, node = stack.pop()
        if is_bad(node):
            known = all(p.isascii() and p.replace("_", "").replace("-", "").isalnum() for p in path)
            param = ".".join(path) if path and known else None
            raise InvalidRequestError(message, param=param, code="invalid_value")
        if isinstance(node, dict):
            stack.extend(((*path, key), child) for key, child in node.items())
        elif isinstance(node, list):
            stack.extend(((*path, str(i)), child) for i, child in enumerate(node))
