"""Flags of load, targets and limits that the simulating commands share, and their progress bar."""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from neaptide.cluster.autoscaling import Scale
from neaptide.cluster.routing import ROUTERS
from neaptide.cluster.simulation.fleet import PLACEMENTS, SimulatedFleet
from neaptide.engine.config import SchedulerConfig
from neaptide.estimator.device_profile import DeviceProfile, profile_names
from neaptide.estimator.recipes import DEFAULT_HEADROOM, HEADROOM_KINDS, check_headroom
from neaptide.loadgen.workloads.offline_sets import OfflineSet, arriving, load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest, window_of
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress

DEFAULT_PROFILE = "h100-80g-llama-3.1-8b"
MAX_NOISE = 1.0
"""Upper bound: no machine's steps typically vary by a factor of e."""
MAX_PLANNING_SCALE = 1000.0
MAX_HOST_CACHE_GIB = 1e6


def profile_help(said: str) -> str:
    """Help of ``--profile``, with the default and the names of the built-in profiles."""
    return f"{said} ({DEFAULT_PROFILE}); built in are {', '.join(profile_names())}"


def add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--online",
        default="none",
        metavar="TRACE",
        help="online load: the name of a trace or synthetic set, a trace file, or none",
    )
    add("--online-window", metavar="A:B", help="part of the trace to use, in its own seconds (all)")
    add("--speed", type=float, default=1.0, metavar="X", help="divide arrival times by this: 2 is twice the load (1)")
    add(
        "--offline",
        nargs="+",
        default=["none"],
        metavar="FILE",
        help="offline load: names of sets, OpenAI batch files, trace files, or none",
    )
    add("--keep-order", action="store_true", help="do not shuffle bundled offline sets; files keep their order")
    add("--ttft-slo-s", type=float, default=1.0, metavar="X", help="TTFT target in seconds (1)")
    add("--tpot-slo-s", type=float, default=0.05, metavar="X", help="TPOT target in seconds (0.05)")
    add("--seed", type=int, default=0, metavar="N", help="seed of everything random (0)")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Flags of the device and the engine."""
    add = parser.add_argument
    add(
        "--overlap-kappa",
        type=float,
        default=1.0,
        metavar="K",
        help="overlap of compute and memory: 0 full, 1 none (1)",
    )
    add(
        "--overlap-depth",
        type=int,
        default=0,
        choices=(0, 1),
        help="1: plan the next step while one runs, as on a GPU (0)",
    )
    add("--block-size", type=int, default=16, metavar="N", help="tokens per KV block (16)")
    add(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="largest number of requests in the KV cache at once (256)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="largest number of tokens of a step (2048)",
    )
    add("--max-tokens", type=int, metavar="N", help="max_tokens of every request (the rest of the context)")
    add(
        "--max-model-len",
        type=int,
        default=131_072,
        metavar="N",
        help="largest number of prompt and output tokens of a request (131072)",
    )
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="X",
        help="random spread of step times: standard deviation of their logarithm (0)",
    )
    price_help = "seconds of offline work that one online request in time is worth (1.5)"
    add("--late-price-s", type=float, default=SchedulerConfig().late_price_s, metavar="X", help=price_help)
    planning_help = "factor on the profile's planning time; 0: planning takes no time (1)"
    add("--planning-scale", type=float, default=1.0, metavar="X", help=planning_help)
    host_help = "host memory for evicted KV blocks (0)"
    add("--host-cache-gib", type=float, default=0.0, metavar="GIB", help=host_help)
    headroom_help = f"forecast of online memory: {', '.join(HEADROOM_KINDS)}, or NAME@PERCENT ({DEFAULT_HEADROOM})"
    add("--headroom", default=DEFAULT_HEADROOM, metavar="NAME", help=headroom_help)


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Flags of a cluster."""
    add = parser.add_argument
    add("--replicas", type=int, default=1, metavar="N", help="number of replicas behind a router (1)")
    add("--router", metavar="NAME", help=f"how requests go to replicas: {', '.join(ROUTERS)} (slack)")
    placement_help = "offline rows are leased from one pool, or divided among replicas at the start (claims)"
    add("--placement", metavar="HOW", help=f"{', '.join(PLACEMENTS)}: {placement_help}")
    lost_help = "times at which the oldest replica fails; another one is started"
    add("--lose-at", type=float, nargs="+", metavar="S", help=lost_help)
    scale_help = "change the number of replicas with online load and batch deadlines (off)"
    add("--autoscale", metavar="MIN:MAX", help=scale_help)
    add("--start-up-s", type=float, metavar="X", help="seconds from a replica's start until it serves (60)")
    add(
        "--deadline-s",
        type=float,
        metavar="X",
        help="deadline of every offline job, in seconds from its submission (none)",
    )


def fleet_of(args: argparse.Namespace) -> SimulatedFleet | None:
    """The fleet; None if one engine is simulated. Raises ValueError, with one line, for an invalid fleet."""
    given = {
        "router": args.router,
        "placement": args.placement,
        "lost_at_s": None if args.lose_at is None else tuple(args.lose_at),
        "start_up_s": args.start_up_s,
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.replicas == 1 and args.autoscale is None:
        if fields:
            raise ValueError("--router, --placement, --lose-at and --start-up-s need --replicas or --autoscale")
        return None
    if any(not 0.0 <= at_s < math.inf for at_s in fields.get("lost_at_s", ())):
        raise ValueError("--lose-at must be at least 0")
    if args.autoscale is not None:
        match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", args.autoscale)
        if match is None:
            raise ValueError(f"--autoscale must be MIN:MAX replicas, such as 1:8, not {args.autoscale!r}")
        fields["scale"] = Scale(int(match[1]), int(match[2]))
    return SimulatedFleet(replicas=args.replicas, **fields)


def check_flags(args: argparse.Namespace) -> None:
    """Raises ValueError, with one line, for an invalid number."""
    for name in ("speed", "ttft_slo_s", "tpot_slo_s", "block_size"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and finite")
    if args.seed < 0:
        raise ValueError("--seed must be at least 0")
    if not 0.0 <= args.overlap_kappa <= 1.0:
        raise ValueError("--overlap-kappa must be from 0 to 1")
    for name in ("max_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0.0 <= args.noise < MAX_NOISE:
        raise ValueError(f"--noise must be at least 0 and below {MAX_NOISE:g}")
    if not 0.0 <= args.late_price_s < math.inf:
        raise ValueError("--late-price-s must be at least 0 and finite")
    if not 0.0 <= args.planning_scale < MAX_PLANNING_SCALE:
        raise ValueError(f"--planning-scale must be at least 0 and below {MAX_PLANNING_SCALE:g}")
    if not 0.0 <= args.host_cache_gib <= MAX_HOST_CACHE_GIB:
        raise ValueError(f"--host-cache-gib must be between 0 and {MAX_HOST_CACHE_GIB:g}")
    check_headroom(args.headroom)
    if "none" in args.offline and len(args.offline) > 1:
        raise ValueError("--offline none cannot be combined with other sets")


def online_of(args: argparse.Namespace) -> list[TraceRequest]:
    """The online requests. Raises ValueError if the flags select no trace, or none of its requests."""
    if args.online == "none":
        if args.online_window is not None:
            raise ValueError("--online-window needs --online")
        return []
    online = online_requests(
        args.online, args.seed, window_s=window_of(args.online_window, "--online-window"), speed=args.speed
    )
    if not online:
        raise ValueError(f"no request of {args.online} lies in the window")
    return online


def offline_of(args: argparse.Namespace, arrivals: str | None = None) -> list[OfflineSet]:
    """The offline sets. ``arrivals`` is ROWS@SECONDS or ``recorded``; without it all rows arrive at once.

    Raises ValueError if a set does not exist, or cannot arrive that way.
    """
    specs = [spec for spec in args.offline if spec != "none"]
    if arrivals is None:
        return [_set_of(spec, args) for spec in specs]
    if not specs:
        raise ValueError("--offline-arrivals needs --offline")
    if arrivals == "recorded":
        return [load_offline(spec, args.seed, recorded_arrivals=True) for spec in specs]
    rows, seconds = _rows_and_seconds(arrivals)
    return [arriving(_set_of(spec, args), rows, seconds) for spec in specs]


def _set_of(spec: str, args: argparse.Namespace) -> OfflineSet:
    """The set. A server takes the lines of a file in their order; those of a bundled set are shuffled."""
    return load_offline(spec, args.seed, args.keep_order or Path(spec).is_file())


def _rows_and_seconds(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"([1-9]\d*)@(\d+\.?\d*|\.\d+)", text)
    if match is None or float(match[2]) == 0.0:
        raise ValueError(f"--offline-arrivals must be ROWS@SECONDS, such as 100@60, or recorded, not {text!r}")
    return int(match[1]), float(match[2])


def scenario_of(
    args: argparse.Namespace,
    profile: DeviceProfile,
    online: Sequence[TraceRequest] = (),
    offline: Sequence[OfflineSet] = (),
) -> Scenario:
    """The scenario under the default policy."""
    return Scenario(
        profile=profile,
        online=online,
        offline=offline,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        overlap_kappa=args.overlap_kappa,
        overlap_depth=args.overlap_depth,
        planning_scale=args.planning_scale,
        block_size=args.block_size,
        seed=args.seed,
        keep_order=args.keep_order,
        step_noise=args.noise,
        headroom=args.headroom,
        late_price_s=args.late_price_s,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_output_tokens=args.max_tokens,
        host_cache_bytes=int(args.host_cache_gib * (1 << 30)),
    )


@contextmanager
def progress(name: str, *, says_so: bool = False) -> Iterator[OnProgress | None]:
    """A progress bar on a terminal's stderr; elsewhere one line if ``says_so``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        if says_so:
            print(name, file=sys.stderr, flush=True)
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(name)
        yield lambda done, total: bars.update(task, completed=done, total=total)
