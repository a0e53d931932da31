"""Typed values of the tables of files and batches."""

import secrets
import zlib
from dataclasses import dataclass
from enum import StrEnum

from neaptide.server.openai.stored_replies import BatchError


class BatchStatus(StrEnum):
    """Statuses that clients poll for; see ``TERMINAL`` and ``LIVE``."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


LIVE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
TERMINAL = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class LineState(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    """Has a 2xx result."""
    FAILED = "failed"
    """Has a 4xx/5xx result."""
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    sha256: str
    created_at: int
    expires_at: int | None
    """Unix time from which the file counts as deleted."""
    blob: str | None = None
    """Key of the bytes on shared storage, if they are there."""
    model: str | None = None
    """Model that the first line of a batch file names, if it is known."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One record of ``batches``; fields as in ``tables.py``."""

    id: str
    owner: str
    salt: str
    """The owner's cache salt, hex."""
    endpoint: str
    input_file_id: str
    completion_window: str
    output_expires_after_s: int | None
    metadata: dict[str, str] | None
    model: str | None
    model_fingerprint: str | None
    status: BatchStatus
    outcome: BatchStatus | None
    planned_output_file_id: str
    planned_error_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    errors: list[BatchError] | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    num_total: int
    num_completed: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    plan_blob: str | None = None
    due_at: int | None = None
    """Unix time by which a quote promises the end; None without one."""

    @property
    def deadline_at(self) -> int:
        """Unix time that the scheduler aims at."""
        return self.expires_at if self.due_at is None else min(self.due_at, self.expires_at)

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Fields that a create call decides; the rest of the record follows from them."""

    id: str
    owner: str
    salt: str
    """The owner's cache salt, hex."""
    endpoint: str
    input_file_id: str
    completion_window: str
    output_expires_after_s: int | None
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    due_at: int | None = None


@dataclass(frozen=True, slots=True)
class StoredUsage:
    """Token counts of one or more answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of ``output_tokens``."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of a line. ``body`` is JSON text: a response body, of an answer or of an HTTP-type error."""

    line_no: int
    state: LineState
    status_code: int
    request_id: str
    body: str
    usage: StoredUsage = StoredUsage()

    @property
    def checksum(self) -> int:
        return result_checksum(self.state, self.status_code, self.request_id, self.body)


def result_checksum(state: LineState, status_code: int | None, request_id: str | None, result: str) -> int:
    """CRC-32 of the parts of a line's result."""
    return zlib.crc32(f"{state}\0{status_code}\0{request_id}\0{result}".encode())


@dataclass(frozen=True, slots=True)
class NewLine:
    """A validated line. ``result`` is set if its body was refused: it never reaches the engine."""

    line_no: int
    custom_id: str
    byte_offset: int
    num_bytes: int
    first_row: int
    num_rows: int
    result: LineResult | None = None


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line without a durable result."""

    line_no: int
    byte_offset: int
    num_bytes: int
    first_row: int
    num_rows: int
    attempts: int


@dataclass(frozen=True, slots=True)
class EndedLine:
    """A line of the output or error file."""

    line_no: int
    custom_id: str
    state: LineState
    status_code: int | None
    request_id: str | None
    result: str | None
    error: str | None
    checksum: int | None
    """None without a result, or for results from before there were checksums."""

    @property
    def is_damaged(self) -> bool:
        """Whether the result differs from the stored one."""
        if self.checksum is None or self.result is None:
            return False
        return self.checksum != result_checksum(self.state, self.status_code, self.request_id, self.result)


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's statement that two POSTs are the same one; ``body_hash`` checks it."""

    owner: str
    kind: str
    """One of ``files`` and ``batches``."""
    key: str
    body_hash: str


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"
