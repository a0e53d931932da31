"""Translates a request of the Responses API to a chat."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from neaptide.server.http.errors import InvalidRequestError, UnsupportedParameterError
from neaptide.server.openai.responses.bodies import (
    FunctionTool,
    InputItem,
    ItemPart,
    NamedChoice,
    ResponsesBody,
)
from neaptide.server.openai.responses.sealing import unseal
from neaptide.server.openai.schemas import ChatBody

_REFUSED = {
    "previous_response_id": "Responses are not stored here; send the whole conversation as input.",
    "conversation": "Conversations are not stored here; send them whole as input.",
    "prompt": "Prompts are not stored here.",
    "context_management": "The input is never compacted.",
    "moderation": "Nothing is moderated here.",
}
FIELDS_OF_CHATS = ChatBody.model_fields.keys() - ResponsesBody.model_fields.keys()
"""Fields of chats that this API lacks or names otherwise. Ignoring them would change the output: they are refused."""
_NAMED_OTHERWISE = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
}
_ASKS_NOTHING: Mapping[str, Any] = {"min_p": 0, "repetition_penalty": 1, "add_generation_prompt": True}
"""Values of chat fields that do not change the output, in addition to the defaults."""
_LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
_INCLUDED = frozenset({_LOGPROBS, SEALED})
"""Accepted values of ``include``."""
_TEXT_TYPES = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
"""Types of parts that are text."""
_SAME = (
    *("model", "temperature", "top_p", "top_k", "seed", "parallel_tool_calls", "service_tier", "cache_salt"),
    *("ttft_slo_ms", "tpot_slo_ms", "chat_template_kwargs", "stream"),
)
_PLACES = (
    (r"messages.*", "input"),  # Messages are not items, so indices differ.
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"tool_choice\.function\.name", "tool_choice.name"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
)


def as_chat(body: ResponsesBody) -> dict[str, Any]:
    """The chat body with the same meaning.

    Raises:
        InvalidRequestError: something is not offered; the error uses this API's field names.
    """
    _check(body)
    chat = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    chat["messages"] = _messages(body)
    if (continued := _continued(body)) is not None:
        chat["continue_final_message"] = continued
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
        if body.tool_choice is not None:
            chat["tool_choice"] = _choice(body.tool_choice)
    if (response_format := _response_format(body)) is not None:
        chat["response_format"] = response_format
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs is not None or _LOGPROBS in body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return chat


def check_fields_of_chats(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameterError for a field of chats that asks for something."""
    for name in sorted(FIELDS_OF_CHATS & body.keys()):
        value, default = body[name], ChatBody.model_fields[name].get_default(call_default_factory=True)
        nothing = _ASKS_NOTHING.get(name, default)
        is_off = value is False and nothing is not True
        if not is_off and value not in (None, default, nothing):
            other = f"Use '{_NAMED_OTHERWISE[name]}'." if name in _NAMED_OTHERWISE else "A field of chats."
            raise UnsupportedParameterError(f"'{name}' is not supported. {other}", param=name)


def own_name(param: str) -> str:
    """This API's name of a chat field."""
    for chats, ours in _PLACES:
        if found := re.match(chats, param):
            return found.expand(ours) + param[found.end() :]
    return param


def _check(body: ResponsesBody) -> None:
    for name, why in _REFUSED.items():
        if getattr(body, name) is not None:
            raise UnsupportedParameterError(why, param=name)
    if body.background:
        raise UnsupportedParameterError("Background work is not supported; use a batch.", param="background")
    if body.truncation == "auto":
        raise UnsupportedParameterError("The input is never truncated.", param="truncation")
    if unknown := [name for name in body.include if name not in _INCLUDED]:
        raise UnsupportedParameterError("This cannot be included.", param=f"include.{body.include.index(unknown[0])}")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError("Only allowed with tools.", param="tool_choice", code="invalid_value")


# ---- input -----------------------------------------------------------------------------------------------


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add(item, f"input.{index}", messages)
    return messages


def _continued(body: ResponsesBody) -> str | None:
    """The field of the last message that the answer goes on with: of an item that was sent back unfinished."""
    if isinstance(body.input, str):
        return None
    last = body.input[-1]
    if last.status not in ("in_progress", "incomplete"):
        return None
    if last.type == "message" and last.role == "assistant":
        return "content"
    return "reasoning_content" if last.type == "reasoning" else None


def _add(item: InputItem, place: str, messages: list[dict[str, Any]]) -> None:
    """Appends the item. Reasoning, text and calls of one turn go into one message."""
    if item.type == "message":
        role = _needed(item.role, f"{place}.role")
        content = _text(_needed(item.content, f"{place}.content"), f"{place}.content")
        if role == "assistant" and messages and _is_reasoning_alone(messages[-1]):
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif item.type == "function_call":
        function = {"name": _needed(item.name, f"{place}.name"), "arguments": item.arguments}
        call = {"id": _needed(item.call_id, f"{place}.call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        call_id = _needed(item.call_id, f"{place}.call_id")
        content = _text(_needed(item.output, f"{place}.output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif item.type == "reasoning":
        # A summary alone comes from a model that keeps its thoughts.
        thoughts = _text(item.content or [], f"{place}.content") or unseal(item.encrypted_content or "")
        thoughts = thoughts or _text(item.summary, f"{place}.summary")
        if thoughts:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    elif item.type == "item_reference":
        raise UnsupportedParameterError(
            "Items are not stored here; send them whole, as clients do that are told not to store.",
            param=f"{place}.type",
        )
    else:
        raise UnsupportedParameterError("Items of this type are not supported.", param=f"{place}.type")


def _is_reasoning_alone(message: Mapping[str, Any]) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _needed(value: Any, param: str) -> Any:
    if value is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    return value


def _text(content: str | Sequence[ItemPart], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in _TEXT_TYPES:
            raise UnsupportedParameterError("Only text is supported.", param=f"{place}.{index}.type")
        name = "refusal" if part.type == "refusal" else "text"
        texts.append(_needed(getattr(part, name), f"{place}.{index}.{name}"))
    return "\n".join(texts)


# ---- tools and format ------------------------------------------------------------------------------------


def _tool(tool: FunctionTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        raise UnsupportedParameterError("Only functions are supported.", param=f"tools.{index}.type")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _choice(choice: str | NamedChoice) -> str | Mapping[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.type == "function" and not choice.name:
        raise InvalidRequestError(
            "Missing required parameter: 'tool_choice.name'. In responses a function is named as "
            '{"type": "function", "name": "..."}.',
            param="tool_choice.name",
            code="missing_required_parameter",
        )
    return {"type": choice.type, "function": {"name": choice.name}}


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        if wanted.type not in ("text", "json_object"):
            raise InvalidRequestError("Unknown type.", param="text.format.type", code="invalid_value")
        return {"type": wanted.type, "schema": wanted.schema_, **(wanted.model_extra or {})}
    schema = {"name": wanted.name or "answer", "schema": _needed(wanted.schema_, "text.format.schema")}
    return {"type": "json_schema", "json_schema": schema, **(wanted.model_extra or {})}
