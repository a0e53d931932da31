"""Parts of a trace that are simulated separately: the busiest one, and the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.bound import UnitCosts, add_request, cached_prefixes
from neaptide.simulation.measures import Window


@dataclass(slots=True, frozen=True)
class Stretch:
    """The requests between two moments of a trace, with margins around them.

    Without margins, an engine that starts empty, or has no later load, would serve a peak better than in the middle of
    a day.
    """

    requests: Sequence[TraceRequest]
    """With those of the margins, on a clock that starts at the first margin."""
    window_s: Window
    """From the first to the last arrival inside, on that clock; of a sample, its whole length."""
    start_s: float
    """The first arrival inside, in trace time."""

    @property
    def end_s(self) -> float:
        """The end of the window, in trace time."""
        return self.start_s + self.length_s

    @property
    def length_s(self) -> float:
        return self.window_s[1] - self.window_s[0]

    @property
    def num_inside(self) -> int:
        return sum(self.window_s[0] <= request.arrival_s <= self.window_s[1] for request in self.requests)


def cut(requests: Sequence[TraceRequest], span_s: Window, margin_s: float) -> Stretch:
    """The part of a trace in a span. ``requests`` are in order of arrival, and at least one arrives in the span, ends
    included."""
    origin_s = span_s[0] - margin_s
    taken = [r for r in requests if origin_s <= r.arrival_s <= span_s[1] + margin_s]
    inside_s = [r.arrival_s for r in taken if span_s[0] <= r.arrival_s <= span_s[1]]
    window_s = (inside_s[0] - origin_s, inside_s[-1] - origin_s)
    return Stretch([replace(r, arrival_s=r.arrival_s - origin_s) for r in taken], window_s, inside_s[0])


def samples(requests: Sequence[TraceRequest], length_s: float, most: int, margin_s: float) -> list[Stretch]:
    """The whole trace, or ``most`` evenly spaced parts of ``length_s`` if it is longer than they are together.

    Each part begins at an arrival and counts its whole length.
    """
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    if last_s - first_s <= most * length_s:
        return [cut(requests, (first_s, last_s), margin_s)]
    arrivals_s = np.array([request.arrival_s for request in requests])
    points_s = np.linspace(first_s, last_s - length_s, most)
    starts_s = arrivals_s[np.searchsorted(arrivals_s, points_s, side="right") - 1].tolist()
    parts = [cut(requests, (start_s, start_s + length_s), margin_s) for start_s in starts_s]
    return [replace(part, window_s=(margin_s, margin_s + length_s)) for part in parts]


def works_s(
    requests: Sequence[TraceRequest], profile: DeviceProfile, overlap_kappa: float, block_size: int
) -> list[float]:
    """The smallest device time of each request, as the bound on offline work counts it, with a cache that keeps every
    prefix."""
    costs = UnitCosts.of(profile)
    found = []
    cached = cached_prefixes((request.segments for request in requests), block_size)
    for request, cached_tokens in zip(requests, cached, strict=True):
        shape = BatchShape()
        add_request(shape, request.input_tokens, cached_tokens, request.output_tokens)
        found.append(max(costs.work(shape).lines_s(overlap_kappa)))
    return found


def busiest(requests: Sequence[TraceRequest], work_s: Sequence[float], length_s: float) -> Window:
    """The first span of this length with the most work; it begins at an arrival."""
    arrivals_s = np.array([request.arrival_s for request in requests])
    behind = np.searchsorted(arrivals_s, arrivals_s + length_s, side="right")
    done_s = np.concatenate(([0.0], np.cumsum(work_s)))
    start_s = float(arrivals_s[np.argmax(done_s[behind] - done_s[:-1])])
    return start_s, start_s + length_s
