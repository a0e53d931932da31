"""Planning time of Neaptide's scheduler inside vLLM beside vLLM's own: CPU time of ``schedule``, step by step in turns.

256 requests run, half of them chats; 50,000 offline rows wait. Run it with vLLM's interpreter:

    PYTHONPATH=.:lab:vllm-plugin .vllm/bin/python -m lab.benchmarks.vllm_inside.planning [--steps N]

Prints a table, then one JSON line. Ours is what its steps take beyond vLLM's own ``priority`` on the same requests.
"""

import argparse
import json
import logging
import random
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.common import print_table
from lab.benchmarks.vllm_inside.virtual import Setup, VirtualServer

NUM_RUNNING, NUM_WAITING = 256, 50_000
LAX_MS = {"ttft_ms": 60_000, "tpot_ms": 10_000}
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 900
WARM_UP_STEPS = 150


def step_s(parts: Sequence[tuple[int, int]]) -> float:
    return 0.005 + 1e-5 * sum(num_tokens for num_tokens, _ in parts)


def busy(policy: str, num_waiting: int) -> VirtualServer:
    """A server whose slots are all taken."""
    draw = random.Random(1)
    server = VirtualServer(
        Setup(policy, NUM_RUNNING, 8192, num_blocks=20_000, has_prefix_cache=False, settings=LAX_MS), step_s
    )
    prompt = [draw.randrange(10, 8000) for _ in range(PROMPT_TOKENS)]
    for index in range(NUM_RUNNING // 2):
        server.add(f"chat{index}", [index + 10, *prompt], OUTPUT_TOKENS, 0)
    for index in range(num_waiting):
        server.add(f"line{index}", [index % 7000 + 10, *prompt], OUTPUT_TOKENS, 1)
    return server


def timed(server: VirtualServer, times_s: list[float]) -> None:
    """Makes the server's steps note the CPU time of their planning."""
    schedule = server.scheduler.schedule

    def measured() -> object:
        begin_s = time.thread_time()
        output = schedule()
        times_s.append(time.thread_time() - begin_s)
        return output

    server.scheduler.schedule = measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--waiting", type=int, default=NUM_WAITING)
    args = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    times_s: dict[str, list[float]] = {"ours": [], "priority": []}
    servers = {name: busy(name, args.waiting) for name in times_s}
    for name, server in servers.items():
        timed(server, times_s[name])
    for _ in range(WARM_UP_STEPS + args.steps):
        for server in servers.values():
            server.step()
    found = {name: 1e3 * np.array(seconds[WARM_UP_STEPS:]) for name, seconds in times_s.items()}
    found["ours less priority"] = found["ours"] - np.median(found["priority"])
    running = {name: len(server.scheduler.running) for name, server in servers.items()}
    rows = [[name, *(f"{np.percentile(ms, percent):.2f}" for percent in (50, 90, 99))] for name, ms in found.items()]
    print_table("CPU time of planning a step, ms", ["", "p50", "p90", "p99"], rows)
    summary = {name: {f"p{p}_ms": float(np.percentile(ms, p)) for p in (50, 90, 99)} for name, ms in found.items()}
    print(json.dumps({"running": running, "waiting": args.waiting, "steps": args.steps} | summary))


if __name__ == "__main__":
    main()
