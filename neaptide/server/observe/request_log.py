"""One line per finished request or call, for machines. Never a prompt, an output or a key."""

import logging

import msgspec

logger = logging.getLogger("neaptide.requests")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What every line says."""

    request_id: str
    """As in the reply's ``X-Request-Id``."""
    key: str | None = None
    """The fingerprint of the caller's key, ``Principal.key_id``; None without keys, or for a key that is not known."""

    def __str__(self) -> str:
        """One JSON object; control characters are escaped by the encoder."""
        return msgspec.json.encode(self).decode()


class CallRecord(Record, frozen=True, kw_only=True):
    """A call of the files, batches or admin routes."""

    endpoint: str
    """The route's template, never the path that was called."""
    method: str
    object_id: str | None
    """The file or batch that was created, read, changed or deleted."""
    status: int
    outcome: str
    """ok, client_error, server_error or aborted (the client did not get the whole reply)."""
    sent_bytes: int
    e2e_ms: float


class RequestRecord(Record, frozen=True, kw_only=True):
    """What the log line and the metrics say of a request when it has ended."""

    engine_id: str | None = None
    """What the engine's logs call the request, followed there by a hyphen and the number of the choice; also the end of
    the reply's id. None where it was refused before."""
    endpoint: str
    tier: str
    model: str
    outcome: str
    """ok, client_error, server_error, aborted (the client went away) or shed (refused under load)."""
    stream: bool = False
    choices: int = 0
    finish_reasons: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    preemptions: int = 0
    error_code: str | None = None


def log_request(record: Record) -> None:
    """Writes the record: as fields of the line where the log is JSON, else as the message."""
    logger.info("%s", record, extra={"request": record})
