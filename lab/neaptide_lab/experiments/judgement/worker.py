"""One simulation in a process of its own: a cell and a policy on standard input, the figures on standard output."""

import sys
import time
from dataclasses import replace

import msgspec
import numpy as np

from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.loadgen.percentiles import percentile
from neaptide.simulation.simulator import Run, fitting_online, simulate
from neaptide_lab.experiments.judgement.cell import Cell, scenario_of

LONGEST_SHARE = 0.1
"""The longest prompts, whose attainment is reported apart."""


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    cell: Cell
    policy: str
    with_bounds: bool = False
    """Whether the bound on offline work is computed, too."""


class Figures(msgspec.Struct, kw_only=True):
    """Figures of a run. Shares are of the online requests that arrived in the window; None where there are none."""

    requests: int
    attained: float | None
    """Share with both targets met."""
    ttft: float | None
    tpot: float | None
    from_arrival: float | None
    """Share with every token in time, counted from the arrival."""
    longest: float | None
    """Share with both targets met among the tenth with the longest prompts."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    gap_p99_s: float | None
    gap_max_s: float | None
    wait_max_s: float | None
    """Longest time to a first token; of a request without one, until the end of the run."""
    latency_s: float | None
    """Seconds per output token, from the arrival."""
    offline_tokens_per_s: float
    offline_bound_tokens_per_s: float | None = None
    """What no policy could exceed with the same requests in time; None unless it was asked for."""
    offline_wait_s: float | None
    """Longest time from a row's submission to its first step."""
    online_hits: float | None
    offline_hits: float | None
    again_tokens: int
    """Tokens that were computed again."""
    preempted_online: int
    preempted_offline: int
    work: float | None = None
    """Seconds of the device's work that was done per second, of both classes; see ``WorkTally``."""
    steps: int
    plan_mean_ms: float | None
    plan_p99_ms: float | None
    valid: bool
    """Whether offline work never ran out."""
    failed: int
    """Offline rows that the engine failed."""
    wall_s: float


def figures_of(task: Task) -> Figures:
    """Runs the simulation. Raises what ``scenario_of`` and the simulator raise."""
    started_s = time.perf_counter()
    scenario, fleet = scenario_of(task.cell, task.policy)
    if task.with_bounds:
        scenario = replace(scenario, with_bounds=True)
    online = fitting_online(scenario)
    work = None
    if fleet is not None:
        run = simulate_cluster(scenario, fleet).whole
    elif task.cell.with_work:
        from neaptide_lab.experiments.bros.work import WorkTally

        tally = WorkTally((online[0].arrival_s, online[-1].arrival_s))
        run = simulate(scenario, observers=[tally])
        work = tally.work(scenario.profile).total
    else:
        run = simulate(scenario)
    prompts = {f"online-{number}": request.input_tokens for number, request in enumerate(online)}
    return _reduced(run, prompts, (scenario.ttft_slo_s, scenario.tpot_slo_s), work, started_s)


def _reduced(
    run: Run, prompts: dict[str, int], slos_s: tuple[float, float], work: float | None, started_s: float
) -> Figures:
    result, (from_s, to_s) = run.result, run.window_s
    records = {name: one for name, one in run.measures.online.items() if from_s <= one.arrival_s <= to_s}
    met = {
        name: one.is_done and one.began_in_time(slos_s[0]) and one.kept_pace(slos_s[1]) for name, one in records.items()
    }
    longest = sorted(records, key=lambda name: -prompts[name])[: max(round(LONGEST_SHARE * len(records)), 1)]
    attainment, online = result.online.attainment, result.online
    end_s = max([one.last_s for one in records.values() if one.tokens], default=to_s)
    waits_s = [one.ttft_s(end_s) for one in records.values()]
    return Figures(
        requests=online.requests,
        attained=attainment["both"],
        ttft=attainment["ttft"],
        tpot=attainment["tpot"],
        from_arrival=attainment["both_from_arrival"],
        longest=sum(met[name] for name in longest) / len(longest) if longest else None,
        ttft_p50_s=online.ttft_s["p50"],
        ttft_p99_s=online.ttft_s["p99"],
        tpot_p50_s=online.tpot_s["p50"],
        tpot_p99_s=online.tpot_s["p99"],
        gap_p99_s=percentile(run.measures.itl_s, 0.99) if len(run.measures.itl_s) else None,
        gap_max_s=float(np.max(run.measures.itl_s)) if len(run.measures.itl_s) else None,
        wait_max_s=max(waits_s, default=None),
        latency_s=online.normalized_latency_s,
        offline_tokens_per_s=result.offline.tokens_per_s or 0.0,
        offline_bound_tokens_per_s=result.offline.bound_tokens_per_s.get("in_time"),
        offline_wait_s=result.offline.longest_wait_s,
        online_hits=result.kv.online_hit_ratio,
        offline_hits=result.kv.hit_ratio,
        again_tokens=result.wasted_tokens,
        preempted_online=result.preemptions.count_by_class["online"],
        preempted_offline=result.preemptions.count_by_class["offline"],
        work=work,
        steps=result.steps,
        plan_mean_ms=result.scheduler_ms["mean"],
        plan_p99_ms=result.scheduler_ms["p99"],
        valid=result.valid,
        failed=run.num_failed,
        wall_s=time.perf_counter() - started_s,
    )


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(figures_of(task)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
