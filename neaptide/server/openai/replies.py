"""Reply bodies, for ``/openapi.json`` alone: routes build plain dictionaries, and a fuzz test holds the two equal.

A field without a default is always there; one with a default may be missing.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]
TierName = Literal["priority", "default", "flex"]
BatchStatusName = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


class Reply(BaseModel):
    """Base of everything that the server sends; what is not documented is not sent."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(Reply):
    message: str = Field(max_length=300)
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Every reply other than 2xx."""

    error: ErrorBody


# ---- chat and completions --------------------------------------------------------------------------------


class PromptTokensDetails(Reply):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RequestMetrics(Reply):
    """How long the server took; what is not known is missing."""

    time_to_first_token_ms: float = 0.0
    queue_time_ms: float = 0.0
    generation_time_ms: float = 0.0
    mean_itl_ms: float = 0.0
    tokens_per_second: float = 0.0


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Reply):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = []


class Generated(Reply):
    id: str
    created: int
    model: str
    service_tier: TierName
    system_fingerprint: str | None


class WholeAnswer(Generated):
    usage: Usage
    metrics: RequestMetrics


class Chunk(Generated):
    """``usage`` is there if it was asked for: null, or so far; ``metrics`` is beside the last one."""

    usage: Usage | None = None
    metrics: RequestMetrics = RequestMetrics()


class ChatCompletion(WholeAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionDelta(Reply):
    name: str = ""
    arguments: str = ""


class ToolCallDelta(Reply):
    """The first one of a call has everything; the others carry parts of the arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Reply):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = []


class Completion(WholeAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunkChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


# ---- models, tokenizer, operations -----------------------------------------------------------------------


class Model(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class TokenizerInfo(BaseModel):
    """The tokenizer's configuration, as its file has it."""

    model_config = ConfigDict(extra="allow")
    tokenizer_class: str
    chat_template: str | None


class Version(Reply):
    version: str


class Load(Reply):
    server_load: int


class OfflineSwitch(Reply):
    state: Literal["running", "paused"]


# ---- files and batches -----------------------------------------------------------------------------------


class File(Reply):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output", "user_data"]
    status: Literal["processed"]
    status_details: None


class Page(Reply):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    data: list[File]


class FileDeleted(Reply):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Reply):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(Reply):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Reply):
    total: int
    completed: int
    failed: int


class InputTokensDetails(Reply):
    cached_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class BatchUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(Reply):
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


class BatchList(Page):
    data: list[Batch]
