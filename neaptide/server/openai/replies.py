"""The shapes of reply bodies, for the code that builds them and for ``/openapi.json``.

They are plain dictionaries: the type checker holds the code to them, and a fuzz test what is sent.
"""

from typing import (
    Annotated,
    Literal,
    NotRequired,  # pydantic reads typing's own from Python 3.12 on only
)

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

FinishName = Literal["stop", "length", "tool_calls"]
TierName = Literal["priority", "default", "flex"]
PurposeName = Literal["batch", "batch_output", "user_data"]
OutlookName = Literal["on_time", "at_risk", "infeasible"]
BatchStatusName = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


_exact = with_config(ConfigDict(extra="forbid"))
"""What is not documented is not sent."""


@_exact
class ErrorBody(TypedDict):
    message: Annotated[str, Field(max_length=300)]
    type: str
    param: str | None
    code: str | None


@_exact
class ErrorReply(TypedDict):
    """Every reply other than 2xx."""

    error: ErrorBody


# ---- chat and completions --------------------------------------------------------------------------------


@_exact
class PromptTokensDetails(TypedDict):
    cached_tokens: int
    audio_tokens: int


@_exact
class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@_exact
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@_exact
class RequestMetrics(TypedDict):
    """How long the server took, in milliseconds; what is not known is missing."""

    time_to_first_token_ms: NotRequired[float]
    queue_time_ms: NotRequired[float]
    generation_time_ms: NotRequired[float]
    mean_itl_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]


@_exact
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@_exact
class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


@_exact
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@_exact
class CalledFunction(TypedDict):
    name: str
    arguments: str


@_exact
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@_exact
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


@_exact
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


@_exact
class Generated(TypedDict):
    id: str
    created: int
    model: str
    service_tier: TierName
    system_fingerprint: str | None


@_exact
class WholeAnswer(Generated):
    """The body of a batch's line has no ``metrics``."""

    usage: Usage
    metrics: NotRequired[RequestMetrics]


@_exact
class Chunk(Generated):
    """``usage`` is there if it was asked for: null, or so far; ``metrics`` is beside the last one."""

    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestMetrics]


@_exact
class ChatCompletion(WholeAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@_exact
class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: NotRequired[str]


@_exact
class ToolCallDelta(TypedDict):
    """The first one of a call has everything; the others carry parts of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@_exact
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta]]


@_exact
class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]


@_exact
class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@_exact
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_exact
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


@_exact
class Completion(WholeAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@_exact
class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]


@_exact
class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


# ---- models, tokenizer, operations -----------------------------------------------------------------------


@_exact
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


@_exact
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


@_exact
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@_exact
class Detokenized(TypedDict):
    prompt: str


@with_config(ConfigDict(extra="allow"))
class TokenizerInfo(TypedDict):
    """The tokenizer's configuration, as its file has it."""

    tokenizer_class: str
    chat_template: str | None


@_exact
class Version(TypedDict):
    version: str


@_exact
class Load(TypedDict):
    server_load: int


@_exact
class OfflineSwitch(TypedDict):
    state: Literal["running", "paused"]


# ---- files and batches -----------------------------------------------------------------------------------


@_exact
class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: PurposeName
    status: Literal["processed"]
    status_details: None


@_exact
class Page(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


@_exact
class FileList(Page):
    data: list[File]


@_exact
class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


@_exact
class BatchError(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


@_exact
class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


@_exact
class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


@_exact
class InputTokensDetails(TypedDict):
    cached_tokens: int


@_exact
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@_exact
class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@_exact
class BatchExtension(TypedDict):
    """What OpenAI's object has no field for."""

    outlook: OutlookName
    needed_seconds: float
    expected_seconds: float | None
    left_seconds: float


@_exact
class Batch(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatusName
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    neaptide: BatchExtension | None


@_exact
class BatchList(Page):
    data: list[Batch]
