"""Timestamps of one request, measured in the API process."""

from dataclasses import dataclass, field

from neaptide.engine.messages import RequestOutput
from neaptide.server.openai.replies import RequestMetrics


@dataclass(slots=True)
class ChoiceTiming:
    """Timestamps of one engine request, in ``CLOCK_MONOTONIC`` seconds."""

    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    sent_s: float | None = None
    """When it was sent to the engine."""
    engine_first_s: float = 0.0
    """When the engine had its first token; 0 before that."""
    num_new_prompt_tokens: int = 0
    """Prompt tokens that were not in the prefix cache."""
    longest_gap_s: float = 0.0
    gap_end_s: float = 0.0
    """End of the longest gap between two outputs."""

    def on_output(self, output: RequestOutput, now_s: float) -> float | None:
        """Notes an output; returns the gap since the one before, if both had tokens."""
        if self.scheduled_s is None and output.scheduled_s > 0:
            self.scheduled_s = output.scheduled_s
        if not output.new_token_ids:
            return None
        gap_s = None if self.last_s is None else now_s - self.last_s
        if self.first_s is None:
            self.first_s, self.engine_first_s = now_s, output.first_token_s
            self.num_new_prompt_tokens = output.num_prompt_tokens - output.num_cached_tokens
        elif gap_s is not None and gap_s > self.longest_gap_s:
            self.longest_gap_s, self.gap_end_s = gap_s, now_s
        self.last_s = now_s
        self.num_tokens += len(output.new_token_ids)
        return gap_s

    @property
    def engine_s(self) -> float:
        """Time that the engine had the request before its first token; 0 without one."""
        if self.sent_s is None or self.first_s is None:
            return 0.0
        return (self.engine_first_s or self.first_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None without a second token."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class RequestTiming:
    """Timestamps of one HTTP request with all its choices."""

    arrival_s: float
    choices: list[ChoiceTiming] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """Time from arrival until the first choice was scheduled."""
        stamps = [c.scheduled_s for c in self.choices if c.scheduled_s is not None]
        return max(0.0, min(stamps) - self.arrival_s) if stamps else None

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token of any choice."""
        stamps = [c.first_s for c in self.choices if c.first_s is not None]
        return min(stamps) - self.arrival_s if stamps else None

    def as_metrics(self) -> RequestMetrics:
        """The ``metrics`` object of a reply; unknown values are omitted."""
        firsts = [c.first_s for c in self.choices if c.first_s is not None]
        lasts = [c.last_s for c in self.choices if c.last_s is not None]
        tpots = [c.tpot_s for c in self.choices if c.tpot_s is not None]
        generation_s = max(lasts) - min(firsts) if firsts and lasts else None
        metrics: RequestMetrics = {}
        if self.ttft_s is not None:
            metrics["time_to_first_token_ms"] = _ms(self.ttft_s)
        if self.queue_s is not None:
            metrics["queue_time_ms"] = _ms(self.queue_s)
        if generation_s is not None:
            metrics["generation_time_ms"] = _ms(generation_s)
        if tpots:
            metrics["mean_itl_ms"] = _ms(sum(tpots) / len(tpots))
        if generation_s:
            metrics["tokens_per_second"] = round(sum(c.num_tokens for c in self.choices) / generation_s, 3)
        return metrics


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
