"""Objects of the Responses API, built from a finished or running choice."""

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neaptide.server.openai.logprobs import ScoredToken, chat_logprobs
from neaptide.server.openai.replies import FinishName, TokenLogprob, Usage
from neaptide.server.openai.responses.bodies import ResponsesBody
from neaptide.server.openai.responses.replies import (
    Asked,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponseUsage,
    Status,
)
from neaptide.server.openai.responses.sealing import seal
from neaptide.server.parsers.calls import ParsedToolCall

if TYPE_CHECKING:
    from neaptide.server.openai.reply_form import Reply
    from neaptide.server.openai.respond import ChoiceAssembler


def asked_of(body: ResponsesBody, temperature: float, top_p: float) -> Asked:
    """Fields that the reply repeats; ``temperature`` and ``top_p`` are the values in use."""
    wanted = None if body.text is None else body.text.format
    text_format = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": temperature,
        "top_p": top_p,
        "text": {"format": text_format},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation,
    }


def build_response(reply: "Reply", choice: "ChoiceAssembler", used: Usage, response_id: str) -> ResponseObject:
    status = status_of(choice.finish_reason)
    items: list[OutputItem] = []
    if choice.reasoning:
        ended = "completed" if choice.text or choice.calls else status
        items.append(reasoning_item(reply, new_id("rs"), ended, choice.reasoning))
    if choice.text or not (choice.calls or choice.reasoning):
        part = text_part(choice.text, logprobs_of(reply, choice.tokens))
        items.append(message_item(new_id("msg"), status, [part]))
    items += [call_item(new_id("fc"), call, call_status(call)) for call in choice.calls]
    return response(reply, response_id, status, items, used)


def status_of(reason: FinishName | None) -> Status:
    return "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"


def response(
    reply: "Reply", response_id: str, status: Status, items: Sequence[OutputItem], used: Usage | None
) -> ResponseObject:
    form = reply.form
    assert form.asked is not None
    return {
        **form.asked,
        "id": response_id,
        "object": "response",
        "created_at": reply.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": form.model,
        "output": list(items),
        "usage": None if used is None else _usage(used),
        "service_tier": form.service_tier,
        "background": False,
        "store": False,
        "previous_response_id": None,
    }


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def message_item(item_id: str, status: Status, content: list[OutputText]) -> OutputMessage:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def reasoning_item(reply: "Reply", item_id: str, status: Status, text: str | None) -> OutputReasoning:
    """The item of the reasoning; without content if the text is None."""
    content = [] if text is None else [reasoning_part(text)]
    item: OutputReasoning = {"type": "reasoning", "id": item_id, "status": status, "summary": [], "content": content}
    if reply.form.seals_reasoning and text is not None:
        item["encrypted_content"] = seal(text)
    return item


def reasoning_part(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: list[TokenLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, call: ParsedToolCall, status: Status, *, has_arguments: bool = True) -> OutputCall:
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments if has_arguments else "",
        "status": status,
    }


def call_status(call: ParsedToolCall) -> Status:
    """The status of a call's item."""
    return "completed" if call.is_whole else "incomplete"


def logprobs_of(reply: "Reply", tokens: Sequence[ScoredToken]) -> list[TokenLogprob]:
    """Log-probabilities of the tokens; empty if the request did not ask for them."""
    return chat_logprobs(tokens, reply.context.tokenizer)["content"] if reply.form.wants_logprobs else []


def _usage(used: Usage) -> ResponseUsage:
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": used["total_tokens"],
    }
