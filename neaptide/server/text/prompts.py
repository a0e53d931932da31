"""Converts callers' prompts to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from neaptide.server.context import ServingContext
from neaptide.server.http.errors import ContextLengthError, InvalidRequestError, UnsupportedParameterError
from neaptide.server.openai.schemas import ChatBody, CompletionBody, Conversation, Tool
from neaptide.server.text.messages import template_messages

MAX_CHOICES = 2048
"""Most choices of one request: prompts times ``n``."""
MAX_CHARS_PER_TOKEN = 8
"""Longest text, relative to the context, that is tokenized: tokenizers are slow on such input."""


def encode_conversation(
    body: Conversation, tools: Sequence[Mapping[str, Any]] | None, context: ServingContext
) -> list[int]:
    """Token ids of a conversation; ``tools`` are the definitions as the caller wrote them."""
    if isinstance(body, ChatBody):
        _check_chat(body)
    # The template's text counts as well; the exact check on tokens follows.
    max_chars = MAX_CHARS_PER_TOKEN * context.max_model_len + (1 << 16)
    messages = template_messages(body.messages)
    shown_tools = tools if offered_tools(body) else None
    if _is_longer(max_chars, messages, shown_tools, body.chat_template_kwargs):
        raise ContextLengthError("The conversation is longer than the model's context.", param="messages")
    return context.tokenizer.encode_chat(
        messages,
        tools=shown_tools,
        add_generation_prompt=_wants_generation_prompt(body),
        continued=_continued(body),
        variables=_effort_variables(body) | body.chat_template_kwargs,
        template=body.chat_template,
        max_chars=max_chars,
    )


def _effort_variables(body: Conversation) -> dict[str, Any]:
    """Variables by which templates read the effort; the second and third switch reasoning on and off."""
    if body.reasoning_effort is None:
        return {}
    thinks = body.reasoning_effort != "none"
    return {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}


def _continued(body: Conversation) -> str | None:
    """The field of the last message that the prompt ends with."""
    wanted = body.continue_final_message
    if wanted is False:
        return None
    last = body.messages[-1]
    if wanted in (True, "content") and last.content is None and last.refusal is None:
        raise InvalidRequestError("The final message lacks the text to continue.", param="continue_final_message")
    return "content" if wanted is True else wanted


def _is_longer(limit_chars: int, *values: object) -> bool:
    """Whether the values contain more text than that; each value counts as a character, too."""
    stack: list[object] = list(values)
    total = 0
    while stack and total <= limit_chars:
        node = stack.pop()
        total += 1
        if isinstance(node, str):
            total += len(node)
        elif isinstance(node, Mapping):
            stack += node.keys()
            stack += node.values()
        elif isinstance(node, list | tuple):
            stack += node
    return total > limit_chars


def offered_tools(body: Conversation) -> Sequence[Tool]:
    """The tools that the model is shown."""
    is_off = isinstance(body, ChatBody) and body.tool_choice == "none"
    return () if is_off or body.tools is None else body.tools


def _wants_generation_prompt(body: Conversation) -> bool:
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequestError(
                "Cannot be combined with continue_final_message.", param="add_generation_prompt", code="invalid_value"
            )
        return False
    return body.add_generation_prompt is not False


def _check_chat(body: ChatBody) -> None:
    if any(modality != "text" for modality in body.modalities):
        raise UnsupportedParameterError("Only text is supported.", param="modalities")
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not body.tools:
        raise InvalidRequestError("Only allowed with tools.", param="tool_choice", code="invalid_value")


def completion_prompts(body: CompletionBody, context: ServingContext) -> tuple[list[list[int]], list[str]]:
    """Token ids of each prompt, and its text if the reply repeats it."""
    tokenizer = context.tokenizer
    prompt = body.prompt
    items: Sequence[str | list[int]]
    if isinstance(prompt, str):
        items = [prompt]
    elif not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt", code="invalid_value")
    elif isinstance(prompt[0], int):
        items = [prompt]
    else:
        items = prompt
    if len(items) * body.n > MAX_CHOICES:
        raise InvalidRequestError(
            f"At most {MAX_CHOICES} choices in one request.", param="prompt", code="invalid_value"
        )
    ids: list[list[int]] = []
    texts: list[str] = []
    for item in items:
        if isinstance(item, str):
            if len(item) > MAX_CHARS_PER_TOKEN * context.max_model_len:
                raise ContextLengthError("The prompt is longer than the model's context.", param="prompt")
            ids.append(tokenizer.encode(item, add_special_tokens=body.add_special_tokens))
            texts.append(item if body.echo else "")
        else:
            ids.append(item)
            texts.append(tokenizer.decode(item) if body.echo else "")
    return ids, texts
