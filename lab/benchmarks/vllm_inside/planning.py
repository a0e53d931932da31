"""Planning time of Neaptide's scheduler inside vLLM beside vLLM's own: CPU time of ``schedule``, step by step in turns.

256 requests run, half of them chats; whenever one ends another comes. 50,000 offline rows wait. Run it with vLLM's
interpreter:

    PYTHONPATH=.:lab:vllm-plugin .vllm/bin/python -m lab.benchmarks.vllm_inside.planning [--steps N]

Prints a table, then one JSON line. Ours is the time of ``schedule`` without vLLM's own part, which it calls. That part
asks us once for each request how many tokens it gets: ``clamp_ms`` is what a step's questions take.
"""

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.common import print_table
from lab.benchmarks.vllm_inside.virtual import Setup, VirtualServer

NUM_RUNNING, NUM_WAITING = 256, 50_000
LAX_MS = {"ttft_ms": 60_000, "tpot_ms": 10_000}
PROMPT_TOKENS = 64
CHAT_TOKENS, LINE_TOKENS = (100, 400), (300, 900)
"""Fewest and most output tokens."""
WARM_UP_STEPS = 450


def step_s(parts: Sequence[tuple[int, int]]) -> float:
    return 0.005 + 1e-5 * sum(num_tokens for num_tokens, _ in parts)


class Busy:
    """A server whose slots are all taken, and the CPU time of its steps' planning."""

    def __init__(self, policy: str, num_waiting: int) -> None:
        self._draw = random.Random(1)
        self._prompt = [self._draw.randrange(10, 8000) for _ in range(PROMPT_TOKENS)]
        setup = Setup(policy, NUM_RUNNING, 8192, num_blocks=20_000, has_prefix_cache=False, settings=LAX_MS)
        self.server = VirtualServer(setup, step_s)
        self.all_s: list[float] = []
        self.vllm_s: list[float] = []
        """The part of vLLM's own ``schedule``."""
        self._chats: set[str] = set()
        self._num_added = 0
        for _ in range(num_waiting):
            self._add("line", LINE_TOKENS, 1)

    def _add(self, kind: str, output_tokens: tuple[int, int], priority: int) -> str:
        self._num_added += 1
        request_id = f"{kind}{self._num_added}"
        prompt = [self._num_added % 7000 + 10, *self._prompt]
        self.server.add(request_id, prompt, self._draw.randint(*output_tokens), priority)
        return request_id

    def step(self) -> None:
        while len(self._chats) < NUM_RUNNING // 2:
            self._chats.add(self._add("chat", CHAT_TOKENS, 0))
        scheduler = self.server.scheduler
        schedule, of_vllm = scheduler.schedule, Scheduler.schedule
        with patch.object(Scheduler, "schedule", timed(of_vllm, self.vllm_s)):
            scheduler.schedule = timed(schedule, self.all_s)
            _, tokens = self.server.step()
            del scheduler.schedule
        self._chats.difference_update(token.request_id for token in tokens if token.is_last)

    def clamp_s(self) -> float:
        """Time to ask for the tokens of each running request, the median of some."""
        scheduler, times_s = self.server.scheduler, []
        for _ in range(101):
            begin_s = time.thread_time()
            for request in scheduler.running:
                scheduler._reserve_prefill_lookahead(request, request.num_computed_tokens, 1)
            times_s.append(time.thread_time() - begin_s)
        return float(np.median(times_s))


def timed(function: Callable[..., Any], times_s: list[float]) -> Callable[..., Any]:
    """The function, whose calls note their CPU time."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.thread_time()
        result = function(*args, **kwargs)
        times_s.append(time.thread_time() - begin_s)
        return result

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--waiting", type=int, default=NUM_WAITING)
    args = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    servers = {name: Busy(name, args.waiting) for name in ("ours", "priority")}
    for _ in range(WARM_UP_STEPS + args.steps):
        for server in servers.values():
            server.step()
    ours, own = servers["ours"], servers["priority"]
    ours_s, inside_s, own_s = (np.array(each[WARM_UP_STEPS:]) for each in (ours.all_s, ours.vllm_s, own.all_s))
    found = {"ours": 1e3 * (ours_s - inside_s), "vLLM's part of ours": 1e3 * inside_s, "vLLM priority": 1e3 * own_s}
    running = {name: len(server.server.scheduler.running) for name, server in servers.items()}
    rows = [[name, *(f"{np.percentile(ms, percent):.2f}" for percent in (50, 90, 99))] for name, ms in found.items()]
    print_table("CPU time of planning a step, ms", ["", "p50", "p90", "p99"], rows)
    summary = {name: {f"p{p}_ms": float(np.percentile(ms, p)) for p in (50, 90, 99)} for name, ms in found.items()}
    load = {"running": running, "waiting": args.waiting, "steps": args.steps, "clamp_ms": 1e3 * ours.clamp_s()}
    print(json.dumps(load | summary))


if __name__ == "__main__":
    main()
