"""How true the shadow gauge is, and what it costs, on a real server: the 111M model, the load of W5 at 0.20.

Three runs over the same arrivals, a server for each: under ``priority``, under ``neaptide``, and under ``neaptide``
without the gauge. What the gauge's ``priority`` says of the first run should be what that run was; what it says of the
second should be what the first one was. The third shows what the gauge costs online requests.
Prints tables, then one JSON line. ``--quick``: 170 s a run. Else 420 s, so that its windows have their full length.
"""

import argparse
import asyncio
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.plan import (
    LAX_S,
    ONLINE_IN,
    ONLINE_OUT,
    START_TIMEOUT_S,
    TPOT_OVER_ALONE,
    TTFT_OVER_TPOT,
    Plan,
    slo_flags,
)
from benchmarks.live.run import run, scrape, submit_offline
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import Record
from neaptide.loadgen.percentiles import percentiles

LOAD = 0.20
PROBE_S = 60.0


@dataclass(slots=True)
class Outcome:
    samples: Samples
    """At the end of the load."""
    records: list[Record]
    duration_s: float

    def value(self, name: str, **labels: str) -> float | None:
        found = self.samples.sum(f"neaptide_shadow_{name}", **labels)
        return None if found != found else found

    @property
    def tpot_p99_ms(self) -> float:
        return 1e3 * percentiles(r.tpot_s for r in self.records).p99

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


async def served(plan: Plan, flags: list[str]) -> Outcome:
    arrivals = poisson_arrivals(plan.rate_rps, plan.duration_s, plan.seed)
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess([str(plan.model), "--served-model-name", "m", *flags], Path(directory), START_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None)
        async with server, httpx.AsyncClient(base_url=server.base_url, timeout=600.0, limits=limits) as http:
            client = StreamClient(http, "m")
            await submit_offline(http, plan)
            await open_loop(
                arrivals,
                lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True),
                lambda i, record: records.append(record),
            )
            return Outcome(await scrape(http), records, plan.duration_s)


async def measure(plan: Plan) -> dict[str, Any]:
    short = replace(plan, duration_s=PROBE_S, window_s=(10.0, PROBE_S - 5.0))
    ceiling = (await run(short, slo_flags(LAX_S, LAX_S), online=False, offline=True)).offline_tokens_per_s
    rate_rps = plan.at_load(LOAD, ceiling).rate_rps
    probe = await run(replace(short, rate_rps=rate_rps), slo_flags(LAX_S, LAX_S), online=True, offline=False)
    tpot_s = TPOT_OVER_ALONE * percentiles(r.tpot_s for r in probe.records).p50
    flags, plan = slo_flags(TTFT_OVER_TPOT * tpot_s, tpot_s), plan.at_load(LOAD, ceiling)
    print(f"{rate_rps:.2f} requests/s, TPOT target {1e3 * tpot_s:.0f} ms", flush=True)
    priority = await served(plan, [*flags, "--policy", "priority"])
    ours = await served(plan, flags)
    without = await served(plan, [*flags, "--shadow", "off"])
    itself, other = priority.figures("priority"), ours.figures("priority")
    return {
        "ratios": {
            "attainment_minus_real": _minus(itself["shadow"][0], itself["real"][0]),
            "offline_vs_real": _over(itself["shadow"][1], itself["real"][1]),
            "attainment_of_other_minus_real": _minus(other["shadow"][0], itself["real"][0]),
            "offline_of_other_vs_real": _over(other["shadow"][1], itself["real"][1]),
            "core_share": round((ours.value("cpu_seconds_total") or 0.0) / ours.duration_s, 5),
            "tpot_p99_vs_without": round(ours.tpot_p99_ms / without.tpot_p99_ms, 4),
        },
        "rate_rps": round(rate_rps, 3),
        "tpot_target_ms": round(1e3 * tpot_s, 1),
        "priority": itself,
        "neaptide": other,
        "saved_targets": ours.value("saved_targets", policy="priority"),
        "tpot_p99_ms": [round(one.tpot_p99_ms, 1) for one in (ours, without)],
    }


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one - other, 4)


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else round(one / other, 4)


def show(result: dict[str, Any]) -> None:
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
        attained, offline = zip(one["real"], one["shadow"], strict=True)
        rows.append([policy, *(_text(cell) for cell in (one["requests"], one["window_s"], *attained, *offline))])
    print_table("the shadow gauge against what was", columns, rows)
    print_table("differences", list(result["ratios"]), [[_text(value) for value in result["ratios"].values()]])


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="170 s a run instead of 420")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    duration_s = 170.0 if args.quick else 420.0
    result = asyncio.run(measure(Plan(duration_s, (0.0, duration_s), model_111m(), args.seed)))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
