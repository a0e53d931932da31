"""Replies of the Responses API; see ``openai.replies``."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from neaptide.server.openai.replies import TierName, TokenLogprob, exact

Status = Literal["in_progress", "completed", "incomplete"]


@exact
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


@exact
class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


@exact
class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


@exact
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@exact
class OutputReasoning(TypedDict):
    """The model's reasoning. There is never a summary."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]
    """See ``sealing``."""


OutputItem = OutputReasoning | OutputMessage | OutputCall


@exact
class ResponseInputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@exact
class ResponseOutputDetails(TypedDict):
    reasoning_tokens: int


@exact
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


@exact
class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


@exact
class Asked(TypedDict):
    """Fields that the reply repeats from the request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]


@exact
class ResponseObject(Asked):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    service_tier: TierName
    background: Literal[False]
    store: Literal[False]
    previous_response_id: None


@exact
class WholeEvent(TypedDict):
    """First or last event of a stream."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete"]
    sequence_number: int
    response: ResponseObject


@exact
class ItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


@exact
class _OfItem(TypedDict):
    sequence_number: int
    output_index: int
    item_id: str


@exact
class PartEvent(_OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


@exact
class TextDeltaEvent(_OfItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


@exact
class TextDoneEvent(_OfItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


@exact
class ReasoningDeltaEvent(_OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


@exact
class ReasoningDoneEvent(_OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


@exact
class ArgumentsDeltaEvent(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


@exact
class ArgumentsDoneEvent(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


ResponseEvent = (
    WholeEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
