"""Request log: one line per finished request or call. It never contains a prompt, an output or a key."""

import logging
from typing import Protocol

import msgspec

from neaptide.engine.params import Tier

logger = logging.getLogger("neaptide.requests")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Common fields of all lines."""

    request_id: str
    """Id of the reply's ``X-Request-Id`` header."""
    key: str | None = None
    """Fingerprint of the caller's key, ``Principal.key_id``; None without keys or for an unknown key."""

    def __str__(self) -> str:
        """The record as one JSON object; the encoder escapes control characters."""
        return msgspec.json.encode(self).decode()

    def in_words(self) -> str:
        """The record as a line for people."""
        raise NotImplementedError

    @property
    def level(self) -> int:
        """Level of its line in the log."""
        return logging.INFO


class CallRecord(Record, frozen=True, kw_only=True):
    """A call of the files, batches or admin routes."""

    endpoint: str
    """Template of the route, never the path that was called."""
    method: str
    object_id: str | None
    """File or batch that was created, read, changed or deleted."""
    status: int
    outcome: str
    """One of: ok, client_error, server_error, aborted (the client did not get the whole reply)."""
    sent_bytes: int
    e2e_ms: float

    def in_words(self) -> str:
        names = [name for name in (self.object_id, self.key and f"key {self.key}") if name]
        return " ".join([self.method, self.endpoint, str(self.status), f"{self.e2e_ms:.0f} ms", *names])

    @property
    def level(self) -> int:
        """Clients ask for the state of a batch every second: an answered look is a line for debugging. A download is
        none."""
        is_look = self.method in ("GET", "HEAD") and not self.endpoint.endswith("/content")
        return logging.DEBUG if is_look and self.outcome == "ok" else logging.INFO


class RequestTerms(Protocol):
    """Parameters and latency targets of a request that its metrics use."""

    @property
    def tier(self) -> Tier: ...

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        ...

    @property
    def max_tokens(self) -> list[int]:
        """Token limit of each prompt."""
        ...

    @property
    def ttft_slo_s(self) -> float: ...

    @property
    def tpot_slo_s(self) -> float: ...


class RequestRecord(Record, frozen=True, kw_only=True):
    """A finished request, for the log line and the metrics."""

    engine_id: str | None = None
    """Id of the request in the engine's logs, where a hyphen and the choice's number follow; also the end of the
    reply's id. None if it was refused earlier."""
    endpoint: str
    tier: str
    model: str
    outcome: str
    """One of: ok, client_error, server_error, aborted (the client disconnected), shed (refused under load)."""
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

    def in_words(self) -> str:
        words = [self.endpoint, self.outcome if self.error_code is None else self.error_code, self.tier]
        if self.engine_id is not None:
            words.append(f"{self.prompt_tokens}+{self.completion_tokens} tokens")
        times = (("queue", self.queue_ms), ("ttft", self.ttft_ms), ("total", self.e2e_ms))
        words += [f"{name} {value:.0f} ms" for name, value in times if value is not None]
        words += [f"key {self.key}"] if self.key else []
        return " ".join([*words, self.engine_id or self.request_id])


def log_request(record: Record) -> None:
    """Writes the record: as fields of the line in JSON logs, else in words."""
    logger.log(record.level, "%s", record, extra={"request": record})
