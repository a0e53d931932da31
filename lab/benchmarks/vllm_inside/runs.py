"""The runs of W5 inside vLLM: one load, fed to vLLM's schedulers and to Neaptide's own engine."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from lab.benchmarks.vllm_inside.virtual import BEGIN_S, Setup, Token, VirtualServer
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import save_profile
from neaptide.loadgen.workloads.online_sets import poisson_arrivals
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.w5.machine import (
    OFFLINE_LENGTHS,
    ONLINE_LENGTHS,
    STEP_NOISE,
    TTFT_OVER_TPOT,
    Bench,
)

LOAD = 0.2
OPEN_LINES = 256
"""Batch lines that wait, which is more than may run."""
PRIORITY_SETTINGS = ((128, 2048), (16, 2048), (16, 64), (8, 64), (8, 32))
"""``max_num_seqs`` and ``max_num_batched_tokens``."""


@dataclass
class Figures:
    """A run. Latencies are of the chats that arrived in the window and had a first token."""

    name: str
    seed: int
    num_chats: int
    attained_percent: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    offline_tokens_per_s: float
    num_preemptions: int = 0
    cost_error: float = 0.0


@dataclass
class Chat:
    arrival_s: float
    times_s: list[float]

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


Row = Callable[..., Figures]
"""Measures one row, given its name, the bench, the seed and the TPOT target."""


class Load:
    """The chats and batch lines of one run, fed into a virtual server."""

    def __init__(self, server: VirtualServer, arrivals_s: Sequence[float], has_offline: bool, seed: int) -> None:
        self.server = server
        self.chats: dict[str, Chat] = {}
        self.offline_tokens: list[tuple[float, int]] = []
        self.num_preemptions = 0
        self._arrivals_s = [BEGIN_S + each for each in arrivals_s]
        self._has_offline = has_offline
        self._tokens = random.Random(seed)
        self._num_lines = 0

    def run(self, end_s: float) -> None:
        """Until ``end_s``, and then until every chat has ended or a minute has passed."""
        server, scheduler = self.server, self.server.scheduler
        while server.now_s < BEGIN_S + end_s or (self._open_chats() and server.now_s < BEGIN_S + end_s + 60.0):
            self._arrive()
            if not scheduler.has_requests():
                server.now_s = self._arrivals_s[0] if self._arrivals_s else BEGIN_S + end_s + 60.0
                continue
            output, tokens = server.step()
            self.num_preemptions += len(output.preempted_req_ids or ())
            self._count(output.num_scheduled_tokens, tokens)

    def _open_chats(self) -> bool:
        return bool(self._arrivals_s) or any(len(chat.times_s) < ONLINE_LENGTHS[1] for chat in self.chats.values())

    def _arrive(self) -> None:
        while self._arrivals_s and self._arrivals_s[0] <= self.server.now_s:
            arrival_s = self._arrivals_s.pop(0)
            request_id = f"chat{len(self.chats)}"
            self.chats[request_id] = Chat(arrival_s, [])
            self._add(request_id, ONLINE_LENGTHS, 0, arrival_s)
        while self._has_offline and len(self.server.scheduler.waiting) < OPEN_LINES:
            self._num_lines += 1
            self._add(f"line{self._num_lines}", OFFLINE_LENGTHS, 1, self.server.now_s)

    def _add(self, request_id: str, lengths: tuple[int, int], priority: int, arrival_s: float) -> None:
        prompt = [self._tokens.randrange(10, 8000) for _ in range(lengths[0])]
        self.server.add(request_id, prompt, lengths[1], priority, arrival_s)

    def _count(self, scheduled: dict[str, int], tokens: list[Token]) -> None:
        now_s, contexts, count = self.server.now_s, self.server.contexts, 0
        for request_id, num_tokens in scheduled.items():
            if request_id not in self.chats:
                count += max(min(num_tokens, OFFLINE_LENGTHS[0] - contexts[request_id]), 0)
        for token in tokens:
            chat = self.chats.get(token.request_id)
            if chat is None:
                count += 1
            else:
                chat.times_s.append(token.time_s)
        self.offline_tokens.append((now_s - BEGIN_S, count))


def figures(name: str, setup: Setup, bench: Bench, seed: int, tpot_slo_s: float, has_offline: bool = True) -> Figures:
    """Runs one setup of vLLM on the load of the seed."""
    size = bench.size
    truth, noise = RooflineModel.from_profile(bench.profile), random.Random(seed)

    def step_s(parts: Sequence[tuple[int, int]]) -> float:
        shape = BatchShape()
        for num_tokens, context in parts:
            shape.add(num_tokens, context)
        factor = noise.lognormvariate(-0.5 * STEP_NOISE**2, STEP_NOISE)
        return bench.profile.planning.seconds(len(parts)) + truth.predict(shape).seconds * factor

    rate_rps = LOAD * bench.ceiling_tokens_per_s / sum(ONLINE_LENGTHS)
    arrivals_s = poisson_arrivals(np.random.default_rng(seed), np.full(1, rate_rps), size.duration_s)
    server = VirtualServer(setup, step_s)
    load = Load(server, arrivals_s, has_offline, seed)
    load.run(size.duration_s)
    first_s, last_s = size.window_s
    seen = [chat for chat in load.chats.values() if first_s <= chat.arrival_s - BEGIN_S <= last_s]
    begun = [chat for chat in seen if chat.times_s]
    done = [chat for chat in begun if len(chat.times_s) == ONLINE_LENGTHS[1]]
    in_time = [c for c in done if c.ttft_s <= TTFT_OVER_TPOT * tpot_slo_s and c.tpot_s <= tpot_slo_s]
    ttfts_ms = [1e3 * chat.ttft_s for chat in begun] or [float("nan")]
    tpots_ms = [1e3 * chat.tpot_s for chat in begun if len(chat.times_s) > 1] or [float("nan")]
    return Figures(
        name,
        seed,
        len(seen),
        100.0 * len(in_time) / len(seen),
        *(float(np.percentile(ttfts_ms, percent)) for percent in (50, 99)),
        *(float(np.percentile(tpots_ms, percent)) for percent in (50, 99)),
        sum(count for time_s, count in load.offline_tokens if first_s < time_s <= last_s) / (last_s - first_s),
        load.num_preemptions,
        server.scheduler.cost_model.mape if setup.policy == "ours" else 0.0,
    )


def own_engine(name: str, bench: Bench, seed: int, tpot_slo_s: float) -> Figures:
    """Neaptide's own engine on the same machine and arrivals, in its simulator."""
    result = simulate(bench.beside(LOAD, seed, tpot_slo_s)).result
    ttft_s, tpot_s = result.online.ttft_s, result.online.tpot_s
    latencies = (1e3 * (each or float("nan")) for each in (ttft_s["p50"], ttft_s["p99"], tpot_s["p50"], tpot_s["p99"]))
    return Figures(name, seed, result.online.requests, 100.0 * result.attained, *latencies, result.offline_tokens_per_s)


def targets_ms(tpot_slo_s: float) -> dict[str, Any]:
    return {"ttft_ms": 1e3 * TTFT_OVER_TPOT * tpot_slo_s, "tpot_ms": 1e3 * tpot_slo_s}


def profiled(name: str, bench: Bench, seed: int, tpot_slo_s: float) -> Figures:
    """Ours inside with the machine's profile, from a file as an operator gives it."""
    with NamedTemporaryFile(suffix=".json") as file:
        save_profile(bench.profile, file.name)
        setup = Setup(settings=targets_ms(tpot_slo_s) | {"profile": file.name})
        return figures(name, setup, bench, seed, tpot_slo_s)


def rows_of(tpot_slo_s: float) -> dict[str, Row]:
    """What is compared, by name."""
    rows: dict[str, Row] = {
        "chats alone": partial(figures, setup=Setup("fcfs"), has_offline=False),
        "ours inside": partial(figures, setup=Setup(settings=targets_ms(tpot_slo_s))),
        "ours inside, with a profile": profiled,
        "own engine": own_engine,
        "fcfs": partial(figures, setup=Setup("fcfs")),
    }
    for seqs, tokens in PRIORITY_SETTINGS:
        rows[f"priority {seqs}/{tokens}"] = partial(figures, setup=Setup("priority", seqs, tokens))
    return rows


def measured(name: str, bench: Bench, seed: int, tpot_slo_s: float) -> Figures:
    """One row's run of one seed."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return rows_of(tpot_slo_s)[name](name, bench=bench, seed=seed, tpot_slo_s=tpot_slo_s)
