"""Reply bodies, for the code that builds them and for ``/openapi.json``; ``stored_replies`` has those of files and
batches.

They are plain dictionaries. The type checker checks the code, and a fuzz test checks the replies.
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


exact = with_config(ConfigDict(extra="forbid"))
"""Decorator that forbids undocumented fields."""


@exact
class ErrorBody(TypedDict):
    message: Annotated[str, Field(max_length=300)]
    type: str
    param: str | None
    code: str | None


@exact
class ErrorReply(TypedDict):
    """Every reply other than 2xx."""

    error: ErrorBody


# ---- chat and completions --------------------------------------------------------------------------------


@exact
class PromptTokensDetails(TypedDict):
    cached_tokens: int
    audio_tokens: int


@exact
class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@exact
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@exact
class RequestMetrics(TypedDict):
    """Times of the server, in milliseconds; unknown values are omitted."""

    time_to_first_token_ms: NotRequired[float]
    queue_time_ms: NotRequired[float]
    generation_time_ms: NotRequired[float]
    mean_itl_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]


@exact
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@exact
class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


@exact
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@exact
class CalledFunction(TypedDict):
    name: str
    arguments: str


@exact
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@exact
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    """The model's reasoning, if it has thought."""
    tool_calls: NotRequired[list[ToolCall]]


@exact
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


@exact
class Generated(TypedDict):
    id: str
    created: int
    model: str
    service_tier: TierName
    system_fingerprint: str | None


@exact
class WholeAnswer(Generated):
    """The body of a batch line has no ``metrics``."""

    usage: Usage
    metrics: NotRequired[RequestMetrics]


@exact
class Chunk(Generated):
    """Chunk of a stream. ``usage`` is present if it was requested: null, or the counts so far. The last chunk has
    ``metrics``."""

    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestMetrics]


@exact
class ChatCompletion(WholeAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@exact
class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: NotRequired[str]


@exact
class ToolCallDelta(TypedDict):
    """Part of a tool call. The first part of a call has everything; the others have pieces of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@exact
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


@exact
class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]


@exact
class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@exact
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@exact
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


@exact
class Completion(WholeAnswer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@exact
class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    stop_reason: NotRequired[str | int | None]


@exact
class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


# ---- models, tokenizer, operations -----------------------------------------------------------------------


@exact
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


@exact
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


@exact
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@exact
class Detokenized(TypedDict):
    prompt: str


@with_config(ConfigDict(extra="allow"))
class TokenizerInfo(TypedDict):
    """The tokenizer's configuration, as in its file."""

    tokenizer_class: str
    chat_template: str | None


@exact
class Version(TypedDict):
    version: str


@exact
class Load(TypedDict):
    server_load: int


@exact
class ReplicaFigures(TypedDict):
    """Load and cache of one replica.

    ``free_slack_ms`` is the TTFT target that is left after the waiting prompts are computed. ``online_load`` is the
    share of the replica's time that its online targets need. ``cached`` has the first eight bytes of the hashes of an
    eighth of the cached blocks, in base64, or null if they were not requested.
    """

    age_ms: float
    free_slack_ms: float
    ttft_slo_ms: float
    prompt_token_ms: float
    block_size: int
    online_load: float
    cached: str | None


@exact
class JobBacklog(TypedDict):
    left_seconds: float
    work_seconds: float


@exact
class Backlogs(TypedDict):
    """Batches in progress: time until each is due, and remaining work for a replica with nothing else to do."""

    jobs: list[JobBacklog]


@exact
class WhatIfShares(TypedDict):
    ttft: float
    tpot: float
    both: float


@exact
class WhatIfToday(TypedDict):
    """The recorded traffic, simulated without the change."""

    requests: int
    attainment: WhatIfShares
    offline_tokens_per_second: float | None


@exact
class WhatIfReply(TypedDict):
    recorded_seconds: float
    requests: int
    attainment: WhatIfShares
    offline_tokens_per_second: float | None
    replicas: int | None
    today: WhatIfToday


@exact
class WhyStep(TypedDict):
    """A step during a wait. Times are in ms, ``at_ms`` since the wait's start; a negative one began before it."""

    step: int
    at_ms: float
    busy_ms: float
    predicted_ms: float
    prompt_tokens: int
    prompts: int
    streams: int
    batch_tokens: int
    waiting: int
    online_blocks: int
    batch_blocks: int
    available_blocks: int
    forecast_blocks: int
    judgement: str


@exact
class WhyWait(TypedDict):
    """A wait for the first token or over the longest gap between tokens.

    ``parts_ms`` adds up to ``took_ms``, ``late_parts_ms`` to ``late_ms``. ``steps`` has the longest steps meanwhile.
    """

    what: Literal["first_token", "longest_gap"]
    sentence: str
    took_ms: float
    target_ms: float
    late_ms: float
    without_batch_work_ms: float
    parts_ms: dict[str, float]
    late_parts_ms: dict[str, float]
    num_steps: int
    steps: list[WhyStep]


@exact
class WhyReply(TypedDict):
    """Why a request was late. ``parts_s`` is for batches and their lines: what their time went to."""

    id: str
    tier: str
    outcome: str
    sentence: str
    waits: list[WhyWait]
    parts_s: dict[str, float]


@exact
class OfflineSwitch(TypedDict):
    state: Literal["running", "paused"]
