"""One line per finished request, for machines. Never a prompt, an output or a key."""

import logging

import msgspec

logger = logging.getLogger("neaptide.requests")


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the log line and the metrics say of a request when it has ended."""

    request_id: str
    engine_id: str | None = None
    """In the id of the reply too; the engine's own log names the choices by it, as ``ID-0``, ``ID-1`` and so on."""
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

    def __str__(self) -> str:
        """One JSON object; control characters are escaped by the encoder."""
        return msgspec.json.encode(self).decode()


def log_request(record: RequestRecord) -> None:
    """Writes the record: as fields of the line where the log is JSON, else as the message."""
    logger.info("%s", record, extra={"request": record})
