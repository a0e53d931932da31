"""Whether ``neaptide observe`` foretells what our scheduler then does inside the same vLLM.

    PYTHONPATH=.:lab:vllm-plugin python -m lab.benchmarks.observe --vllm .vllm/bin/python

For each rate: a plain vLLM serves chats alone while its metrics are recorded; the record is forecast; then vLLM runs
with our scheduler inside, beside a flood of batch lines, under the same chats, which are what a forecast is about
(``--other-chats``: under others of the same rate, whose bursts are not those of the record). Each stage is kept in
``--folder`` and not repeated: after an error or a kill the same command goes on where it was. A stage's figures are in
``STAGE-RATE.json``, what its processes said in ``STAGE-RATE.log``, its error in ``STAGE-RATE.error``. Prints a table,
then one JSON line. ``--smoke`` uses the tiny model for some seconds, which shows only that the stages work.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.plan import OFFLINE_IN, OFFLINE_OUT, ONLINE_IN, ONLINE_OUT, TPOT_OVER_ALONE, TTFT_OVER_TPOT, Plan
from benchmarks.vllm_server import CPU_KV_GIB, FCFS, MAX_MODEL_LEN, Machine, Rival, run_rival, vllm_server
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord, attainment
from neaptide.loadgen.percentiles import percentiles

TINY = Path(__file__).parents[2] / "neaptide" / "data" / "neaptide-tiny"
SLOTS, STEP_TOKENS = 64, 512
CLOSE, CLOSE_POINTS = 0.1, 2.0
"""Largest relative error of TPOT and batch tokens/s, and largest error of the share in time, in points."""
LEAST_CHATS = 400
"""From this many on, a share inside its interval is right as well."""
OPTION = "inside"
RATES, SMOKE_RATES = (1.0, 1.5), (4.0, 8.0)
"""Chats a second. A smoke run's are enough for a forecast."""


def kept(path: Path, make: Callable[[Path], Any]) -> Any:
    """A stage's result, from its file if an earlier run has made it.

    Args:
        path: the result's file. An error is kept beside it, and printed.
        make: makes the result, given the file for what its processes say.
    """
    log, error = path.with_suffix(".log"), path.with_suffix(".error")
    if not path.exists():
        print(f"{path.stem}: begins; its log is {log}", flush=True)
        error.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        try:
            found = make(log)
        except BaseException:
            error.write_text(traceback.format_exc(), encoding="utf-8")
            said = log.read_text(encoding="utf-8", errors="replace")[-3000:] if log.exists() else ""
            print(f"{path.stem}: failed, see {error}\n{said}\n{error.read_text(encoding='utf-8')}", file=sys.stderr)
            raise
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
    return json.loads(path.read_text(encoding="utf-8"))


async def observe(arguments: Sequence[str], log: Path) -> None:
    """Runs ``neaptide observe``. What it says goes to the log."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "neaptide", "observe", *arguments]
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
        if status := await process.wait():
            raise SystemExit(f"neaptide observe ended with {status}")


def tpot_p50_ms(records: Sequence[ChatRecord]) -> float:
    p50_s = percentiles(one.tpot_s for one in records).p50
    if math.isnan(p50_s):
        errors = [one.error for one in records if one.error]
        raise SystemExit(f"none of {len(records)} chats has a TPOT; the first error: {errors[:1]}")
    return 1e3 * p50_s


def limited(rival: Rival) -> Rival:
    flags = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", str(STEP_TOKENS))
    return Rival(rival.name, (*rival.flags, *flags))


def varied_prompts(plan: Plan, count: int) -> list[list[int]]:
    """Prompts of ``ONLINE_IN`` tokens on average, as people's vary: prompts of one length would hide what a token of
    them costs."""
    least = ONLINE_IN // 4
    spread = 2 * (ONLINE_IN - least)
    lengths = [least + spread * number // max(count - 1, 1) for number in range(count)]
    random.Random(plan.seed).shuffle(lengths)
    longest = random_prompts(count, least + spread, vocab_size(plan.model), seed=plan.seed)
    return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]


async def record(plan: Plan, machine: Machine, path: Path, log: Path) -> dict[str, Any]:
    """Chats alone on plain vLLM, recorded from outside. Returns the clients' own figures."""
    arrivals = plan.arrivals_s()
    prompts = varied_prompts(plan, len(arrivals))
    records: list[ChatRecord] = []
    async with (
        vllm_server(machine, plan.model, limited(FCFS), log) as address,
        httpx.AsyncClient(base_url=address, timeout=3600.0, limits=httpx.Limits(max_connections=None)) as http,
        StreamClient.beside(http, "m") as client,
    ):
        flags = ["--record-only", "--out", str(path), "--for", f"{round(plan.duration_s)}s", "--every-s", "0.5"]
        watch = asyncio.create_task(observe([address, *flags], log))
        await open_loop(
            arrivals,
            lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True),
            lambda i, one: records.append(one),
        )
        await watch
    return {"chats": len(records), "tpot_ms": tpot_p50_ms(records)}


async def forecast(path: Path, log: Path, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """What ``neaptide observe`` says of a record."""
    flags = ["--ttft-slo-s", f"{ttft_s:.4f}", "--tpot-slo-s", f"{tpot_s:.4f}", "--max-num-seqs", str(SLOTS)]
    flags += ["--max-num-batched-tokens", str(STEP_TOKENS), "--batch-lengths", str(OFFLINE_IN), str(OFFLINE_OUT)]
    said = path.with_suffix(".forecast.json")
    await observe([str(path), *flags, "--json", str(said), "--html", str(path.with_suffix(".html"))], log)
    found = json.loads(said.read_text(encoding="utf-8"))
    said.unlink()
    (option,) = (one for one in found["forecast"]["options"] if one["name"] == OPTION)
    return {"option": option, "sentence": found["sentence"], "checks": found["checks"], "warnings": found["warnings"]}


async def inside(plan: Plan, machine: Machine, log: Path, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    """Our scheduler in vLLM, beside a flood of batch lines."""
    settings = {"neaptide": {"ttft_ms": 1e3 * ttft_s, "tpot_ms": 1e3 * tpot_s}}
    ours = Rival(OPTION, ("--scheduler-cls", "neaptide_vllm.scheduler", "--additional-config", json.dumps(settings)))
    prompts = varied_prompts(plan, len(plan.arrivals_s()))
    window = await run_rival(plan, machine, limited(ours), offline=True, log=log, prompts=prompts)
    return {
        "chats": len(window.records),
        "in_time": attainment(window.records, ttft_s, tpot_s) if window.records else 0.0,
        "tpot_ms": tpot_p50_ms(window.records),
        "tokens_per_s": window.offline_tokens_per_s,
    }


def compared(rate_rps: float, said: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """A forecast beside what happened."""
    option = said["option"]
    share, rate = option["attainment"], option["batch_tokens_per_s"]
    tpot_error = 1e3 * option["tpot_s"]["p50"] / real["tpot_ms"] - 1.0
    rate_error = rate["value"] / real["tokens_per_s"] - 1.0 if real["tokens_per_s"] else float("inf")
    points = 100 * (share["value"] - real["in_time"])
    is_inside = share["low"] <= real["in_time"] <= share["high"] and real["chats"] >= LEAST_CHATS
    return {
        "rate_rps": rate_rps,
        "chats": real["chats"],
        "in_time": [share["value"], real["in_time"]],
        "tpot_ms": [1e3 * option["tpot_s"]["p50"], real["tpot_ms"]],
        "tokens_per_s": [rate["value"], real["tokens_per_s"]],
        "holds": abs(tpot_error) <= CLOSE and abs(rate_error) <= CLOSE and (abs(points) <= CLOSE_POINTS or is_inside),
    }


def measure(
    plan: Plan, machine: Machine, rates: list[float], folder: Path, *, other_chats: bool
) -> list[dict[str, Any]]:
    rows = []
    for rate_rps in rates:
        at = replace(plan, rate_rps=rate_rps)
        path = folder / f"record-{rate_rps:g}.jsonl"
        real = replace(at, seed=at.seed + other_chats)
        stages = {name: folder / f"{name}-{rate_rps:g}.json" for name in ("alone", "forecast", "inside", "others")}
        alone = kept(stages["alone"], lambda log, at=at, path=path: asyncio.run(record(at, machine, path, log)))
        tpot_s = TPOT_OVER_ALONE * alone["tpot_ms"] / 1e3
        targets = TTFT_OVER_TPOT * tpot_s, tpot_s
        said = kept(
            stages["forecast"], lambda log, path=path, targets=targets: asyncio.run(forecast(path, log, *targets))
        )
        print(said["sentence"], flush=True)
        found = kept(
            stages["others" if other_chats else "inside"],
            lambda log, real=real, targets=targets: asyncio.run(inside(real, machine, log, *targets)),
        )
        rows.append(compared(rate_rps, said, found))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vllm", type=Path, required=True, metavar="PYTHON", help="interpreter with vLLM and our plug-in"
    )
    parser.add_argument("--rates", type=float, nargs="+", help="chats a second (1 1.5; a smoke run: 4 8)")
    parser.add_argument("--duration-s", type=float, default=500.0, help="length of each run (500)")
    parser.add_argument("--offline-lines", type=int, default=3000, help="lines of the flood (3000)")
    parser.add_argument("--other-chats", action="store_true", help="run inside under others than those recorded")
    parser.add_argument("--folder", type=Path, default=Path("observe-proof"), help="where stages are kept")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--smoke", action="store_true", help="the tiny model, for 20 s")
    args = parser.parse_args()
    folder = args.folder / "smoke" if args.smoke else args.folder
    folder.mkdir(parents=True, exist_ok=True)
    rates = args.rates or list(SMOKE_RATES if args.smoke else RATES)
    duration_s = 20.0 if args.smoke else args.duration_s
    model = TINY if args.smoke else model_111m()
    machine = Machine(args.vllm.absolute(), args.threads, "float32", 128, CPU_KV_GIB, True, "cpu", MAX_MODEL_LEN)
    os.environ.update(machine.environment)
    plan = Plan(duration_s, (0.1 * duration_s, 0.95 * duration_s), model, seed=0, offline_lines=args.offline_lines)
    rows = measure(plan, machine, rates, folder, other_chats=args.other_chats)
    cells = [
        [
            f"{row['rate_rps']:g}",
            str(row["chats"]),
            *(f"{said:.1f} / {real:.1f}" for said, real in (row["tpot_ms"], row["tokens_per_s"])),
            f"{row['in_time'][0]:.1%} / {row['in_time'][1]:.1%}",
            "yes" if row["holds"] else "NO",
        ]
        for row in rows
    ]
    heads = ["chats/s", "chats", "TPOT ms, said / real", "batch tokens/s", "in time", "holds"]
    print_table("observe: forecast and reality inside vLLM", heads, cells)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
