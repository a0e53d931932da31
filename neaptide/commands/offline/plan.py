"""``neaptide offline-plan``: plans the order of offline work and reports how much prefixes are shared."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neaptide.commands.outputs import check_writable
from neaptide.commands.simulation_flags import DEFAULT_PROFILE, profile_help
from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.offline.planning.lengths import PRIOR_OUTPUT_TOKENS
from neaptide.engine.offline.planning.plan import ORDERS, PromptPool, find_order, plan_pool
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.traces import TraceRequest, numbered_jsonl
from neaptide.simulation.pools.planned import pool_of, prompts_of, true_outputs
from neaptide.simulation.pools.prefix_cache import Eviction, cached_tokens, sharing, windowed_density
from neaptide.simulation.result import peak_memory_bytes

WINDOWS = 10
"""Windows of equal work per order, to show whether its density is even."""
MAX_REPLICAS = 1024


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "offline-plan", help="order batch files in advance, and say how much prefix sharing saves"
    )
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="OpenAI batch files, or offline sets by name")
    add("--profile", default=DEFAULT_PROFILE, metavar="NAME", help=profile_help("device profile, by name or file"))
    policy_help = f"order to plan: {', '.join(ORDERS)}, another package's, or your own as module:function (neaptide)"
    add("--policy", default="neaptide", metavar="P", help=policy_help)
    add("--replicas", type=int, default=1, metavar="R", help="number of replicas to divide the work among (1)")
    add(
        "--order",
        type=Path,
        metavar="OUT.txt",
        help="write the order, one custom_id per line; OUT.0.txt and so on for replicas",
    )
    add("--json", type=Path, metavar="OUT.json", help="also write the result to this file")
    parser.set_defaults(func=run_command)


@dataclass(slots=True, frozen=True)
class Input:
    custom_ids: list[str]
    requests: list[TraceRequest]
    output_tokens: FloatArray
    """As far as they are known before the first run."""


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command fails."""
    try:
        found = _planned(args)
        line = json.dumps(found, allow_nan=False)
        if args.json is not None:
            args.json.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _refuse(str(error))
    print(line)
    return 0


def _refuse(message: str) -> int:
    print(f"neaptide offline-plan: {message}", file=sys.stderr)
    return 2


def _planned(args: argparse.Namespace) -> dict[str, Any]:
    find_order(args.policy)
    if not 1 <= args.replicas <= MAX_REPLICAS:
        raise ValueError(f"--replicas must be 1 to {MAX_REPLICAS}")
    profile = load_profile(args.profile)
    targets = [] if args.order is None else order_paths(args.order, args.replicas)
    for path in [*targets, *([] if args.json is None else [args.json])]:
        check_writable(path)
    inputs = [_read(name) for name in args.input]
    custom_ids = [custom_id for one in inputs for custom_id in one.custom_ids]
    _check_ids(custom_ids)
    requests = [request for one in inputs for request in one.requests]
    prompts = prompts_of([one.requests for one in inputs])
    started_s = time.perf_counter()
    pool = pool_of(requests, profile, np.concatenate([one.output_tokens for one in inputs]), prompts)
    orders = plan_pool(pool, args.policy, args.replicas)
    planning_s = time.perf_counter() - started_s
    for path, rows in zip(targets, orders, strict=bool(targets)):
        path.write_text("".join(f"{custom_ids[row]}\n" for row in rows.tolist()), encoding="utf-8")
    settings = {"policy": args.policy, "profile": profile.name, "inputs": args.input}
    return (
        settings
        | describe(pool, orders, profile)
        | {
            "planning_s": planning_s,
            "peak_memory_bytes": peak_memory_bytes(),
        }
    )


def order_paths(path: Path, num_replicas: int) -> list[Path]:
    if num_replicas == 1:
        return [path]
    return [path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(num_replicas)]


def describe(pool: PromptPool, orders: Sequence[IntArray], profile: DeviceProfile) -> dict[str, Any]:
    """Describes the pool and the orders.

    Sharing is counted by an LRU cache of the device's size, one per replica, not by the planner.
    """
    lengths, outputs = pool.work.prompt_tokens, pool.work.output_tokens
    total = int(lengths.sum())
    block_size = profile.block_size
    most = _most_cached(lengths, block_size)
    found = [
        np.minimum(cached_tokens(pool.tree, lengths, rows, pool.kv_tokens, Eviction.LRU, block_size), most[rows])
        for rows in orders
    ]
    replicas, windows = [], list[float]()
    for rows, hits in zip(orders, found, strict=True):
        compute_s = pool.work.compute_s[rows] * (1.0 - hits / (lengths + outputs)[rows])
        memory_s = pool.work.memory_s[rows]
        windows += windowed_density(compute_s, memory_s, WINDOWS)
        times = {"compute_s": float(compute_s.sum()), "memory_s": float(memory_s.sum())}
        replicas.append({"requests": len(rows), **times, "sharing": sharing(lengths[rows], hits)})
    num_shared = int(np.minimum(pool.shared_tokens, most[pool.tree.rows]).sum())
    bound = num_shared / total if total else 0.0
    unshared_s = pool.work.compute_s.sum() * (1.0 - num_shared / (total + outputs.sum()))
    return {
        "requests": len(lengths),
        "tokens": total,
        "tree": {"nodes": len(pool.tree.parent), "depth": pool.tree.num_levels},
        "sharing": {
            "bound": bound,
            "order": sum(int(hits.sum()) for hits in found) / total if total else 0.0,
            "capacity_tokens": pool.kv_tokens,
        },
        "density": {"root": float(unshared_s / pool.work.memory_s.sum()), "windows": windows},
        "groups": sum(pool.num_runs(rows) for rows in orders),
        "replicas": replicas,
    }


def _most_cached(lengths: IntArray, block_size: int) -> IntArray:
    """[rows] Cached tokens that an engine uses of a fully cached prompt: the block of its last token is always
    computed."""
    found: IntArray = np.maximum(lengths - 1, 0) // block_size * block_size
    return found


def _read(name: str) -> Input:
    """Reads an input. Raises ValueError or OSError."""
    requests = load_offline(name, seed=0, keep_order=True).requests
    outputs = true_outputs(requests)
    if not Path(name).is_file():
        return Input([f"{name}-{row}" for row in range(len(requests))], requests, outputs)
    custom_ids = []
    for number, line in numbered_jsonl(Path(name)):
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id or "\n" in custom_id:
            raise ValueError(f"{name}, line {number}: custom_id must be a non-empty string of one line")
        custom_ids.append(custom_id)
    return Input(custom_ids, requests, np.minimum(outputs, PRIOR_OUTPUT_TOKENS))


def _check_ids(custom_ids: Sequence[str]) -> None:
    custom_id, count = Counter(custom_ids).most_common(1)[0]
    if count > 1:
        raise ValueError(f"custom_id {custom_id!r} occurs {count} times, but must be unique")
