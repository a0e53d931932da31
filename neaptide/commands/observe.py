"""``neaptide observe``: records another server by its metrics, and says what Neaptide would do beside its chats."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from neaptide.commands.client import CommandError, add_key, open_client
from neaptide.commands.outputs import STDOUT, check_writable, print_json, write_json
from neaptide.commands.simulation_flags import progress
from neaptide.durations import window_seconds
from neaptide.estimator.device_profile import DeviceProfile, PlanningCost, load_profile
from neaptide.loadgen.workloads.made_load import Lengths
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.observation import words
from neaptide.observation.figures import ObservedFigures, means_between, observed_figures
from neaptide.observation.forecast import (
    ALONE,
    ROWS,
    ForecastOption,
    ForecastQuestion,
    Sample,
    batch_like,
    batch_of,
    forecast,
    replayed_alone,
)
from neaptide.observation.page import page
from neaptide.observation.polling import Polling, PollingError, record_polls, shown_url
from neaptide.observation.record import RecordError, ServerRecord, is_record, read_record
from neaptide.observation.step_times import EngineLimits, InferredStepTimes, fit_step_times
from neaptide.observation.traffic import traffic_of
from neaptide.observation.words import Facts
from neaptide.simulation.replica import SimulationError
from neaptide.simulation.scenario import Scenario

LEAST_CHATS = 20
"""Fewer say nothing about shares."""
LEAST_EVERY_S = 0.1
DEFAULT_RECORD = Path("observe.jsonl")
FIT_DRAWS = 20
"""Fits for the intervals of costs. They take less time than simulations."""
MAX_DRAWS = 50
WIDTH = 80
"""Columns of the table, on a terminal of any width."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "observe",
        help="record a vLLM server by its metrics, and forecast batch work beside its chats",
        description="Asks a running vLLM server for its metrics and nothing else, infers arrivals, lengths and step "
        "times, and simulates Neaptide beside these chats. Writes one HTML page.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="address of the server, an earlier record, or the name or file of a trace")
    add("--for", dest="for_s", type=_seconds, default=600, metavar="TIME", help="how long to record, such as 2h (10m)")
    add("--every-s", type=float, default=1.0, metavar="X", help="seconds between two looks at the metrics (1)")
    add("--engine", metavar="N", help="which engine of a server with several; vLLM's label")
    add("--out", type=Path, metavar="RECORD", help="the record's file (observe.jsonl)")
    add("--record-only", action="store_true", help="record, and forecast nothing")
    trace_help = "arrivals and lengths of the recorded chats from a trace, such as an access log, not from the metrics"
    add("--trace", metavar="TRACE", help=trace_help)
    add("--profile", metavar="NAME", help="step times of this device profile instead of inferred ones")
    add("--ttft-slo-s", type=float, default=1.0, metavar="X", help="TTFT target in seconds (1)")
    add("--tpot-slo-s", type=float, default=0.05, metavar="X", help="TPOT target in seconds (0.05)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="vLLM's --max-num-seqs (256)")
    tokens_help = "vLLM's --max-num-batched-tokens (2048)"
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help=tokens_help)
    add("--kv-tokens", type=int, metavar="N", help="tokens that the KV cache holds (as the server says)")
    add("--speed", type=float, default=1.0, metavar="X", help="divide arrival times by this: 2 is twice the load (1)")
    batch_help = "batch work: a set, an OpenAI batch file or a trace file (lines as long as the chats)"
    add("--batch", metavar="FILE", help=batch_help)
    lengths_help = "batch lines of these lengths; each is N, uniform:LOW:HIGH or lognormal:MEAN:DEVIATION"
    add("--batch-lengths", nargs=2, metavar=("PROMPT", "ANSWER"), help=lengths_help)
    add("--simulate-s", type=float, default=600.0, metavar="X", help="longest part to simulate, the busiest (600)")
    add("--draws", type=int, default=5, metavar="N", help="repetitions for the intervals (5)")
    add("--attainment", type=float, default=0.9, metavar="X", help="share that replicas must keep in time (0.9)")
    add("--peak-s", type=float, default=300.0, metavar="X", help="length of the peak for replicas, in seconds (300)")
    add("--max-replicas", type=int, default=64, metavar="N", help="largest number of replicas to try (64)")
    add("--seed", type=int, default=0, metavar="N", help="seed of everything random (0)")
    add("--html", type=Path, default=Path("observe.html"), metavar="OUT", help="the page (observe.html)")
    json_help = "write the forecast to this file as one line of JSON; - prints it, also on a terminal"
    add("--json", type=Path, metavar="OUT", help=json_help)
    add_key(parser)
    parser.set_defaults(func=run_command)


def _seconds(text: str) -> int:
    try:
        return window_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if the server cannot be recorded or too little was, or 2 if the command is invalid."""
    try:
        _check(args)
        return _run(args)
    except (PollingError, RecordError, CommandError) as error:
        return _refuse(str(error), 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except (ValueError, SimulationError) as error:
        return _refuse(str(error), 2)


def _refuse(message: str, status: int) -> int:
    print(f"neaptide observe: {message}", file=sys.stderr)
    return status


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError, with one line, for an invalid flag."""
    for name in ("ttft_slo_s", "tpot_slo_s", "speed", "simulate_s", "peak_s"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and finite")
    if not LEAST_EVERY_S <= args.every_s <= args.for_s:
        raise ValueError(f"--every-s must be at least {LEAST_EVERY_S:g}, and at most the time of --for")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_replicas"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if args.kv_tokens is not None and args.kv_tokens < 1:
        raise ValueError("--kv-tokens must be at least 1")
    if not 0 <= args.draws <= MAX_DRAWS:
        raise ValueError(f"--draws must be from 0 to {MAX_DRAWS}")
    if args.seed < 0:
        raise ValueError("--seed must be at least 0")
    if not 0.0 < args.attainment <= 1.0:
        raise ValueError("--attainment must be above 0 and at most 1")
    if args.batch is not None and args.batch_lengths is not None:
        raise ValueError("--batch and --batch-lengths exclude each other")
    if not _is_url(args.source) and (args.record_only or args.out is not None or args.engine is not None):
        raise ValueError("--out, --record-only and --engine need the address of a server")
    if _is_url(args.source) and args.out is None:
        args.out = DEFAULT_RECORD
    for path in (args.json, args.out, None if args.record_only else args.html):
        if path is not None:
            check_writable(path)
    if STDOUT in (args.out, args.html):
        raise ValueError("a record and a page are written to files, not to -")
    if args.batch_lengths is not None:
        for text in args.batch_lengths:
            Lengths.parse(text)
    if args.batch is not None:
        load_offline(args.batch, args.seed)
    if args.profile is not None:
        load_profile(args.profile)


def _run(args: argparse.Namespace) -> int:
    if not _is_url(args.source):
        return _forecast(args, read_record(Path(args.source)) if _is_record(args.source) else None)
    _record(args)
    return 0 if args.record_only else _forecast(args, read_record(args.out))


def _is_record(source: str) -> bool:
    path = Path(source)
    return path.is_file() and is_record(path)


def _record(args: argparse.Namespace) -> None:
    """Polls the server into a file, with a progress bar on a terminal."""
    args.server = args.source
    what = Polling(args.source, args.every_s, args.for_s, args.engine)
    shown = shown_url(args.source)
    with open_client(args) as client, progress(f"recording {shown}", says_so=True) as bar:
        started_s = time.monotonic()
        count = record_polls(client, what, args.out, on_poll=lambda at_s: bar and bar(at_s, args.for_s))
        took_s = time.monotonic() - started_s
    said = f"{count:,} looks at {shown} in {took_s:.0f} s are in {args.out}"
    print(f"neaptide observe: {said}", file=sys.stderr)


# ---- forecast ----


def _forecast(args: argparse.Namespace, record: ServerRecord | None) -> int:
    given = load_profile(args.profile) if args.profile is not None else None
    if record is None and given is None:
        raise ValueError(f"{args.source} is a trace, which says nothing of step times: add --profile")
    kv_tokens, block_size, kv_source = _memory(args, record, given)
    times = None
    if record is not None and given is None:
        shape = EngineLimits(args.max_num_batched_tokens, kv_tokens)
        times = fit_step_times(record, shape, max(args.draws, FIT_DRAWS), args.seed)
    source = args.trace or (args.source if record is None else None)
    num_draws = args.draws if source is None or times is not None else 0  # draws of given things are all alike
    samples = [
        Sample(_requests(args, record, source, k), _profile(given, times, k, kv_tokens, block_size))
        for k in range(num_draws + 1)
    ]
    if len(samples[0].requests) < LEAST_CHATS:
        raise RecordError(
            f"{len(samples[0].requests)} chats are too few for a forecast: {LEAST_CHATS} are needed, 400 are good"
        )
    observed = None
    if record is not None:
        observed = observed_figures(record, traffic_of(record, args.seed), args.ttft_slo_s, args.tpot_slo_s)
    facts = _facts(args, record, samples, observed, times, given, (kv_tokens, kv_source))
    line = json.dumps(_json(args, facts), allow_nan=False)
    args.html.write_text(page(facts), encoding="utf-8")
    write_json(line, args.json)
    _show(facts)
    print(f"neaptide observe: the page is {args.html}", file=sys.stderr)
    print_json(line, args.json)
    return 0


def _facts(
    args: argparse.Namespace,
    record: ServerRecord | None,
    samples: list[Sample],
    observed: ObservedFigures | None,
    times: InferredStepTimes | None,
    given: DeviceProfile | None,
    memory: tuple[int, str],
) -> Facts:
    batch, said = _batch(args, samples[0].requests)
    base = Scenario(
        profile=samples[0].profile,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        block_size=samples[0].profile.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        seed=args.seed,
        # If all steps took what is predicted, our policy would leave no margin, and pace streams too slowly.
        step_noise=times.scatter if times is not None else 0.0,
    )
    question = ForecastQuestion(
        base=base,
        samples=samples,
        batch=batch,
        error=times.error if times is not None and math.isfinite(times.error) else 0.0,
        simulate_s=args.simulate_s,
        attainment=args.attainment,
        peak_s=args.peak_s,
        max_replicas=args.max_replicas,
    )
    if record is not None and observed is not None:
        question = replace(question, overhead_s=_overhead_s(args, record, question, observed.overhead_s))
    found = forecast(question, lambda name: progress(name, says_so=True))
    simulated = None
    if record is not None and args.trace is None and args.speed == 1.0:
        simulated = means_between(record, found.start_s, found.start_s + found.simulated_s)
    return Facts(
        source=args.source if record is None else record.header.server,
        model=samples[0].profile.model,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        speed=args.speed,
        batch=said,
        profile=None if given is None else given.name,
        kv_tokens=memory[0],
        kv_source=memory[1],
        observed=observed,
        draws_traffic=record is not None and args.trace is None,
        simulated=simulated,
        times=times,
        forecast=found,
    )


def _overhead_s(args: argparse.Namespace, record: ServerRecord, question: ForecastQuestion, outside_s: float) -> float:
    """By how much recorded TTFTs are longer than simulated ones; at most what is outside of vLLM's queue and steps.

    A part of that is simulated as well: the wait for the step that runs when a request comes.
    """
    chats = Sample(traffic_of(record, args.seed).requests, question.samples[0].profile)
    replay = replayed_alone(
        replace(question, samples=[chats]), lambda name: progress("replaying the record", says_so=True)
    )
    recorded_s = means_between(record, replay.start_s, replay.end_s).ttft_s
    if recorded_s is None or replay.mean_ttft_s is None:
        return outside_s
    return min(max(recorded_s - replay.mean_ttft_s, 0.0), outside_s)


def _memory(args: argparse.Namespace, record: ServerRecord | None, given: DeviceProfile | None) -> tuple[int, int, str]:
    """Tokens of the KV cache, its block size, and who says so."""
    labels = record.header.labels if record is not None else {}
    blocks, size = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    block_size = int(size) if size.isdecimal() and 0 < int(size) <= 1 << 20 else 16
    if args.kv_tokens is not None:
        return max(args.kv_tokens, block_size), block_size, "as you say"
    if blocks.isdecimal() and 0 < int(blocks) < 1 << 40:
        return int(blocks) * block_size, block_size, "as the server says"
    if given is not None:
        return given.kv_capacity_tokens, given.block_size, "as the profile says"
    raise RecordError("the server does not say how large its KV cache is: add --kv-tokens")


def _profile(
    given: DeviceProfile | None, times: InferredStepTimes | None, draw: int, kv_tokens: int, block_size: int
) -> DeviceProfile:
    if times is None:
        assert given is not None
        profile = given.in_blocks_of(block_size)
        return msgspec.structs.replace(profile, num_blocks=max(kv_tokens // block_size, 1))
    return DeviceProfile(
        name="observed",
        source="measured",
        device="observed",
        model="observed",
        dtype="",
        date="",
        commit="",
        kv_bytes_per_token=1,
        num_blocks=max(kv_tokens // block_size, 1),
        block_size=block_size,
        # Planning is part of the recorded step times.
        planning=PlanningCost(),
        costs=times.step_costs(times.draws[draw - 1] if draw else None),
    )


def _requests(
    args: argparse.Namespace, record: ServerRecord | None, trace: str | None, draw: int
) -> list[TraceRequest]:
    """The chats of the best guess, or of a draw."""
    if trace is not None:
        return online_requests(trace, args.seed, speed=args.speed)
    assert record is not None
    found = traffic_of(record, args.seed + draw).requests
    return [replace(request, arrival_s=request.arrival_s / args.speed) for request in found]


def _batch(args: argparse.Namespace, chats: Sequence[TraceRequest]) -> tuple[OfflineSet, str]:
    """The batch, and what its lines are in words."""
    if args.batch is not None:
        return load_offline(args.batch, args.seed), f"those of {args.batch}"
    if args.batch_lengths is not None:
        rng = np.random.default_rng([0xBA7C, args.seed])
        prompts, answers = (Lengths.parse(text).draw(rng, ROWS) for text in args.batch_lengths)
        lengths = list(zip(prompts, answers, strict=True))
        said = " and ".join(args.batch_lengths)
        return batch_of("lengths", lengths), f"of {said} tokens (prompt and answer)"
    return batch_like(chats, args.seed), "as long as the chats"


def _json(args: argparse.Namespace, facts: Facts) -> dict[str, Any]:
    times = facts.times
    return {
        "source": facts.source,
        "sentence": words.sentence(facts),
        "targets_s": {"ttft": facts.ttft_slo_s, "tpot": facts.tpot_slo_s},
        "speed": facts.speed,
        "seed": args.seed,
        "batch": facts.batch,
        "profile": facts.profile,
        "kv_tokens": facts.kv_tokens,
        "observed": msgspec.to_builtins(facts.observed),
        "step_times": None
        if times is None
        else {
            "costs_s": times.costs,
            "interval_s": times.spread,
            "error": times.error if math.isfinite(times.error) else None,
            "rows": times.rows,
            "most_streams": times.most_streams,
        },
        "forecast": msgspec.to_builtins(facts.forecast),
        "checks": msgspec.to_builtins(words.checks(facts)),
        "warnings": list(words.warnings(facts)),
        "assumptions": list(words.assumptions(facts)),
        "falsifiers": list(words.falsifiers(facts)),
    }


def _show(facts: Facts) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False)
    console.print(words.sentence(facts), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", overflow="fold")
    for column in ("chats in\ntime%", "\n90%", "batch\ntok/s", "\n90%", "TTFT ms\np50/p99", "TPOT ms\np50/p99"):
        table.add_column(column, justify="right", no_wrap=True)
    for option in facts.forecast.options:
        table.add_row(words.option_name(facts, option), *_cells(option))
    console.print(table)
    for warning in words.warnings(facts):
        console.print(f"- {warning}", soft_wrap=True)


def _cells(option: ForecastOption) -> list[str]:
    attained, rate = option.attainment, option.batch_tokens_per_s
    interval = f"{rate.low:,.0f}-{rate.high:,.0f}" if words.has_interval(rate) else "-"
    cells = [f"{100 * attained.value:.1f}", f"{100 * attained.low:.1f}-{100 * attained.high:.1f}"]
    cells += ["-", "-"] if option.name == ALONE else [f"{rate.value:,.0f}", interval]
    for values in (option.ttft_s, option.tpot_s):
        cells.append("/".join("-" if v is None else f"{1e3 * v:.0f}" for v in (values["p50"], values["p99"])))
    return cells
