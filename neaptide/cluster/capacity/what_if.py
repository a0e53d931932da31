"""What would be, on the traffic that was: with other targets, more of it, or on another device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from neaptide.cluster.capacity.measure import Size, measure
from neaptide.cluster.capacity.planner import Question, plan, within_context
from neaptide.cluster.capacity.stretch import busiest, cut, works_s
from neaptide.engine.scheduler.slack import GIVEN_UP_FACTOR
from neaptide.estimator.device_profile import load_profile, profile_names
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.recorded.load import LoadMaker
from neaptide.simulation.recorded.recording import Recording
from neaptide.simulation.scenario import GiveUp, Scenario

GIVE_UP = GiveUp(Layers(100, 0.0), GIVEN_UP_FACTOR)
"""Of a server that gives steps up: it looks before every kernel of every layer."""
PEAK_S, MARGIN_S = 120.0, 15.0
"""Of the recorded time its busiest stretch is simulated: an answer is to come while the operator waits."""
MAX_REPLICAS = 64
ROW_TOKENS = 4e6
"""Of rows that wait: more than fit into such a stretch; the pool goes on with others like them."""
SET_NAME = "recorded"


@dataclass(slots=True, frozen=True, kw_only=True)
class Change:
    traffic: float = 1.0
    """So many times the online requests in the same time."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    """None: as the server has them."""
    profile: str | None = None
    """A device by its name; None: this one."""
    attainment: float = 0.9
    """Of the requests that are to meet both targets, where replicas are counted."""


@dataclass(slots=True, frozen=True)
class WhatIf:
    recorded_s: float
    """How long the traffic is of which the peak was taken."""
    requests: int
    """Of the peak."""
    attainment: dict[str, float]
    """On one replica, beside offline work: ttft, tpot, both."""
    offline_tokens_per_s: float | None
    """None: there was no offline work."""
    replicas: int | None
    """The fewest that reach the attainment, without offline work; None: more than were tried."""


def check(change: Change) -> None:
    """
    Raises:
        ValueError: there is no such device.
    """
    if change.profile is not None and change.profile not in profile_names():
        raise ValueError(f"there is no device profile {change.profile!r}; there are: {', '.join(profile_names())}")


def what_if(recording: Recording, change: Change) -> WhatIf:
    """
    Raises:
        ValueError: there is no such device, nothing was recorded, or none of it fits into the device's memory.
    """
    check(change)
    base = _scenario(recording, change)
    load = LoadMaker(recording, recording.first_s, recording.present.scheduler.max_model_len, ROW_TOKENS).load()
    sped_up = [replace(request, arrival_s=request.arrival_s / change.traffic) for request in load.online]
    trace = within_context(sped_up, base).requests
    if not trace:
        raise ValueError("no online request was recorded that this device could serve")
    work_s = works_s(trace, base.profile, base.overlap_kappa, base.block_size)
    peak = cut(trace, busiest(trace, work_s, PEAK_S), MARGIN_S)
    offline = [_refillable(one.requests) for one in load.offline]
    if not peak.length_s > 0:
        offline = []  # one request alone: there is no time to do anything in
    here = measure(base, peak, Size(1, base.profile.num_blocks), offline)
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
        requests=peak.num_inside,
        attainment=here.attainment,
        offline_tokens_per_s=here.offline_tokens_per_s if offline else None,
        replicas=None if answer is None else answer.replicas,
    )


def _scenario(recording: Recording, change: Change) -> Scenario:
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
        give_up=GIVE_UP if scheduler.gives_up_steps and change.profile is None else None,
    )


def _refillable(rows: Sequence[TraceRequest]) -> OfflineSet:
    """With contents numbered in the set's own namespace, so that the pool can go on with fresh ones."""
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
