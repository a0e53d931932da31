"""The demo's load, scaled to the machine: chat rate, targets and lengths, from the speed of a few answers alone."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from neaptide.commands.demo.lines import MAX_TOKENS
from neaptide.loadgen.client.recorder import ChatRecord

RATE_PER_S = 3.0
TTFT_SLO_MS, TPOT_SLO_MS = 1000.0, 100.0
TTFT_SLACK, TPOT_SLACK = 3.0, 2.0
"""A target is at least so many times what one answer alone takes."""
ANSWER_S = 3.0
"""Time of one answer alone, for a model that was not taught when to end."""
LEAST_TOKENS = 8
BATCHED = 64
"""More answers at once than speed a batch up. It bounds the lines that are needed to measure one."""


@dataclass(slots=True, frozen=True)
class DemoLoad:
    """The requests of the demo."""

    rate_per_s: float = RATE_PER_S
    ttft_slo_ms: float = TTFT_SLO_MS
    tpot_slo_ms: float = TPOT_SLO_MS
    max_tokens: int = MAX_TOKENS
    answer_s: float = 0.0
    """Time of one answer of that length, alone."""

    @property
    def targets(self) -> dict[str, float]:
        """The fields of a request that set its targets."""
        return {"ttft_slo_ms": self.ttft_slo_ms, "tpot_slo_ms": self.tpot_slo_ms}

    @property
    def is_scaled(self) -> bool:
        return self.ttft_slo_ms > TTFT_SLO_MS or self.tpot_slo_ms > TPOT_SLO_MS or self.rate_per_s < RATE_PER_S


def fit_load(alone: Sequence[ChatRecord], rate_per_s: float | None, *, is_taught: bool) -> DemoLoad:
    """The load for a machine on which answers alone took as long as ``alone``, of which there is at least one.

    On average one chat at most is running, unless ``rate_per_s`` is given. A model that was taught the questions ends
    its answers by itself; the others are cut.
    """
    ttft_s = statistics.median(record.ttft_s or 0.0 for record in alone)
    tpot_s = statistics.median(record.tpot_s or 0.0 for record in alone)
    max_tokens, answer_s = MAX_TOKENS, statistics.median(record.end_s - record.start_s for record in alone)
    if not is_taught:
        max_tokens = min(max(int(ANSWER_S / max(tpot_s, 1e-4)), LEAST_TOKENS), MAX_TOKENS)
        answer_s = ttft_s + max_tokens * tpot_s
    if rate_per_s is None:
        rate_per_s = min(RATE_PER_S, 1.0 / max(answer_s, 1e-3))
    return DemoLoad(
        rate_per_s,
        max(TTFT_SLO_MS, rounded_up(TTFT_SLACK * ttft_s * 1e3)),
        max(TPOT_SLO_MS, rounded_up(TPOT_SLACK * tpot_s * 1e3)),
        max_tokens,
        answer_s,
    )


def rounded_up(ms: float, step_ms: float = 50.0) -> float:
    return math.ceil(round(ms / step_ms, 6)) * step_ms


def lines_to_measure(load: DemoLoad, seconds: float, tokens_per_line: float, most: int) -> int:
    """Number of lines that surely last for ``seconds``, at most ``most``."""
    tokens_per_s = BATCHED * load.max_tokens / load.answer_s if load.answer_s > 0.0 else float("inf")
    return int(min(max(tokens_per_s * seconds / tokens_per_line, BATCHED), most))
