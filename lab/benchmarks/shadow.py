"""How true the shadow gauge is, and what it costs, on a real server at the load of W5, 0.20.

Runs over the same arrivals, a server for each: one under ``priority``, then by turns ``neaptide`` and ``neaptide``
without the gauge. What the gauge's ``priority`` says of the first run should be what that run was; what it says of the
second should be what the first one was. The others show what the gauge costs online requests.

Targets are what three in four requests get under ``priority`` in a probe of a minute (TTFT and TPOT each): where nearly
all or nearly none meet their targets, every gauge is right.

Prints tables, then one JSON line. ``--quick``: 170 s a run, one turn. Else 420 s, so that its windows have their full
length, and two turns. ``--turns 0`` is the run under ``priority`` alone, five minutes with ``--quick``. ``--model
neaptide-tiny`` has many more requests in a window than the 111M model, and so less chance in its figures.
``--cost`` asks only what the gauge costs, without probes: one run of ``--seconds`` with it and one without, at
``--rate-rps`` and ``--targets-ms``. The first round begins two minutes after the first request, the next one some three
minutes after that. Two runs differ by chance as well: chats of the first run that streamed while a round was at work
stand beside the others of that run.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import EMBEDDED, model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.plan import LAX_S, ONLINE_IN, ONLINE_OUT, START_TIMEOUT_S, Plan, Targets, slo_flags
from benchmarks.live.run import give_time, run, scrape, submit_offline
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentiles
from neaptide.server.counterfactual.gauge import CHILD, ReplayPace

LOAD = 0.20
PROBE_S = 60.0
COST_S = 150.0
TARGET_QUANTILE = 0.75
LOOK_S = 0.5
ROUND_S = 400.0
"""For a round of the gauge that began before the load ended."""
MODELS = ("111m", EMBEDDED.name)


@dataclass(slots=True)
class Outcome:
    samples: Samples
    """At the end of the load."""
    records: list[ChatRecord]
    duration_s: float
    rounds_s: list[tuple[float, float]] = field(default_factory=list)
    """When the gauge's process was at work, on the clock of the records."""

    def value(self, name: str, **labels: str) -> float | None:
        found = self.samples.sum(f"neaptide_shadow_{name}", **labels)
        return None if found != found else found

    @property
    def tpot_ms(self) -> tuple[float, float]:
        """p50 and p99."""
        return tpots_ms(self.records)

    def beside_rounds(self) -> tuple[list[ChatRecord], list[ChatRecord]]:
        """The chats that streamed while the gauge was at work, and the others."""
        beside: list[ChatRecord] = []
        others: list[ChatRecord] = []
        for record in self.records:
            if times_s := record.token_times_s:
                met = any(begin < times_s[-1] and times_s[0] < end for begin, end in self.rounds_s)
                (beside if met else others).append(record)
        return beside, others

    def figures(self, policy: str) -> dict[str, Any]:
        return {
            "requests": self.value("requests"),
            "window_s": self.value("window_seconds"),
            "real": [self.value("real_attainment_ratio"), self.value("real_offline_tokens_per_second")],
            "shadow": [
                self.value("attainment_ratio", policy=policy),
                self.value("offline_tokens_per_second", policy=policy),
            ],
        }


def tpots_ms(records: list[ChatRecord]) -> tuple[float, float]:
    """p50 and p99."""
    found = percentiles(r.tpot_s for r in records)
    return round(1e3 * found.p50, 1), round(1e3 * found.p99, 1)


async def watch_rounds(server_pid: int, rounds_s: list[tuple[float, float]]) -> None:
    """Notes when the gauge's process works; it looks as often where there is none, so that runs compare."""
    now, child, spent_s, seen_s = asyncio.get_running_loop().time, None, 0.0, 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if child is None:
                child, seen_s = child_of(server_pid), now()
                continue
            before_s, spent_s = spent_s, sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:
            child, spent_s = None, 0.0
            continue
        last_s, seen_s = seen_s, now()
        if spent_s > before_s:
            if rounds_s and rounds_s[-1][1] == last_s:
                last_s = rounds_s.pop()[0]
            rounds_s.append((last_s, seen_s))


def child_of(server_pid: int) -> psutil.Process | None:
    """The process that simulates, if there is one."""
    children = psutil.Process(server_pid).children()
    return next((one for one in children if CHILD in " ".join(one.cmdline())), None)


async def served(plan: Plan, flags: list[str], *, has_gauge: bool = True) -> Outcome:
    arrivals = poisson_arrivals(plan.rate_rps, plan.duration_s, plan.seed)
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[ChatRecord] = []
    rounds_s: list[tuple[float, float]] = []
    flags = [*flags, "--shadow", "on" if has_gauge else "off"]
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess([str(plan.model), "--served-model-name", "m", *flags], Path(directory), START_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None)
        async with (
            server,
            httpx.AsyncClient(base_url=server.base_url, timeout=600.0, limits=limits) as http,
            StreamClient.beside(http, "m") as client,
        ):
            await submit_offline(http, plan)
            watch = asyncio.create_task(watch_rounds(server.pid, rounds_s))
            load = asyncio.create_task(
                open_loop(
                    arrivals,
                    lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True),
                    lambda i, record: records.append(record),
                )
            )
            await asyncio.sleep(plan.duration_s)
            if (await scrape(http)).sum("neaptide_requests_waiting", **{"class": "offline"}) == 0:
                raise SystemExit("the batch ran out under the load: the figures would be wrong")
            end = await (first_round(http) if has_gauge else scrape(http))
            await give_time([load])
            watch.cancel()
            return Outcome(end, records, plan.duration_s, rounds_s)


async def first_round(http: httpx.AsyncClient) -> Samples:
    """The metrics now, or when the gauge has shown a window for the first time."""
    for _ in range(round(ROUND_S)):
        samples = await scrape(http)
        if samples.sum("neaptide_shadow_window_seconds"):
            return samples
        await asyncio.sleep(1.0)
    raise SystemExit(f"the gauge showed nothing for {ROUND_S:g} s after the load")


async def targets_of_priority(plan: Plan) -> Targets:
    flags = [*slo_flags(LAX_S, LAX_S), "--policy", "priority"]
    records = (await run(plan, flags, online=True, offline=True)).records
    ttft_s, tpot_s = (
        statistics.quantiles(found, n=100)[round(100 * TARGET_QUANTILE) - 1]
        for found in (
            [r.ttft_s for r in records if r.ttft_s is not None],
            [r.tpot_s for r in records if r.tpot_s is not None],
        )
    )
    return Targets(ttft_s, tpot_s)


async def measure(plan: Plan, turns: int) -> dict[str, Any]:
    short = replace(plan, duration_s=PROBE_S, window_s=(10.0, PROBE_S - 5.0))
    ceiling = (await run(short, slo_flags(LAX_S, LAX_S), online=False, offline=True)).offline_tokens_per_s
    targets = await targets_of_priority(short.at_load(LOAD, ceiling))
    plan = plan.at_load(LOAD, ceiling)
    targets_ms = [round(1e3 * seconds, 1) for seconds in (targets.ttft_s, targets.tpot_s)]
    print(f"ceiling {ceiling:.0f} tok/s, {plan.rate_rps:.2f} requests/s, targets {targets_ms} ms", flush=True)
    priority = await served(plan, [*targets.flags, "--policy", "priority"])
    itself = priority.figures("priority")
    print(f"under priority: {itself}", flush=True)
    with_gauge, without = [], []
    for _ in range(turns):
        with_gauge.append(await served(plan, targets.flags))
        without.append(await served(plan, targets.flags, has_gauge=False))
    other = with_gauge[-1].figures("priority") if turns else None
    tpots_ms = [[one.tpot_ms[1] for one in runs] for runs in (with_gauge, without)]
    gauges = (priority, *with_gauge)
    cores = [(one.value("cpu_seconds_total") or 0.0) / one.duration_s for one in with_gauge or gauges]
    return {
        "ratios": {
            "attainment_minus_real": _minus(itself["shadow"][0], itself["real"][0]),
            "offline_vs_real": _over(itself["shadow"][1], itself["real"][1]),
            "attainment_of_other_minus_real": _minus(other["shadow"][0], itself["real"][0]) if other else None,
            "offline_of_other_vs_real": _over(other["shadow"][1], itself["real"][1]) if other else None,
            "core_share": round(statistics.mean(cores), 5),
            "tpot_p99_vs_without": _over(*[statistics.mean(each) for each in tpots_ms]) if turns else None,
        },
        "rate_rps": round(plan.rate_rps, 3),
        "targets_ms": targets_ms,
        "priority": itself,
        "neaptide": other,
        "saved_targets": with_gauge[-1].value("saved_targets", policy="priority") if turns else None,
        "cpu_s": [one.value("cpu_seconds_total") for one in gauges],
        "rounds": [one.value("rounds_total", outcome="compared") for one in gauges],
        "tpot_p99_ms": tpots_ms,
    }


async def measure_cost(plan: Plan, targets: Targets) -> dict[str, Any]:
    """TPOT p50 and p99 with the gauge over those without it, and the processor time that it took: in so short a run the
    one round that it has is several percent; then it rests."""
    gauge = await served(plan, targets.flags)
    print(f"with the gauge: {len(gauge.records)} chats, TPOT {gauge.tpot_ms} ms, at work {gauge.rounds_s}", flush=True)
    none = await served(plan, targets.flags, has_gauge=False)
    with_ms, without_ms = gauge.tpot_ms, none.tpot_ms
    cpu_s, rounds, pace = (
        gauge.value("cpu_seconds_total") or 0.0,
        gauge.value("rounds_total", outcome="compared"),
        ReplayPace(),
    )
    each_s = cpu_s / rounds if rounds else 0.0
    beside, others = gauge.beside_rounds()
    return {
        "ratios": {
            "core_share": round(cpu_s / gauge.duration_s, 5),
            "core_share_in_the_long_run": round(
                each_s / (each_s + max(pace.least_rest_s, pace.rest_factor * each_s)), 5
            ),
            "tpot_p50_vs_without": _over(with_ms[0], without_ms[0]),
            "tpot_p99_vs_without": _over(with_ms[1], without_ms[1]),
            "tpot_p50_beside_a_round": _over(tpots_ms(beside)[0], tpots_ms(others)[0]) if beside else None,
        },
        "rate_rps": round(plan.rate_rps, 3),
        "cpu_s": round(cpu_s, 3),
        "rounds": rounds,
        "worked_s": [round(end - begin, 1) for begin, end in gauge.rounds_s],
        "beside_rounds": {"chats": len(beside), "tpot_ms": tpots_ms(beside), "others_ms": tpots_ms(others)}
        if beside
        else None,
        "chats": [len(gauge.records), len(none.records)],
        "tpot_ms": [with_ms, without_ms],
    }


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one - other, 4)


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else round(one / other, 4)


def show(result: dict[str, Any]) -> None:
    print_table("differences", list(result["ratios"]), [[_text(value) for value in result["ratios"].values()]])
    if "priority" not in result:
        return
    columns = [
        "served under",
        "requests",
        "window s",
        "attained",
        "shadow priority",
        "offline tok/s",
        "shadow priority",
    ]
    rows = []
    for policy in ("priority", "neaptide"):
        one = result[policy]
        if one is None:
            continue
        attained, offline = zip(one["real"], one["shadow"], strict=True)
        rows.append([policy, *(_text(cell) for cell in (one["requests"], one["window_s"], *attained, *offline))])
    print_table("the shadow gauge against what was", columns, rows)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="170 s a run instead of 420, one turn")
    form.add_argument("--cost", action="store_true", help="a run with the gauge and one without, nothing else")
    parser.add_argument("--seconds", type=float, default=COST_S, help="of each of them, with --cost (%(default)g)")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help=f"({MODELS[0]})")
    parser.add_argument("--turns", type=int, help="with and without the gauge (2, quick 1; 0: neither)")
    parser.add_argument("--rate-rps", type=float, default=1.4, help="of chats, with --cost (%(default)s)")
    parser.add_argument("--targets-ms", default="284,57", metavar="TTFT,TPOT", help="with --cost (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    duration_s = args.seconds if args.cost else 170.0 if args.quick else 420.0
    model = EMBEDDED if args.model == EMBEDDED.name else model_111m()
    plan = Plan(duration_s, (0.0, duration_s), model, args.seed)
    turns = args.turns if args.turns is not None else 1 if args.quick else 2
    if args.cost:
        ttft_ms, tpot_ms = (float(text) for text in args.targets_ms.split(","))
        plan = plan.at_load(LOAD, args.rate_rps * (ONLINE_IN + ONLINE_OUT) / LOAD)
        result = asyncio.run(measure_cost(plan, Targets(ttft_ms / 1e3, tpot_ms / 1e3)))
    else:
        result = asyncio.run(measure(plan, turns))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
