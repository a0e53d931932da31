"""A run of the live experiment: its load, window and targets, and its measurements."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from neaptide.engine.scheduler.judgement import UNKNOWN_WAIT
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.workloads.made_load import Arrivals

TPOT_OVER_ALONE = 2.4
"""The headline's target, in TPOT p50s of online work alone."""
TTFT_OVER_TPOT = 5.0
TTFT_OVER_ALONE = 2.0
"""Least TTFT target, in TTFT p50s of online work alone."""
ONLINE_IN, ONLINE_OUT = 128, 32
OFFLINE_IN, OFFLINE_OUT = 256, 64
CEILING_LINES = 3000
LEAST_LINES = 400
"""For runs whose need follows from the ceiling."""
LAX_S = 3600.0
START_TIMEOUT_S = 600.0
"""Long, because an executor may first compile its model."""
PATIENCE_S = 45.0
"""Time for late chats: one that has not ended this long after the last arrival counts as never ending."""
EGRESS_MS = 5.0
PHASES = ("schedule", "prepare", "model", "sample", "commit")


@dataclass(slots=True, frozen=True)
class Case:
    """Online load: its fraction of the ceiling, and the shape of its arrivals."""

    load: float
    shape: str = "poisson"

    @property
    def name(self) -> str:
        return f"{self.load:.2f}" + ("" if self.shape == "poisson" else f" {self.shape}")


@dataclass(slots=True)
class Window:
    """Measurements between two scrapes of the same server."""

    seconds: float = 0.0
    online_tokens_per_s: float = 0.0
    offline_tokens_per_s: float = 0.0
    steps: float = 0.0
    mean_step_ms: float = 0.0
    phase_ms: dict[str, float] = field(default_factory=dict)
    preemptions: float = 0.0
    prediction_error: float = 0.0
    clock_s: tuple[float, float] = (0.0, 0.0)
    """Begin and end, on the clock of this machine, which is also the engine's."""
    records: list[ChatRecord] = field(default_factory=list)
    """Records of the requests that arrived in the window."""
    early: list[ChatRecord] = field(default_factory=list)
    """Records of the requests that arrived before it."""


@dataclass(slots=True, frozen=True)
class Plan:
    duration_s: float
    window_s: tuple[float, float]
    model: Path
    seed: int
    offline_lines: int = CEILING_LINES
    rate_rps: float = 0.0
    """Rate of online requests."""
    shape: str = "poisson"
    """Shape of their arrivals, one of ``made_load.SHAPES``."""
    patience_s: float = PATIENCE_S

    def arrivals_s(self) -> list[float]:
        """Arrival times of online requests, from the start of the run."""
        if self.shape == "poisson":
            return poisson_arrivals(self.rate_rps, self.duration_s, self.seed)
        return Arrivals(self.rate_rps, self.duration_s, self.shape).draw(np.random.default_rng(self.seed))

    def at_load(self, load: float, ceiling_tokens_per_s: float) -> "Plan":
        """The plan with online requests of this fraction of the ceiling, and twice the lines that the run can
        complete."""
        rate_rps = load * ceiling_tokens_per_s / (ONLINE_IN + ONLINE_OUT)
        needed = 2 * ceiling_tokens_per_s * self.duration_s / (OFFLINE_IN + OFFLINE_OUT)
        return replace(self, rate_rps=rate_rps, offline_lines=LEAST_LINES + round(needed))


def slo_flags(ttft_s: float, tpot_s: float) -> list[str]:
    return ["--ttft-slo-ms", str(1e3 * ttft_s), "--tpot-slo-ms", str(1e3 * tpot_s), "--max-model-len", "1024"]


@dataclass(slots=True, frozen=True)
class Targets:
    ttft_s: float
    tpot_s: float

    @classmethod
    def of_tpot(cls, tpot_s: float, least_ttft_s: float = 0.0) -> "Targets":
        return cls(max(TTFT_OVER_TPOT * tpot_s, least_ttft_s), tpot_s)

    @property
    def flags(self) -> list[str]:
        return slo_flags(self.ttft_s, self.tpot_s)

    @property
    def cap_flags(self) -> list[str]:
        """Flags of a server whose steps without online work end at the TPOT target. Abortable steps could be longer, so
        they are off."""
        return [*self.capping.flags, "--give-up-steps", "off"]

    @property
    def capping(self) -> "Targets":
        """Targets that limit steps without online work to the TPOT target. Such a step may take ``UNKNOWN_WAIT`` of the
        TTFT target less egress (``overlap_depth`` 0)."""
        return Targets(self.tpot_s / UNKNOWN_WAIT + EGRESS_MS / 1e3, self.tpot_s)
