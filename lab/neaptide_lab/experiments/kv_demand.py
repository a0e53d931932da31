"""The KV tokens that the online requests of a recorded trace hold over time, on a reference machine without queues.

A request holds its prompt from its arrival, prefills at ``PREFILL_TOKENS_PER_S``, then grows by a token each ``TICK_S``
and frees everything at its end. No prefix is shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neaptide.loadgen.workloads.trace_formats import CHARS_PER_TOKEN
from neaptide.loadgen.workloads.traces import data_file, load_online, read_jsonl

PREFILL_TOKENS_PER_S = 30_000
TICK_S = 0.025
QUICK_REPLAY_S = 700
AGENT_SESSIONS_PER_S = 0.09
"""A load of 0.4 on the reference machine, as the recommended speeds of the other traces give."""
AGENT_REPLAY_S = 1800

Tokens = NDArray[np.int64]
Requests = tuple[Sequence[float], Sequence[int], Sequence[int]]
"""Arrivals in seconds, sorted; input tokens; output tokens."""


@dataclass(slots=True, frozen=True)
class Case:
    """A trace and how it is replayed; the agents have a seed for the starts of their sessions instead of a speed."""

    label: str
    trace: str
    speed: float = 1.0
    max_input_tokens: int | None = None
    seed: int = 0


AGENTS = Case("agents", "agent_miniswe")
CASES = (
    Case("azure_conv", "azure_conv_2023", 1.2),
    Case("azure_code", "azure_code_2023", 1.1),
    Case("mooncake_conversation", "mooncake_conversation", 0.40, 32_768),
    Case("mooncake_synthetic", "mooncake_synthetic", 0.42, 32_768),
    Case("servegen_r1", "servegen_r1_resampled", 1.6),
    AGENTS,
)
"""At the speeds that give the reference machine a load of 0.35 to 0.45."""
VARIANTS = (
    *(replace(case, label=f"{case.label} x1.5", speed=1.5 * case.speed) for case in CASES if case is not AGENTS),
    *(replace(AGENTS, label=f"agents, seed {seed}", seed=seed) for seed in (1, 2)),
)


def demand_tokens(requests: Requests) -> Tokens:
    """KV tokens held in each tick, from time 0 to the last arrival."""
    arrivals_s, inputs, outputs = requests
    start = np.floor(np.array(arrivals_s) / TICK_S + 1e-9).astype(np.int64)
    tokens_in, tokens_out = np.array(inputs), np.array(outputs)
    decode = start + np.ceil(tokens_in / (PREFILL_TOKENS_PER_S * TICK_S)).astype(np.int64)
    end = decode + tokens_out
    level, slope = np.zeros((2, int(end.max()) + 1), np.int64)
    np.add.at(level, start, tokens_in)
    np.add.at(level, end, -(tokens_in + tokens_out))
    np.add.at(slope, decode, 1)
    np.add.at(slope, end, -1)
    held: Tokens = np.cumsum(level + np.cumsum(slope))
    return held[: int(start.max()) + 1]


def agent_requests(replay_s: float, seed: int) -> Requests:
    """Those of the recorded sessions in turn, started by a Poisson process; no call before the answer
    of the session's last."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(data_file("online", "agent_miniswe.jsonl.gz")):
        sessions.setdefault(row["session"], []).append(row)
    recorded = list(sessions.values())
    rng = np.random.default_rng(seed)
    gaps_s = rng.exponential(1 / AGENT_SESSIONS_PER_S, int(2 * replay_s * AGENT_SESSIONS_PER_S) + 10)
    calls = []
    for number, start_s in enumerate(np.cumsum(gaps_s)):
        answered_s = 0.0
        for row in recorded[number % len(recorded)]:
            tokens_in, tokens_out = (
                row["input_chars"] // CHARS_PER_TOKEN,
                max(1, row["output_chars"] // CHARS_PER_TOKEN),
            )
            arrival_s = max(start_s + row["offset_ms"] / 1000, answered_s)
            answered_s = arrival_s + tokens_in / PREFILL_TOKENS_PER_S + tokens_out * TICK_S
            if arrival_s < replay_s:
                calls.append((float(arrival_s), tokens_in, tokens_out))
    arrivals_s, inputs, outputs = zip(*sorted(calls), strict=True)
    return arrivals_s, inputs, outputs


def requests_of(case: Case, quick: bool) -> Requests:
    """With ``quick`` the first ``QUICK_REPLAY_S`` of the replay."""
    if case.trace == "agent_miniswe":
        return agent_requests(QUICK_REPLAY_S if quick else AGENT_REPLAY_S, case.seed)
    window_s = (0.0, QUICK_REPLAY_S * case.speed) if quick else None
    requests = load_online(case.trace, window_s=window_s, speed=case.speed, max_input_tokens=case.max_input_tokens)
    return (
        [request.arrival_s for request in requests],
        [request.input_tokens for request in requests],
        [request.output_tokens for request in requests],
    )
