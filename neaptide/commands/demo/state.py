"""The state of a running demo: the batch, the chats and the speed of each tier."""

import math
from dataclasses import dataclass, field
from typing import Any

from neaptide.commands.demo.load import DemoLoad
from neaptide.data import skills
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord

SERIES = ("neaptide_step_tokens_total", "neaptide_recomputed_tokens_total", "neaptide_requests_", "neaptide_kv_blocks")
NO_COUNTS = {"total": 0, "completed": 0, "failed": 0}
ONE_CHAT, BATCH_ALONE, CHAT_ALONE, BOTH = "one chat", "batch alone", "chat alone", "both"
"""The demo's phases, in this order."""


@dataclass(slots=True, frozen=True)
class Moment:
    """The engine's counters at one time."""

    elapsed_s: float
    online_tokens: float
    offline_tokens: float
    """Useful tokens: a recomputed token counts once."""


@dataclass(slots=True)
class DemoState:
    """The state that the view shows."""

    act: str = ONE_CHAT
    load: DemoLoad = field(default_factory=DemoLoad)
    batch: dict[str, Any] = field(default_factory=lambda: {"status": "not submitted", "request_counts": NO_COUNTS})
    metrics: Samples = field(default_factory=lambda: Samples(""))
    elapsed_s: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    chats: list[tuple[skills.Example, ChatRecord]] = field(default_factory=list)
    chat_start_s: float = 0.0
    """Start of the chats; their arrivals count from it."""
    both_start_s: float = math.inf
    """Time when the batch was submitted next to chat."""
    batch_alone_per_s: float = math.nan
    """Tokens per second of the batch without chat; NaN until measured."""

    def saw(self, metrics: Samples, elapsed_s: float) -> None:
        """Adds a scrape."""
        self.metrics, self.elapsed_s = metrics, elapsed_s
        online, offline = (metrics.sum("neaptide_step_tokens_total", **{"class": c}) for c in ("online", "offline"))
        # Only offline work is preempted here, because chats are few and short.
        recomputed = metrics.sum("neaptide_recomputed_tokens_total")
        self.moments.append(Moment(elapsed_s, online, offline - recomputed))

    def ended_at_s(self, record: ChatRecord) -> float:
        """End of a chat, on the demo's clock."""
        return self.chat_start_s + record.arrival_s + (record.end_s - record.start_s)

    def records(self, *, beside_batch: bool) -> list[ChatRecord]:
        return [r for _, r in self.chats if (self.chat_start_s + r.arrival_s >= self.both_start_s) is beside_batch]

    @property
    def progress(self) -> tuple[int, int]:
        """Finished lines and all lines."""
        counts = self.batch["request_counts"]
        return counts["completed"] + counts["failed"], counts["total"]


def rates_per_s(first: Moment, last: Moment) -> tuple[float, float]:
    """Online and offline tokens per second between two moments."""
    span_s = max(last.elapsed_s - first.elapsed_s, 1e-9)
    return (last.online_tokens - first.online_tokens) / span_s, (last.offline_tokens - first.offline_tokens) / span_s
