"""W5, live: real-time completions beside a batch file, through the HTTP server, client on the same machine.

The 111M model. First the ceiling: offline work alone, lines of 256 tokens in / 64 out, submitted at once. Online:
Poisson, 128 in / 32 out, streamed, at the rate that makes ``load`` of the ceiling in logical tokens. A probe of online
alone with lax targets sets them: TPOT 2.4 times its TPOT p50, TTFT 5 times that. Then online alone, offline alone with
steps capped at the TPOT target, and both together. A server for each run; correctness is checked first.

share = offline tokens/s / (capped ceiling - online tokens/s); share_uncapped with the ceiling itself.
Prints tables, then one JSON line. ``--quick``: 60 s a run, load 0.20. Else 300 s a run, loads 0.20, 0.10 and 0.40, two
repeats by turns; the ratios are those of load 0.20, means over the repeats. Rivals are not run here: their ratios are
null.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import Reference, model_111m, print_table, random_prompts, vocab_size
from neaptide.commands.server_process import ServerProcess
from neaptide.engine.scheduler.slack import IDLE_SHARE
from neaptide.loadgen.client.batches import BatchError, submit_batch, wait_until_it_runs
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import Record, attainment
from neaptide.loadgen.percentiles import percentiles

LOADS = (0.20, 0.10, 0.40)
"""Of the ceiling; the first is the headline."""
TPOT_OVER_ALONE = 2.4
TTFT_OVER_TPOT = 5.0
ONLINE_IN, ONLINE_OUT = 128, 32
OFFLINE_IN, OFFLINE_OUT = 256, 64
CEILING_LINES = 3000
LEAST_LINES = 400
"""For runs whose need is known from the ceiling."""
LAX_S = 3600.0
START_TIMEOUT_S = 600.0
"""An executor may compile its model first."""
EGRESS_MS = 5.0
PHASES = ("schedule", "prepare", "model", "sample", "commit")


@dataclass(slots=True)
class Window:
    """Measured between two scrapes of the same server."""

    seconds: float = 0.0
    online_tokens_per_s: float = 0.0
    offline_tokens_per_s: float = 0.0
    steps: float = 0.0
    mean_step_ms: float = 0.0
    phase_ms: dict[str, float] = field(default_factory=dict)
    preemptions: float = 0.0
    prediction_error: float = 0.0
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Plan:
    duration_s: float
    window_s: tuple[float, float]
    model: Path
    seed: int
    offline_lines: int = CEILING_LINES
    rate_rps: float = 0.0
    """Of online requests."""

    def at_load(self, load: float, ceiling_tokens_per_s: float) -> "Plan":
        """With online requests that make this share of the ceiling, and twice the lines that the whole run could do."""
        rate_rps = load * ceiling_tokens_per_s / (ONLINE_IN + ONLINE_OUT)
        needed = 2 * ceiling_tokens_per_s * self.duration_s / (OFFLINE_IN + OFFLINE_OUT)
        return replace(self, rate_rps=rate_rps, offline_lines=LEAST_LINES + round(needed))


async def scrape(http: httpx.AsyncClient) -> Samples:
    return Samples((await http.get("/metrics")).text)


def between(start: Samples, end: Samples, seconds: float, *, saturated: bool = False) -> Window:
    """Rates over ``seconds``, or, for an engine that was never idle, over the time of its steps."""

    def delta(name: str, **labels: str) -> float:
        return end.sum(name, **labels) - start.sum(name, **labels)

    steps = max(delta("neaptide_step_seconds_count", phase="total"), 1.0)
    if saturated:
        # Steps can be seconds long and the window's edges fall inside them: count the engine's own busy time.
        seconds = sum(delta("neaptide_step_seconds_sum", phase=p) for p in ("total", "schedule", "commit"))
    # A recomputed token is computed twice but is one token of work: only offline work is preempted here.
    recomputed = delta("neaptide_recomputed_tokens_total")
    tokens = {c: delta("neaptide_step_tokens_total", **{"class": c}) for c in ("online", "offline")}
    return Window(
        seconds=seconds,
        online_tokens_per_s=tokens["online"] / seconds,
        offline_tokens_per_s=(tokens["offline"] - recomputed) / seconds,
        steps=steps,
        mean_step_ms=1e3 * delta("neaptide_step_seconds_sum", phase="total") / steps,
        phase_ms={p: 1e3 * delta("neaptide_step_seconds_sum", phase=p) / steps for p in PHASES},
        preemptions=delta("neaptide_preemptions_total"),
        prediction_error=delta("neaptide_step_prediction_error_ratio_sum") / steps,
    )


async def submit_offline(http: httpx.AsyncClient, plan: Plan) -> None:
    """The batch file; returns when its lines run."""
    prompts = random_prompts(plan.offline_lines, OFFLINE_IN, vocab_size(plan.model), seed=1000 + plan.seed)
    lines = []
    for i, prompt in enumerate(prompts):
        body = {"model": "m", "prompt": prompt, "max_tokens": OFFLINE_OUT, "temperature": 0, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    batch = await submit_batch(http, "w5.jsonl", "\n".join(lines).encode())
    try:
        await wait_until_it_runs(http, batch)
    except BatchError as error:
        raise SystemExit(str(error)) from None


async def run(plan: Plan, flags: list[str], *, online: bool, offline: bool) -> Window:
    """One server, one run; the window's records are those of requests that arrived in it."""
    arrivals = poisson_arrivals(plan.rate_rps, plan.duration_s, plan.seed) if online else []
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = [str(plan.model), "--served-model-name", "m", *flags]
        server = ServerProcess(flags, Path(directory), START_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None)
        async with server, httpx.AsyncClient(base_url=server.base_url, timeout=600.0, limits=limits) as http:
            client = StreamClient(http, "m")
            if offline:
                await submit_offline(http, plan)
            load = asyncio.create_task(
                open_loop(
                    arrivals,
                    lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True),
                    lambda i, record: records.append(record),
                )
            )
            begin, end = plan.window_s
            await asyncio.sleep(begin)
            start = await scrape(http)
            await asyncio.sleep(end - begin)
            stop = await scrape(http)
            if offline and stop.sum("neaptide_requests_waiting", **{"class": "offline"}) == 0:
                raise SystemExit("the batch ran out inside the window: the figures would be wrong")
            window = between(start, stop, end - begin, saturated=not online)
            await load
    window.records = [r for r in records if begin <= r.arrival_s < end]
    return window


async def check(plan: Plan, more_flags: Sequence[str] = ()) -> int:
    """Greedy text of the server against the reference; returns how many tokens were compared."""
    prompts = random_prompts(3, ONLINE_IN, vocab_size(plan.model), seed=77)
    reference = Reference(plan.model)
    checked = 0
    with tempfile.TemporaryDirectory() as directory:
        flags = [str(plan.model), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"]
        flags += more_flags
        async with ServerProcess(flags, Path(directory), START_TIMEOUT_S) as server:
            async with httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http:
                for prompt in prompts:
                    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
                    body |= {"ignore_eos": True, "return_token_ids": True}
                    choice = (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]
                    checked += reference.agreement(prompt, choice["token_ids"])
    return checked


def slo_flags(ttft_s: float, tpot_s: float) -> list[str]:
    return ["--ttft-slo-ms", str(1e3 * ttft_s), "--tpot-slo-ms", str(1e3 * tpot_s), "--max-model-len", "1024"]


def summary(name: str, window: Window, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    ttft = percentiles(r.ttft_s for r in window.records)
    tpot = percentiles(r.tpot_s for r in window.records)
    return {
        "run": name,
        "online_requests": len(window.records),
        "online_failed": sum(r.error is not None for r in window.records),
        "ttft_ms": [round(1e3 * v, 1) for v in ttft] if window.records else None,
        "tpot_ms": [round(1e3 * v, 1) for v in tpot] if window.records else None,
        "attainment": round(attainment(window.records, ttft_s, tpot_s), 4) if window.records else None,
        "online_tokens_per_s": round(window.online_tokens_per_s, 1),
        "offline_tokens_per_s": round(window.offline_tokens_per_s, 1),
        "mean_step_ms": round(window.mean_step_ms, 2),
        "phase_ms": {p: round(v, 3) for p, v in window.phase_ms.items()},
        "preemptions": window.preemptions,
        "prediction_mape": round(window.prediction_error, 3),
    }


@dataclass(slots=True, frozen=True)
class Targets:
    ttft_s: float
    tpot_s: float

    @property
    def flags(self) -> list[str]:
        return slo_flags(self.ttft_s, self.tpot_s)

    @property
    def cap_flags(self) -> list[str]:
        """Without online work a step may take ``IDLE_SHARE`` of the TTFT target less egress (``overlap_depth`` 0): so a
        target can stand for a cap on steps."""
        return slo_flags(self.tpot_s / IDLE_SHARE + EGRESS_MS / 1e3, self.tpot_s)


def share_of(most_tokens_per_s: float, both: Window) -> float | None:
    """Offline work, of what a ceiling leaves beside the online work; None if it leaves nothing."""
    left = most_tokens_per_s - both.online_tokens_per_s
    return round(both.offline_tokens_per_s / left, 4) if left > 0.0 else None


async def measure_load(plan: Plan, load: float, ceiling: Window) -> dict[str, Any]:
    """All runs at one load."""
    plan = plan.at_load(load, ceiling.offline_tokens_per_s)
    probe = await run(plan, slo_flags(LAX_S, LAX_S), online=True, offline=False)
    tpot_s = TPOT_OVER_ALONE * percentiles(r.tpot_s for r in probe.records).p50
    targets = Targets(TTFT_OVER_TPOT * tpot_s, tpot_s)
    print(f"load {load}: {plan.rate_rps:.2f} requests/s, TPOT target {1e3 * tpot_s:.0f} ms", flush=True)
    alone = await run(plan, targets.flags, online=True, offline=False)
    capped = await run(plan, targets.cap_flags, online=False, offline=True)
    both = await run(plan, targets.flags, online=True, offline=True)
    left = {"share": capped.offline_tokens_per_s, "share_uncapped": ceiling.offline_tokens_per_s}
    ratios = {name: share_of(most, both) for name, most in left.items()}
    met = [attainment(window.records, targets.ttft_s, targets.tpot_s) for window in (both, alone)]
    ttft_p99_s = [percentiles(r.ttft_s for r in window.records).p99 for window in (both, alone)]
    ratios |= {
        "attainment_minus_alone": round(met[0] - met[1], 4),
        "ttft_p99_vs_alone": round(ttft_p99_s[0] / ttft_p99_s[1], 4),
        "ttft_p99_vs_rival": None,
        "offline_vs_rival": None,
    }
    named = {"online alone": alone, "offline, capped": capped, "offline": ceiling, "both": both}
    return {
        "load": load,
        "ratios": ratios,
        "rate_rps": round(plan.rate_rps, 3),
        "targets_ms": {"ttft": round(1e3 * targets.ttft_s, 1), "tpot": round(1e3 * tpot_s, 1)},
        # Steps stay below the cap by the safety margin: a ceiling measured with shorter steps flatters `share`.
        "capped_step_over_cap": round(capped.mean_step_ms / (1e3 * tpot_s), 3),
        "runs": [summary(name, window, targets.ttft_s, tpot_s) for name, window in named.items()],
    }


async def measure(plan: Plan, loads: Sequence[float], repeats: int) -> dict[str, Any]:
    checked = await check(plan)
    print(f"correctness: {checked} tokens agree with transformers", flush=True)
    ceiling = await run(plan, slo_flags(LAX_S, LAX_S), online=False, offline=True)
    print(f"ceiling: {ceiling.offline_tokens_per_s:.0f} tok/s", flush=True)
    results = [
        await measure_load(replace(plan, seed=plan.seed + repeat), load, ceiling)
        for repeat in range(repeats)
        for load in loads
    ]
    headline = [result["ratios"] for result in results if result["load"] == loads[0]]
    ratios = {name: mean_of([one[name] for one in headline]) for name in headline[0]}
    return {"ratios": ratios, "window_s": list(plan.window_s), "checked_tokens": checked, "loads": results}


def mean_of(values: Sequence[float | None]) -> float | None:
    """None if one of them is."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if len(known) == len(values) else None


def print_runs(title: str, runs: list[dict[str, Any]]) -> None:
    """What online and offline requests got in each run."""

    def ms(values: list[float] | None) -> str:
        return "-" if values is None else f"{values[0]:.0f} / {values[2]:.0f}"

    columns = ["run", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "attainment", "failed", "online tok/s", "offline tok/s"]
    rows = [
        [
            r["run"],
            ms(r["ttft_ms"]),
            ms(r["tpot_ms"]),
            "-" if r["attainment"] is None else f"{r['attainment']:.3f}",
            str(r["online_failed"]),
            f"{r['online_tokens_per_s']:.0f}",
            f"{r['offline_tokens_per_s']:.0f}",
        ]
        for r in runs
    ]
    print_table(title, columns, rows)


def print_load(result: dict[str, Any]) -> None:
    print_runs(f"live co-serving, 111M model, load {result['load']}", result["runs"])
    rows = [
        [
            r["run"],
            f"{r['mean_step_ms']:.1f}",
            *(f"{r['phase_ms'][p]:.2f}" for p in PHASES),
            f"{r['prediction_mape']:.3f}",
        ]
        for r in result["runs"]
    ]
    print_table("time of a step, ms", ["run", "step", *PHASES, "prediction MAPE"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 s a run instead of 300, load 0.20 only, no repeat")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    duration_s, window_s = (60.0, (10.0, 55.0)) if args.quick else (300.0, (20.0, 290.0))
    plan = Plan(duration_s, window_s, model_111m(), args.seed)
    result = asyncio.run(measure(plan, LOADS[:1] if args.quick else LOADS, 1 if args.quick else 2))
    for load in result["loads"]:
        print_load(load)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
