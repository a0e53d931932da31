"""Flags of ``neaptide loadgen``, and the load and run settings that they select."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from neaptide.commands.outputs import JSON_HELP
from neaptide.loadgen.client.batches import endpoint_of
from neaptide.loadgen.run.load import Cancelling, Shot, Target, make_shots
from neaptide.loadgen.run.runner import How, Users
from neaptide.loadgen.workloads.made_load import SHAPES, Arrivals, Lengths, PrefixSharing, made_load
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest, salted, window_of

DEFAULT_TARGET = "1000:100"
ENDPOINTS = ("chat", "completions")


def add_trace(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add = parser.add_argument
    about = "name of a recorded trace or synthetic set, or a trace file"
    if required:
        add("trace", metavar="TRACE", help=about)
    else:
        add("--trace", metavar="TRACE", help=f"{about}; without it the load is synthetic, as by synth")
    add("--speed", type=float, default=1.0, metavar="X", help="divide arrival times by this: 2 is twice the load (1)")
    add("--window", metavar="A:B", help="part of the trace to use, in its own seconds (all)")
    add("--max-input-tokens", type=int, metavar="N", help="leave out longer prompts")


def add_synth(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--arrivals", choices=SHAPES, default="poisson", help="arrival process (poisson)")
    add("--rate", type=float, default=1.0, metavar="R", help="mean requests per second (1)")
    add("--duration", type=float, default=60.0, metavar="S", help="seconds in which requests arrive (60)")
    add("--cv", type=float, default=3.0, metavar="X", help="gamma: standard deviation of the gaps over their mean (3)")
    add("--on-s", type=float, default=10.0, metavar="S", help="on-off: seconds with requests (10)")
    add("--off-s", type=float, default=20.0, metavar="S", help="on-off: seconds without requests (20)")
    length_help = "tokens: N, uniform:LOW:HIGH or lognormal:MEAN:DEVIATION"
    add("--input-tokens", default="128", metavar="LENGTHS", help=f"{length_help} (128)")
    add("--output-tokens", default="32", metavar="LENGTHS", help=f"{length_help} (32)")
    add("--prefixes", type=int, default=0, metavar="N", help="number of shared prefixes that prompts begin with (0)")
    add("--prefix-tokens", type=int, default=64, metavar="N", help="with --prefixes: length of each (64)")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Flags for every kind of load."""
    add = parser.add_argument
    add("--model", metavar="ID", help="model to use (the first that the server lists)")
    add("--endpoint", choices=ENDPOINTS, default="chat", help="chat or text completions (chat)")
    target_help = "latency targets of the report; several have shares: 300:50@0.8, then 2000:200@0.2"
    add("--target", action="append", metavar="TTFT_MS:TPOT_MS[@SHARE]", help=f"{target_help} ({DEFAULT_TARGET})")
    add(
        "--send-targets",
        action="store_true",
        help="also send the targets to the server, as ttft_slo_ms and tpot_slo_ms (Neaptide)",
    )
    add(
        "--users",
        type=int,
        metavar="N",
        help="closed loop with this many users, each of whom waits for its answer (open loop)",
    )
    add(
        "--think-s",
        type=float,
        default=0.0,
        metavar="S",
        help="with --users: seconds from an answer to the next request (0)",
    )
    add("--cancel-share", type=float, default=0.0, metavar="X", help="share of requests that the client cancels (0)")
    add(
        "--cancel-within-s",
        type=float,
        default=5.0,
        metavar="S",
        help="with --cancel-share: cancel within this many seconds (5)",
    )
    add("--batch", type=Path, metavar="FILE", help="an OpenAI batch file, submitted before the first request")
    add("--keep-batch", action="store_true", help="do not cancel the batch at the end")
    end_help = "let the model end its answers; by default ignore_eos forces the recorded lengths"
    add("--natural-end", action="store_true", help=end_help)
    add("--body", metavar="JSON", help='more fields for every request, such as {"service_tier": "flex"}')
    add("--warm-up-s", type=float, default=0.0, metavar="S", help="do not count requests of the first seconds (0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of everything random (0)")
    salt_help = "change the words of all prompts, so that a second run finds nothing in the prefix cache"
    add("--salt", metavar="TEXT", help=salt_help)
    add("--api-key", metavar="KEY", help="key to send (NEAPTIDE_API_KEY)")
    add("--html", type=Path, default=Path("loadgen.html"), metavar="OUT", help="the report (loadgen.html)")
    add("--json", type=Path, metavar="OUT", help=JSON_HELP)
    add("--records", type=Path, metavar="OUT", help="also write every request's times to this file, as JSON lines")


def requests_of(args: argparse.Namespace) -> list[TraceRequest]:
    """The requests of a trace, or synthetic ones. Raises ValueError with one line."""
    if args.trace is None:
        arrivals = Arrivals(args.rate, args.duration, args.arrivals, args.cv, args.on_s, args.off_s)
        if args.prefixes < 0 or args.prefix_tokens < 1:
            raise ValueError("--prefixes must be at least 0, and --prefix-tokens at least 1")
        inputs, outputs = Lengths.parse(args.input_tokens), Lengths.parse(args.output_tokens)
        return made_load(arrivals, inputs, outputs, args.seed, PrefixSharing(args.prefixes, args.prefix_tokens))
    requests = online_requests(
        args.trace,
        args.seed,
        window_s=window_of(args.window, "--window"),
        speed=args.speed,
        max_input_tokens=args.max_input_tokens,
    )
    if not requests:
        raise ValueError(f"--max-input-tokens excludes every request of {args.trace}: raise it")
    return requests


def shots_of(args: argparse.Namespace) -> list[Shot]:
    """The requests with their targets and cancellations. Raises ValueError with one line."""
    if not 0.0 <= args.cancel_share <= 1.0:
        raise ValueError("--cancel-share must be from 0 to 1")
    if not 0.0 < args.cancel_within_s < math.inf:
        raise ValueError("--cancel-within-s must be positive")
    targets = [Target.parse(text) for text in args.target or [DEFAULT_TARGET]]
    cancelling = Cancelling(args.cancel_share, args.cancel_within_s)
    if not 0.0 <= args.warm_up_s < math.inf:
        raise ValueError("--warm-up-s must be at least 0")
    requests = requests_of(args)
    if args.users is None and args.warm_up_s > requests[-1].arrival_s:
        raise ValueError(f"--warm-up-s excludes every request: the last one arrives at {requests[-1].arrival_s:.1f} s")
    if args.salt is not None:
        requests = salted(requests, args.salt)
    return make_shots(requests, targets, cancelling, args.seed)


def how_of(args: argparse.Namespace) -> How:
    """The run settings. Raises ValueError with one line, and OSError if the batch file cannot be read."""
    if args.users is not None and args.users < 1:
        raise ValueError("--users must be at least 1")
    if not 0.0 <= args.think_s < math.inf:
        raise ValueError("--think-s must be at least 0")
    return How(
        is_chat=args.endpoint == "chat",
        model=args.model,
        users=None if args.users is None else Users(args.users, args.think_s),
        ignores_end=not args.natural_end,
        sends_targets=args.send_targets,
        fields=_fields(args.body),
        batch=None if args.batch is None else _batch(args.batch),
        keeps_batch=args.keep_batch,
    )


def _fields(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("--body is not a JSON object")
    return fields


def _batch(path: Path) -> tuple[str, bytes]:
    content = path.read_bytes()
    try:
        endpoint_of(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return path.name, content
