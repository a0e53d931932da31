"""What the submission of a batch of 50,000 lines costs the steps of a running engine, and the chats in them.

One real server with a steady load of chats, by turns alone and beside a submission: upload, check, hand-over to the
engine, and under a policy that plans its pool the plan; every second pair goes the other way round. Offline work is
paused, and the chats of five seconds come again and again, in turns that last a whole number of these, so that steps
are made of the same chats at all times: what they take longer the submission has cost, not the lines nor the draw. A
step's time is the step log's, from where its planning begins to its end.

Targets are such that the chats alone hold them: before the first turn the chats of a probe have the server to
themselves, and `TARGET_OVER_PROBE` times the 99th percentile of their time to the first token, and of their time per
further token, is what every later chat asks the server for and is judged by. If less than 99% of the chats alone are in
time all the same, attainment says nothing of a submission, and the run does not hold.

    python -m lab.benchmarks.submission [--lines 50000] [--pairs 4] [--policy blendserve] [--model DIR]

Prints a table, then one JSON line. Exit status 1 unless the machine was still, the chats alone held their targets, the
99th percentile of a step's time rises by at most 10%, and attainment falls by at most a point.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.common import model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.plan import ONLINE_IN, ONLINE_OUT, PATIENCE_S, START_TIMEOUT_S, Targets
from benchmarks.live.run import with_unfinished
from lab.benchmarks.full_load import WORDS
from lab.benchmarks.pairs import differences, ratios
from neaptide.commands.server_process import ServerProcess
from neaptide.engine.record.step_log import BatchLine, Line, OrderLine, StepLine, read_log
from neaptide.engine.scheduler.policies import find_policy
from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch, wait_until_it_runs
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord, attainment
from neaptide.loadgen.percentiles import percentile

STEP_BAR, LOST_BAR = 1.10, 0.01
"""Largest ratio of a step's p99 time, with a submission over alone; largest loss of attainment."""
TARGET_OVER_PROBE, HELD_BAR = 1.5, 0.99
"""A target, in 99th percentiles of the probe; the attainment of the chats alone under which it says nothing."""
HEAD_LINES, HEAD_BYTES, LINE_BYTES = 500, 200, 600
"""Lines that share a head, bytes of that head, and bytes of a line."""
LINE_OUT = 16
WARM_UP_S, DRAIN_S, POLL_S = 10.0, 5.0, 0.2
PERIOD_S = 5.0
"""Period of the chats' arrivals. Every turn lasts whole periods, so that a late chat counts equally in all turns."""
LONGEST_S = 1800.0


class Window(NamedTuple):
    begin_s: float
    end_s: float


class Pair(NamedTuple):
    alone: Window
    beside: Window


@dataclass(slots=True, frozen=True)
class Plan:
    lines: int
    pairs: int
    rate_rps: float
    turn_s: float
    """Duration of chats alone, in whole periods; a submission takes as long as it takes."""
    settle_s: float
    """Least time after the check of a file, in which it is handed over and planned."""
    probe_s: float
    """Duration of chats alone before all turns, from which the targets follow."""


@dataclass(slots=True, frozen=True)
class Measured:
    """All times on the monotonic clock of the machine."""

    targets: Targets
    pairs: Sequence[Pair]
    records: Sequence[ChatRecord]
    """``due_s`` says when."""
    log: Sequence[Line]


def content_of(count: int, seed: int = 1) -> bytes:
    """A batch file of texts of random words."""
    return b"\n".join(_lines(count, random.Random(seed)))


def _lines(count: int, rng: random.Random) -> Iterator[bytes]:
    words, head = WORDS.split(), ""
    for number in range(count):
        if number % HEAD_LINES == 0:
            head = " ".join(rng.choices(words, k=HEAD_BYTES // 3))[:HEAD_BYTES]
        own = " ".join(rng.choices(words, k=(LINE_BYTES - HEAD_BYTES) // 3))[: LINE_BYTES - HEAD_BYTES]
        body = {"model": "m", "prompt": f"{head} {own}", "max_tokens": LINE_OUT}
        yield json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}).encode()


def repeated_arrivals(rate_rps: float, period_s: float, duration_s: float, seed: int) -> list[float]:
    """Poisson arrivals of one period, again and again: which prompts meet in a step is the same in every turn.

    The slowest steps are those in which prompts meet: turns with draws of their own would differ on the stillest of
    machines.
    """
    rng = random.Random(seed)
    pattern = sorted(rng.uniform(0.0, period_s) for _ in range(round(rate_rps * period_s)))
    return [k * period_s + at_s for k in range(math.ceil(duration_s / period_s)) for at_s in pattern]


def whole_periods(duration_s: float) -> float:
    """As long or longer."""
    return PERIOD_S * math.ceil(duration_s / PERIOD_S)


async def measure(plan: Plan, model: Path, flags: Sequence[str]) -> Measured:
    now = asyncio.get_running_loop().time
    arrivals = repeated_arrivals(plan.rate_rps, PERIOD_S, LONGEST_S, seed=0)
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(model), seed=0)
    content = content_of(plan.lines)
    records: list[ChatRecord] = []
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "steps.jsonl")
        flags = [str(model), "--served-model-name", "m", "--shadow", "off", "--step-log", str(log), *flags]
        limits = httpx.Limits(max_connections=None)
        async with (
            ServerProcess(flags, Path(directory), START_TIMEOUT_S) as server,
            httpx.AsyncClient(base_url=server.base_url, timeout=600.0, limits=limits) as http,
            StreamClient.beside(http, "m") as client,
        ):
            (await http.post("/admin/offline", json={"state": "paused"})).raise_for_status()
            began_s = now()
            told: dict[str, float] = {}
            load = asyncio.create_task(
                open_loop(
                    arrivals,
                    lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True, **told),
                    lambda _, record: records.append(record),
                )
            )
            try:
                await asyncio.sleep(WARM_UP_S)
                targets = targets_of(await _probe(plan, records, arrivals, began_s))
                told |= {"ttft_slo_ms": 1e3 * targets.ttft_s, "tpot_slo_ms": 1e3 * targets.tpot_s}
                await asyncio.sleep(PERIOD_S)  # chats that ask for other targets end
                pairs = [await _pair(http, plan, content, index) for index in range(plan.pairs)]
                await asyncio.sleep(DRAIN_S)
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
        records = with_unfinished(records, arrivals)
        for record in records:
            record.due_s = record.due_s or began_s + record.arrival_s
        return Measured(targets, pairs, records, list(read_log(log)))


async def _probe(
    plan: Plan, records: Sequence[ChatRecord], arrivals_s: Sequence[float], began_s: float
) -> Sequence[ChatRecord]:
    """Returns the chats that were due in ``probe_s`` from now, once all have ended. Raises SystemExit if not."""
    now = asyncio.get_running_loop().time
    begin_s = now() - began_s
    end_s = begin_s + plan.probe_s
    due = {at_s for at_s in arrivals_s if begin_s <= at_s < end_s}
    await asyncio.sleep(plan.probe_s)
    while len(found := [record for record in records if record.arrival_s in due]) < len(due):
        if now() - began_s > end_s + PATIENCE_S:
            raise SystemExit("chats alone do not end: try a lower --rate")
        await asyncio.sleep(POLL_S)
    return found


def targets_of(probe: Sequence[ChatRecord]) -> Targets:
    """What chats must hold that take as long as these at the most, with something to spare.

    Raises SystemExit where one failed, or none has a time per token.
    """
    if failed := [record.error for record in probe if record.error is not None]:
        raise SystemExit(f"{len(failed)} chats alone failed: {failed[0]}")
    if not _tpots_ms(probe):
        raise SystemExit("no chat alone has two tokens: try a longer --probe-s")
    ttft_ms, tpot_ms = (TARGET_OVER_PROBE * percentile(of(probe), 0.99) for of in (_ttfts_ms, _tpots_ms))
    return Targets(ttft_ms / 1e3, tpot_ms / 1e3)


async def _pair(http: httpx.AsyncClient, plan: Plan, content: bytes, index: int) -> Pair:
    if index % 2:
        beside = await _submission(http, plan, content)
        return Pair(await _alone(plan), beside)
    alone = await _alone(plan)
    return Pair(alone, await _submission(http, plan, content))


async def _alone(plan: Plan) -> Window:
    begin_s = asyncio.get_running_loop().time()
    await asyncio.sleep(plan.turn_s)
    return Window(begin_s, asyncio.get_running_loop().time())


async def _submission(http: httpx.AsyncClient, plan: Plan, content: bytes) -> Window:
    """Submits the batch, and cancels it afterwards."""
    begin_s = asyncio.get_running_loop().time()
    batch = await wait_until_it_runs(http, await submit_batch(http, "lines.jsonl", content))
    now_s = asyncio.get_running_loop().time()
    window = Window(begin_s, begin_s + whole_periods(now_s + plan.settle_s - begin_s))
    await asyncio.sleep(window.end_s - now_s)
    (await http.post(f"/v1/batches/{batch['id']}/cancel")).raise_for_status()
    while batch["status"] not in TERMINAL:
        await asyncio.sleep(POLL_S)
        batch = await get_batch(http, batch["id"])
    return window


def summary(found: Measured, *, is_planned: bool) -> dict[str, Any]:
    """Raises SystemExit where a submission was over before the engine had all of it."""
    _check_hand_over(found, is_planned)
    alone, beside = [pair.alone for pair in found.pairs], [pair.beside for pair in found.pairs]
    rng = random.Random(0)
    steps = ratios("step_ms", _steps_ms(found.log, alone), _steps_ms(found.log, beside), rng)
    chats = {name: [_chats(found.records, window) for window in windows] for name, windows in _named(alone, beside)}
    ttfts_ms, tpots_ms = (
        {name: [of(turn) for turn in turns] for name, turns in chats.items()} for of in (_ttfts_ms, _tpots_ms)
    )
    targets = found.targets.ttft_s, found.targets.tpot_s
    in_time = {name: [[record.met(*targets) for record in turn] for turn in turns] for name, turns in chats.items()}
    attained = {name: attainment([*chain(*turns)], *targets) for name, turns in chats.items()}
    still = abs(steps["step_p99_ratio_of_halves_alone"] - 1.0) <= STEP_BAR - 1.0
    held = attained["alone"] >= HELD_BAR
    lost = attained["alone"] - attained["beside"]
    return {
        "pairs": len(found.pairs),
        "submission_s": [round(window.end_s - window.begin_s, 1) for window in beside],
        "steps": {name: sum(map(len, _steps_ms(found.log, windows))) for name, windows in _named(alone, beside)},
        "chats": {name: sum(map(len, turns)) for name, turns in chats.items()},
        **steps,
        **ratios("ttft_ms", ttfts_ms["alone"], ttfts_ms["beside"], rng),
        **ratios("tpot_ms", tpots_ms["alone"], tpots_ms["beside"], rng),
        "longest_gap_ms": {name: _longest_gap_ms(turns) for name, turns in chats.items()},
        "targets_ms": {"ttft": 1e3 * found.targets.ttft_s, "tpot": 1e3 * found.targets.tpot_s},
        "attainment": attained,
        "missed": {name: sum(not met for turn in turns for met in turn) for name, turns in in_time.items()},
        **differences("attainment", in_time["alone"], in_time["beside"], rng),
        "is_still": still,
        "alone_holds_its_targets": held,
        "holds": still and held and steps["step_p99_ratio"] <= STEP_BAR and lost <= LOST_BAR,
    }


def _named(alone: Sequence[Window], beside: Sequence[Window]) -> Iterator[tuple[str, Sequence[Window]]]:
    yield from (("alone", alone), ("beside", beside))


def _check_hand_over(found: Measured, is_planned: bool) -> None:
    """Checks that in each window with a submission the engine took in the batch, and its plan if there is one. A plan
    has no time of its own and counts with the next step."""
    taken_s: list[float] = []
    planned_s: list[float] = []
    num_orders = 0
    for line in found.log:
        if isinstance(line, BatchLine):
            taken_s.append(line.now_s)
        elif isinstance(line, OrderLine):
            num_orders += 1
        elif isinstance(line, StepLine) and num_orders:
            planned_s += [line.t[0]] * num_orders
            num_orders = 0
    for pair in found.pairs:
        if not any(_is_in(pair.beside, at_s) for at_s in taken_s):
            raise SystemExit("a submission was over before the engine had its batch: try a longer --settle-s")
        if is_planned and not any(_is_in(pair.beside, at_s) for at_s in planned_s):
            raise SystemExit("a submission was over before the engine had its plan: try a longer --settle-s")


def _is_in(window: Window, at_s: float) -> bool:
    return window.begin_s <= at_s < window.end_s


def _steps_ms(log: Sequence[Line], windows: Sequence[Window]) -> list[list[float]]:
    """Times of the steps inside each window."""
    spans = [(line.t[0], line.t[-1]) for line in log if isinstance(line, StepLine)]
    return [[1e3 * (end - begin) for begin, end in spans if w.begin_s <= begin and end < w.end_s] for w in windows]


def _chats(records: Sequence[ChatRecord], window: Window) -> list[ChatRecord]:
    """Those that were due in it."""
    return [record for record in records if _is_in(window, record.start_s)]


def _ttfts_ms(turn: Sequence[ChatRecord]) -> list[float]:
    return [1e3 * record.ttft_s for record in turn if record.ttft_s is not None]


def _tpots_ms(turn: Sequence[ChatRecord]) -> list[float]:
    return [1e3 * record.tpot_s for record in turn if record.tpot_s is not None]


def _longest_gap_ms(turns: Sequence[Sequence[ChatRecord]]) -> float:
    times = [record.token_times_s for record in chain(*turns)]
    return max((1e3 * (b - a) for one in times for a, b in pairwise(one)), default=0.0)


def _policy(name: str) -> str:
    """The name of a policy that can be used, for a command line."""
    try:
        find_policy(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory; without it the 111M model")
    parser.add_argument("--executor", default="torch", choices=("torch", "sim"))
    parser.add_argument("--policy", default="neaptide", type=_policy)
    parser.add_argument("--threads", type=int, default=1, help="of the engine; a core is left for all the rest")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.0, help="chats per second")
    parser.add_argument("--turn-s", type=float, default=25.0)
    parser.add_argument("--settle-s", type=float, default=4.0, help="behind the check of a file")
    parser.add_argument("--probe-s", type=float, default=30.0, help="of chats alone, which say what the targets are")
    args = parser.parse_args(argv)
    model = args.model or model_111m()
    flags = ["--executor", args.executor, "--policy", args.policy, "--num-threads", str(args.threads)]
    plan = Plan(
        args.lines, args.pairs, args.rate, whole_periods(args.turn_s), args.settle_s, whole_periods(args.probe_s)
    )
    found = asyncio.run(measure(plan, model, flags))
    result = summary(found, is_planned=find_policy(args.policy).planned_order is not None)
    rows = [
        ["steps", *result["steps"].values(), ""],
        ["chats", *result["chats"].values(), ""],
        *(_row(result, "step", q) for q in ("p50", "p99")),
        *(_row(result, name, q) for name in ("ttft", "tpot") for q in ("p50", "p99")),
        ["longest gap between tokens, ms", *(f"{ms:.1f}" for ms in result["longest_gap_ms"].values()), ""],
        [
            "both targets",
            *(f"{share:.2%}" for share in result["attainment"].values()),
            f"{result['attainment_change']:+.2%} ({result['attainment_change_low']:+.2%} to "
            f"{result['attainment_change_high']:+.2%})",
        ],
        ["chats that missed one", *result["missed"].values(), ""],
    ]
    targets = "TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms".format(**result["targets_ms"])
    print_table(f"{args.lines:,} lines, {args.policy}; {targets}", ["", "alone", "beside", "ratio (nine of ten)"], rows)
    print(json.dumps(result | {"lines": args.lines, "policy": args.policy, "rate_rps": args.rate}))
    return 0 if result["holds"] else 1


def _row(result: dict[str, Any], name: str, q: str) -> list[str]:
    ratio = f"{name}_{q}_ratio"
    return [
        f"{name} {q}, ms",
        *(f"{result[f'{name}_{q}_ms_{turn}']:.2f}" for turn in ("alone", "beside")),
        f"{result[ratio]:.3f} ({result[f'{ratio}_low']:.3f} to {result[f'{ratio}_high']:.3f})",
    ]


if __name__ == "__main__":
    sys.exit(main())
