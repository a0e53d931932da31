"""Messages of a conversation as chat templates expect them.

A history is what clients kept of earlier turns, and a refused history blocks every later turn. So what a model wrote is
never refused: arguments that are no object become an empty one, as in vLLM.
"""

from collections.abc import Sequence
from typing import Any

from neaptide.server.http.errors import InvalidRequestError, UnsupportedParameterError
from neaptide.server.http.jsonbody import parse_object
from neaptide.server.openai.schemas import ChatMessage, ContentPart, FunctionCall

_TEXT_TYPES = ("text", "input_text", "output_text")
_MODEL_WRITES = ("assistant", "tool", "function")
"""Roles of messages that may lack content, because no person wrote them."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in a template's form: content as text or as text parts, arguments of calls as objects.

    Raises:
        InvalidRequestError: a part is missing or not text; ``param`` names its place.
    """
    return [_template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, place: str) -> dict[str, Any]:
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{place}.tool_call_id")
    if message.content is None and message.refusal is None and message.role not in _MODEL_WRITES:
        raise _missing(f"{place}.content")
    if message.audio is not None:
        raise UnsupportedParameterError("Only text is supported.", param=f"{place}.audio")
    content, thoughts = _content(message, f"{place}.content")
    result: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "function":  # Templates know the role that replaced it.
        result["role"] = "tool"
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    reasoning = message.reasoning_content or message.reasoning or "\n".join(thoughts)
    if reasoning:
        result["reasoning_content"] = reasoning
    calls = [(call.id, call.function) for call in message.tool_calls]
    if message.function_call is not None and not calls:
        calls = [("", message.function_call)]
    if calls:
        result["tool_calls"] = [_call(call_id, function) for call_id, function in calls]
    return result


def _content(message: ChatMessage, place: str) -> tuple[str | list[dict[str, str]], list[str]]:
    """The content, and the thoughts among its parts. Several texts stay parts: templates join them in their own way."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or "", []
    texts: list[str] = []
    thoughts: list[str] = []
    for index, part in enumerate(message.content):
        if isinstance(part, ContentPart) and part.type == "thinking" and message.role == "assistant":
            thoughts.append(part.thinking or "")
        else:
            texts.append(part if isinstance(part, str) else _text(part, f"{place}.{index}"))
    if len(texts) > 1 and message.role in ("tool", "function"):  # Most templates take results as one text.
        return "\n".join(texts), thoughts
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts], thoughts
    return "".join(texts), thoughts


def _text(part: ContentPart, place: str) -> str:
    if part.type not in (*_TEXT_TYPES, "refusal"):
        raise UnsupportedParameterError("Only parts of type 'text' are supported.", param=f"{place}.type")
    name = "refusal" if part.type == "refusal" else "text"
    text = getattr(part, name)
    if text is None:
        raise _missing(f"{place}.{name}")
    return str(text)


def _call(call_id: str, function: FunctionCall) -> dict[str, Any]:
    arguments = function.arguments
    if isinstance(arguments, str):
        arguments = _object(arguments)
    return {"id": call_id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _object(text: str) -> dict[str, Any]:
    """The object that a model wrote, empty if it wrote anything else."""
    try:
        return parse_object(text.encode(errors="replace"), of_a_model=True)
    except InvalidRequestError:
        return {}


def _missing(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )
