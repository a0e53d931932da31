"""Results of a simulation, under the keys of its JSON. docs/simulate-plan-loadtest.md defines them."""

import math
import resource
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from neaptide.engine.config import SchedulerConfig
from neaptide.loadgen.percentiles import percentile
from neaptide.simulation.measures import CLOCK_ERROR_S, Measures, Window

Percentiles = dict[str, float | None]


class OnlineResult(msgspec.Struct, kw_only=True):
    requests: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    longest_gap_s: float | None = None
    normalized_latency_s: float | None
    attainment: dict[str, float | None]
    goodput_rps: float | None


class OfflineResult(msgspec.Struct, kw_only=True):
    requests_completed: int
    tokens_per_s: float | None
    output_tokens_per_s: float | None
    computed_tokens_per_s: float | None
    makespan_s: float | None
    longest_wait_s: float | None
    deadline_misses: int
    bound_tokens_per_s: dict[str, float | None]

    @property
    def share_of_bound(self) -> float | None:
        """Fraction of what no policy could exceed in this window beside the online requests that were in time."""
        bound = self.bound_tokens_per_s["in_time"]
        return (self.tokens_per_s or 0.0) / bound if bound else None


class KvResult(msgspec.Struct, kw_only=True):
    hit_ratio: float | None
    online_hit_ratio: float | None
    saving_ratio: float | None
    saving_ratio_bound: float | None
    occupancy_by_class: dict[str, float]


class PreemptionResult(msgspec.Struct, kw_only=True):
    count_by_class: dict[str, int]
    count_by_kind: dict[str, int]
    """Their sum, for readers of results that had other kinds too."""
    recomputed_tokens: int
    """Tokens computed again after a preemption, as the engine counts them."""
    swapped_blocks: int


class SimSettings(msgspec.Struct, kw_only=True):
    """Settings that the numbers depend on, other than policy, load and device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_tokens: int | None
    ttft_slo_s: float
    tpot_slo_s: float
    step_noise: float
    headroom: str
    block_size: int
    overlap_kappa: float
    overlap_depth: int
    planning_scale: float
    num_host_blocks: int = 0
    late_price_s: float = SchedulerConfig().late_price_s
    left_out: tuple[str, ...] = ()
    plan: str | None = None


class SimResult(msgspec.Struct, kw_only=True):
    valid: bool
    policy: str
    profile: str
    seed: int
    settings: SimSettings
    steps: int
    online: OnlineResult
    offline: OfflineResult
    kv: KvResult
    preemptions: PreemptionResult
    wasted_tokens: int
    scheduler_ms: dict[str, float | None]
    prediction: dict[str, float | None]
    peak_memory_bytes: int
    wall_s: float

    @property
    def attained(self) -> float:
        """Fraction of the online requests that met both targets; 0 without requests."""
        return self.online.attainment["both"] or 0.0

    @property
    def offline_tokens_per_s(self) -> float:
        return self.offline.tokens_per_s or 0.0

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def online_result(measures: Measures, window_s: Window, end_s: float, slos_s: tuple[float, float]) -> OnlineResult:
    """The online figures. ``end_s`` is the end of the run, ``slos_s`` the targets of TTFT and TPOT."""
    records = [r for r in measures.online.values() if window_s[0] <= r.arrival_s <= window_s[1]]
    ttft_slo_s, tpot_slo_s = slos_s
    met_ttft = [r.is_done and r.began_in_time(ttft_slo_s) for r in records]
    met_tpot = [r.is_done and r.kept_pace(tpot_slo_s) for r in records]
    met_both = [a and b for a, b in zip(met_ttft, met_tpot, strict=True)]
    on_deadline = [r.is_done and r.lag_s <= ttft_slo_s + CLOCK_ERROR_S for r in records]
    attained = {"ttft": met_ttft, "tpot": met_tpot, "both": met_both, "both_from_arrival": on_deadline}
    latencies_s = [(r.last_s - r.arrival_s) / r.tokens for r in records if r.is_done]
    return OnlineResult(
        requests=len(records),
        ttft_s=_percentiles([r.ttft_s(end_s) for r in records]),
        tpot_s=_percentiles([r.tpot_s for r in records if r.is_done and r.tpot_s is not None]),
        itl_s=_percentiles(measures.itl_s),
        longest_gap_s=max(measures.itl_s, default=None),
        normalized_latency_s=sum(latencies_s) / len(latencies_s) if latencies_s else None,
        attainment={name: _share(met) for name, met in attained.items()},
        goodput_rps=_rate(sum(met_both), window_s),
    )


def offline_result(
    measures: Measures,
    window_s: Window,
    makespan_s: float | None,
    longest_wait_s: float | None,
    deadline_misses: int,
    bound_tokens_per_s: dict[str, float | None],
) -> OfflineResult:
    steps = measures.steps(window_s)
    output_tokens = float(steps["output_tokens"].sum())
    return OfflineResult(
        requests_completed=sum(window_s[0] < end_s <= window_s[1] for end_s in measures.offline_ends_s),
        tokens_per_s=_rate(float(steps["prompt_tokens"].sum()) + output_tokens, window_s),
        output_tokens_per_s=_rate(output_tokens, window_s),
        computed_tokens_per_s=_rate(float(steps["computed_tokens"].sum()), window_s),
        makespan_s=makespan_s,
        longest_wait_s=longest_wait_s,
        deadline_misses=deadline_misses,
        bound_tokens_per_s=bound_tokens_per_s,
    )


def kv_result(measures: Measures, window_s: Window, bound: float | None) -> KvResult:
    steps = measures.steps(window_s)
    blocks = {name: steps[f"{name}_blocks"] for name in ("online", "offline", "cached", "free")}
    seconds = steps["duration_s"]
    block_seconds = float(sum(column @ seconds for column in blocks.values()))
    prompt_tokens = float(steps["prompt_tokens"].sum())
    return KvResult(
        hit_ratio=_ratio(steps["cached_tokens"], float(steps["admitted_tokens"].sum())),
        online_hit_ratio=_ratio(steps["online_cached_tokens"], float(steps["online_admitted_tokens"].sum())),
        saving_ratio=1.0 - float(steps["prefill_tokens"].sum()) / prompt_tokens if prompt_tokens else None,
        saving_ratio_bound=bound,
        occupancy_by_class={
            name: float(column @ seconds) / block_seconds if block_seconds else 0.0 for name, column in blocks.items()
        },
    )


def preemption_result(measures: Measures) -> PreemptionResult:
    """Preemptions over the whole run, by class."""
    steps = measures.steps((-math.inf, math.inf))
    by_class = {name: int(steps[f"preempted_{name}"].sum()) for name in ("online", "offline")}
    return PreemptionResult(
        count_by_class=by_class,
        count_by_kind={"recompute": sum(by_class.values())},
        recomputed_tokens=int(steps["recomputed_tokens"].sum()),
        swapped_blocks=int(steps["swapped_blocks"].sum()),
    )


def prediction_result(measures: Measures, window_s: Window) -> dict[str, float | None]:
    steps = measures.steps(window_s)
    seconds, predicted_s = steps["duration_s"], steps["predicted_s"]
    if not len(seconds):
        return {"mape": None, "coverage": None}
    return {
        "mape": float(np.mean(np.abs(predicted_s / seconds - 1.0))),
        "coverage": float(np.mean(seconds <= predicted_s + steps["margin_s"] + CLOCK_ERROR_S)),
    }


def wasted_tokens(measures: Measures) -> int:
    return int(measures.steps((-math.inf, math.inf))["again_tokens"].sum())


def scheduler_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and p99 of the processor time of planning, in ms."""
    if not len(seconds):
        return {"mean": None, "p99": None}
    return {"mean": 1e3 * sum(seconds) / len(seconds), "p99": 1e3 * percentile(seconds, 0.99)}


def _percentiles(values: Sequence[float]) -> Percentiles:
    """None without values, because JSON has no NaN."""
    points = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    return {name: percentile(values, q) if len(values) else None for name, q in points}


def peak_memory_bytes() -> int:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _share(met: Sequence[bool]) -> float | None:
    return sum(met) / len(met) if met else None


def _rate(count: float, window_s: Window) -> float | None:
    """None in a window of length zero, where all requests arrived at one instant."""
    length_s = window_s[1] - window_s[0]
    return count / length_s if length_s > 0 else None


def _ratio(part: npt.NDArray[np.float64], whole: float) -> float | None:
    return float(part.sum()) / whole if whole else None
