"""A client's record of each request, and the measures made from it (definitions: ``docs/metrics.md``)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ChatRecord:
    """One streamed request. Times are in seconds on the client's monotonic clock."""

    sent_s: float
    arrival_s: float = 0.0
    """Scheduled arrival, from the start of the run."""
    due_s: float | None = None
    """Scheduled sending time: a slow client must not make the server look fast. ``None`` in a closed loop, where the
    previous answer decides."""
    token_times_s: list[float] = field(default_factory=list)
    """Arrival of each chunk with text of the answer, its reasoning or a tool call."""
    end_s: float = 0.0
    text: str = ""
    """Text of the answer only."""
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    cancelled: bool = False
    """Cancelled by the client on purpose, which says nothing about the server."""

    def add_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        """Adds one decoded event of a chat or completions stream."""
        if "error" in chunk:
            self.error = str(chunk["error"].get("message"))
            return
        if usage := chunk.get("usage"):
            self.num_output_tokens = usage["completion_tokens"]
            self.num_prompt_tokens = usage["prompt_tokens"]
        for choice in chunk.get("choices", ()):
            delta = {"content": choice["text"]} if "text" in choice else choice["delta"]
            text = delta.get("content") or ""
            self.text += text
            if text or _thinks_or_calls(delta):
                self.token_times_s.append(now_s)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def start_s(self) -> float:
        """Reference time of the latencies."""
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def late_s(self) -> float:
        """Delay of the sending."""
        return self.sent_s - self.start_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.start_s if self.token_times_s else None

    @property
    def ttft_from_sending_s(self) -> float | None:
        """TTFT as other tools define it, without the client's own delay."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.start_s if self.end_s and self.error is None and not self.cancelled else None

    @property
    def tpot_s(self) -> float | None:
        """``(t_n - t_1) / (n - 1)``; None for fewer than two tokens."""
        count = max(self.num_output_tokens, len(self.token_times_s))
        if not self.token_times_s or count < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1)

    def met(self, ttft_slo_s: float, tpot_slo_s: float) -> bool:
        """Whether both targets were met. A failed request misses; a single token has no TPOT to miss."""
        if self.error is not None or self.ttft_s is None:
            return False
        return self.ttft_s <= ttft_slo_s and (self.tpot_s is None or self.tpot_s <= tpot_slo_s)


def _thinks_or_calls(delta: dict[str, Any]) -> bool:
    """Whether a chunk has tokens outside the answer's text. Servers send them under these names and count them."""
    if any(delta.get(name) for name in ("reasoning_content", "reasoning", "refusal")):
        return True
    functions = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    return any(function.get("name") or function.get("arguments") for function in functions)


def attainment(records: Sequence[ChatRecord], ttft_slo_s: float, tpot_slo_s: float) -> float:
    """Fraction of the accepted requests that met both targets; NaN without requests."""
    if not records:
        return math.nan
    return sum(r.met(ttft_slo_s, tpot_slo_s) for r in records) / len(records)
