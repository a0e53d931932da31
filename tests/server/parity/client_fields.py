"""What the installed ``openai`` client can send: its fields, the forms of their values, and its calls."""

import inspect
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import httpx2
import openai
from openai._resource import SyncAPIResource
from openai.types import (
    batch_create_params,
    batch_list_params,
    completion_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES

_STREAMED = ("CompletionCreateParamsStreaming", "ResponseCreateParamsStreaming")
_PARAMETERS = {
    CHAT: (chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming),
    COMPLETIONS: (
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    RESPONSES: (
        response_create_params.ResponseCreateParamsBase,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    "POST /v1/files": (file_create_params.FileCreateParams,),
    "GET /v1/files": (file_list_params.FileListParams,),
    "POST /v1/batches": (batch_create_params.BatchCreateParams,),
    "GET /v1/batches": (batch_list_params.BatchListParams,),
}
_HELPERS = ("connect", "create_and", "parse", "poll", "stream", "unwrap", "upload_", "verify", "wait", "with_")
"""Beginnings of the names of methods that make other calls."""


def fields_of(call: str) -> dict[str, Any]:
    """The fields of a call, with their types."""
    return {name: hint for shape in _PARAMETERS[call] for name, hint in get_type_hints(shape).items()}


def forms(hint: Any, name: str) -> dict[str, type]:
    """The object types of a union, by the value of their field ``name``."""
    found: dict[str, type] = {}
    for shape in _objects(hint):
        for value in literals(get_type_hints(shape).get(name)):
            found.setdefault(value, shape)
    return found


def literals(hint: Any) -> list[str]:
    """The values that a hint lists."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for part in get_args(hint) for value in literals(part)]


def _objects(hint: Any) -> Iterator[type]:
    """The object types in a hint, of lists too; not those inside other objects."""
    if is_typeddict(hint):
        yield hint
    elif get_origin(hint) is not Literal:
        for part in get_args(hint):
            yield from _objects(part)


def sample(shape: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The least object of this type, with some fields given."""
    hints = get_type_hints(shape, include_extras=True)
    needed = {name: _least(get_args(hint)[0]) for name, hint in hints.items() if get_origin(hint) is Required}
    return needed | dict(given)


def _least(hint: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return parts[0]
    if origin in (Union, types.UnionType):
        return _least(parts[0])
    if is_typeddict(hint):
        return sample(hint, {})
    return {str: "x", int: 1, float: 1.0, bool: True, dict: {}}.get(origin or hint, [])


def calls() -> list[tuple[str, str]]:
    """Methods and paths of the client's calls, with ``x`` for every id."""
    found: set[tuple[str, str]] = set()

    def note(request: httpx2.Request) -> httpx2.Response:
        found.add((request.method, request.url.path))
        return httpx2.Response(200, json={})

    with warnings.catch_warnings(), httpx2.Client(transport=httpx2.MockTransport(note)) as http:
        warnings.simplefilter("ignore")
        client = openai.OpenAI(api_key="x", admin_api_key="x", base_url="http://test/v1", http_client=http)
        _call_all(client.with_options(max_retries=0))
    return sorted(found, key=lambda call: (call[1], call[0]))


def _call_all(owner: Any) -> None:
    for name in dir(owner):
        if name.startswith("_") or name.startswith(_HELPERS):
            continue
        member = getattr(owner, name, None)
        if isinstance(member, SyncAPIResource):
            _call_all(member)
        elif inspect.ismethod(member) and isinstance(owner, SyncAPIResource):
            try:
                _call(member)
            except Exception:
                continue  # It wants a value that no id is, or what came back; other calls have the same path.


def _call(method: Any) -> None:
    parameters = inspect.signature(method).parameters.values()
    empty = inspect.Parameter.empty
    needed = [p.name for p in parameters if p.default is empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    is_file = {"file", "data", "image", "video"}
    method(**{name: b"x" if name in is_file else "x" for name in needed})
