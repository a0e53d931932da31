"""Replies about files and batches; see ``replies``."""

from typing import Literal

from typing_extensions import TypedDict

from neaptide.server.openai.replies import exact

PurposeName = Literal["batch", "batch_output", "user_data"]
OutlookName = Literal["on_time", "at_risk", "infeasible"]
BatchStatusName = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


@exact
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


@exact
class Page(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


@exact
class FileList(Page):
    data: list[File]


@exact
class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


@exact
class BatchError(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


@exact
class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


@exact
class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


@exact
class InputTokensDetails(TypedDict):
    cached_tokens: int


@exact
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@exact
class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@exact
class BatchExtension(TypedDict):
    """Fields that OpenAI's object lacks."""

    outlook: OutlookName | None
    needed_seconds: float | None
    expected_seconds: float | None
    left_seconds: float | None
    waits_for: str | None
    due_at: int | None


@exact
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


@exact
class BatchList(Page):
    data: list[Batch]


@exact
class ReceiptPromise(TypedDict):
    """The promise of ``accept_by``. ``early_seconds`` is negative after it."""

    due_at: int
    kept: bool
    early_seconds: int


@exact
class ReceiptTokens(TypedDict):
    """``prompt`` and ``answers`` are those of the results; the others are what the engine did for them."""

    prompt: int
    answers: int
    found_in_cache: int
    prefill_share: int
    computed_prefill: int
    computed_decode: int
    computed_again: int


@exact
class UnsignedReceipt(TypedDict):
    """Costs of a batch and uses of its time."""

    object: Literal["batch.receipt"]
    id: str
    key: str
    model: str | None
    status: BatchStatusName
    created_at: int
    ended_at: int
    expires_at: int
    promise: ReceiptPromise | None
    lines: RequestCounts
    tokens: ReceiptTokens
    device_seconds: float | None
    computed_device_seconds: float | None
    preemptions: int
    time_seconds: dict[str, float]


@exact
class BatchReceipt(UnsignedReceipt):
    hash: str


@exact
class ReceiptCheck(TypedDict):
    object: Literal["batch.receipt.check"]
    confirmed: bool


@exact
class QuotedWindow(TypedDict):
    """When the batch would end if it had this completion window."""

    completion_window: str
    outlook: OutlookName
    p50_seconds: float | None
    p50_at: int | None
    p90_seconds: float | None
    p90_at: int | None
    other_batches_seconds: float
    left_by_chats_seconds: float
    reason: str | None


@exact
class QuoteTokens(TypedDict):
    p50: int
    p90: int


@exact
class QuoteSeconds(TypedDict):
    p50: float
    p90: float


@exact
class QuoteBasis(TypedDict):
    """Data that the quote was made from."""

    recorded_seconds: float
    times_of_day: bool
    saturated_seconds: float
    efficiency: float
    chat_factor: float
    known_batches: int
    pool_seconds: float
    unchecked_batches: int


@exact
class BatchQuote(TypedDict):
    object: Literal["batch.quote"]
    created_at: int
    lines: int
    input_tokens: int
    shared_tokens: int
    output_tokens: QuoteTokens
    device_seconds: QuoteSeconds
    shared_device_seconds: float
    windows: list[QuotedWindow]
    sentence: str
    basis: QuoteBasis
