"""What-if simulation on recorded traffic: other targets, more traffic, or another device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from neaptide.cluster.capacity.measure import Size, measure
from neaptide.cluster.capacity.planner import Question, plan, within_context
from neaptide.cluster.capacity.stretch import busiest, cut, works_s
from neaptide.estimator.device_profile import load_profile, profile_names
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.recorded.load import LoadMaker, RecordedLoad
from neaptide.simulation.recorded.recording import TrafficRecording
from neaptide.simulation.scenario import GiveUp, Scenario

GIVE_UP = GiveUp(Layers(100, 0.0))
"""For a server with abortable steps: it checks for arrivals before every kernel of every layer."""
PEAK_S, MARGIN_S = 120.0, 15.0
"""Only the busiest part of the recording is simulated, because the operator waits for the answer."""
MAX_REPLICAS = 64
ROW_TOKENS = 4e6
"""Tokens of waiting rows: more than fit into that part; the pool is refilled with similar rows."""
SET_NAME = "recorded"


@dataclass(slots=True, frozen=True, kw_only=True)
class WhatIfChange:
    traffic: float = 1.0
    """Factor on the online requests in the same time."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    """None: the server's targets."""
    profile: str | None = None
    """Name of a device profile; None: this device."""
    attainment: float = 0.9
    """Fraction of the requests that must meet both targets, when counting replicas."""


@dataclass(slots=True, frozen=True)
class Simulated:
    """The busiest part on one replica, with offline work."""

    requests: int
    """Online requests in it."""
    attainment: dict[str, float]
    """Shares that met their targets: ttft, tpot, both."""
    offline_tokens_per_s: float | None
    """None: there was no offline work."""


@dataclass(slots=True, frozen=True)
class WhatIf:
    recorded_s: float
    """Length of the recording from which the busiest part was taken."""
    changed: Simulated
    today: Simulated
    """The same simulation without the change."""
    replicas: int | None
    """The fewest replicas that reach the attainment, without offline work; None: more than were tried."""


def check(change: WhatIfChange) -> None:
    """Checks a change.

    Raises:
        ValueError: the device profile does not exist.
    """
    if change.profile is not None and change.profile not in profile_names():
        raise ValueError(f"there is no device profile {change.profile!r}; there are: {', '.join(profile_names())}")


def what_if(recording: TrafficRecording, change: WhatIfChange) -> WhatIf:
    """Simulates the change.

    Raises:
        ValueError: the device profile does not exist, nothing was recorded, or nothing fits into the device's memory.
    """
    check(change)
    base = _scenario(recording, change)
    load = LoadMaker(recording, recording.first_s, recording.present.scheduler.max_model_len, ROW_TOKENS).load()
    trace, changed = _one_replica(base, load, change.traffic)
    unchanged = WhatIfChange()
    today = changed
    if replace(change, attainment=unchanged.attainment) != unchanged:
        _, today = _one_replica(_scenario(recording, unchanged), load, 1.0)
    wanted = Question(
        base=base,
        trace=trace,
        attainment=change.attainment,
        peak_s=PEAK_S,
        margin_s=MARGIN_S,
        max_replicas=MAX_REPLICAS,
    )
    answer = plan(wanted).answer
    return WhatIf(
        recorded_s=recording.now_s - recording.first_s,
        changed=changed,
        today=today,
        replicas=None if answer is None else answer.replicas,
    )


def _one_replica(base: Scenario, load: RecordedLoad, traffic: float) -> tuple[list[TraceRequest], Simulated]:
    """The online requests that fit, and the busiest part of them on one replica with the offline work.

    Raises:
        ValueError: none fits.
    """
    sped_up = [replace(request, arrival_s=request.arrival_s / traffic) for request in load.online]
    trace = within_context(sped_up, base).requests
    if not trace:
        raise ValueError("no recorded online request fits this device")
    work_s = works_s(trace, base.profile, base.overlap_kappa, base.block_size)
    peak = cut(trace, busiest(trace, work_s, PEAK_S), MARGIN_S)
    offline = [_refillable(one.requests) for one in load.offline]
    if not peak.length_s > 0:
        offline = []  # a single request leaves no time for offline work
    here = measure(base, peak, Size(1, base.profile.num_blocks), offline)
    return trace, Simulated(peak.num_inside, here.attainment, here.offline_tokens_per_s if offline else None)


def _scenario(recording: TrafficRecording, change: WhatIfChange) -> Scenario:
    scheduler, whole_s = recording.present.scheduler, (recording.first_s, recording.now_s)
    profile = recording.profile(whole_s) if change.profile is None else load_profile(change.profile)
    return Scenario(
        profile=profile,
        policy=scheduler.policy,
        ttft_slo_s=change.ttft_slo_s or scheduler.ttft_slo_s,
        tpot_slo_s=change.tpot_slo_s or scheduler.tpot_slo_s,
        block_size=profile.block_size,
        keep_order=True,
        step_noise=recording.step_noise(whole_s) if change.profile is None else 0.0,
        overlap_depth=scheduler.overlap_depth,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        with_bounds=False,
        give_up=GIVE_UP if scheduler.abortable_steps and change.profile is None else None,
    )


def _refillable(rows: Sequence[TraceRequest]) -> OfflineSet:
    """The rows as a set with contents in its own namespace, so that the pool can be refilled."""
    base, numbers = content_base(f"{SET_NAME}#0"), dict[int, int]()
    numbered = [
        replace(
            row,
            arrival_s=0.0,
            segments=tuple((base + numbers.setdefault(name, len(numbers)), tokens) for name, tokens in row.segments),
        )
        for row in rows
    ]
    return OfflineSet(SET_NAME, numbered, synthetic=False)
