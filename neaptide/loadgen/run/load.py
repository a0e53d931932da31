"""The load of a run: requests, their targets and the client's cancellations."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from neaptide.loadgen.workloads.traces import TraceRequest


@dataclass(slots=True, frozen=True)
class Target:
    """Latency targets of a class of requests."""

    ttft_s: float
    tpot_s: float
    share: float = 1.0
    """Fraction of all requests, relative to the shares of the other classes."""

    @classmethod
    def parse(cls, text: str) -> "Target":
        """``TTFT_MS:TPOT_MS`` or ``TTFT_MS:TPOT_MS@SHARE``. Raises ValueError."""
        match = re.fullmatch(r"(\d+\.?\d*):(\d+\.?\d*)(?:@(\d*\.?\d+))?", text)
        if match is None or not float(match[1]) or not float(match[2]) or not float(match[3] or 1):
            raise ValueError(f"a target is TTFT_MS:TPOT_MS or TTFT_MS:TPOT_MS@SHARE, all positive, not {text!r}")
        return cls(float(match[1]) / 1e3, float(match[2]) / 1e3, float(match[3] or 1))

    def __str__(self) -> str:
        return f"{1e3 * self.ttft_s:g}:{1e3 * self.tpot_s:g}"


@dataclass(slots=True, frozen=True)
class Shot:
    """One request to send."""

    request: TraceRequest
    target: Target
    cancel_after_s: float | None = None
    """The client disconnects this long after sending."""


@dataclass(slots=True, frozen=True)
class Cancelling:
    share: float = 0.0
    """Fraction of the requests that are cancelled."""
    within_s: float = 5.0
    """They are cancelled at a uniformly distributed moment within this time."""


def make_shots(
    requests: Sequence[TraceRequest], targets: Sequence[Target], cancelling: Cancelling, seed: int
) -> list[Shot]:
    """Draws targets and cancellations from the seed."""
    rng = random.Random(seed)
    drawn = rng.choices(targets, [target.share for target in targets], k=len(requests))
    shots = []
    for request, target in zip(requests, drawn, strict=True):
        is_cancelled, moment_s = rng.random() < cancelling.share, rng.random() * cancelling.within_s
        shots.append(Shot(request, target, moment_s if is_cancelled else None))
    return shots
