"""BlendServe's figure 7: how much faster than depth first a pool runs by density, where compute and memory overlap."""

import logging
from typing import Any

import numpy as np

from neaptide.engine.offline.planning.pooled import TWO_ENDS
from neaptide.experiments.blend.setting import PROFILE, TRACES, profile, trace
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.loadgen.workloads.blend_sets import DENSITY_TOKENS, TRACE_TARGETS
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

NAME = "blend-throughput"
ABOUT = "how much faster than depth first do orders by density run, where compute and memory overlap (figure 7)"

OVERLAP_KAPPA = 0.2
FULL_REQUESTS, QUICK_REQUESTS = 20_000, 3000
FULL_LONG_TOKENS, QUICK_LONG_TOKENS = 4000, 3000
"""Mean of the long answers."""
LONG_PROMPT_TOKENS = 100
LONG_FROM_TOKENS = 4000
"""Answers of BlendServe's long part have at least so many tokens, nearly all of them; none of the other parts has."""
SEATS = 1024
FOR_EVER_S = 1e9
WAYS: dict[str, tuple[str, str | None]] = {
    "dfs": ("dfs", None),
    "blendserve": ("blendserve", None),
    "neaptide": ("neaptide", None),
    "neaptide, two ends": ("neaptide", TWO_ENDS),
}
"""Policy and plan."""
BASE = "dfs"
PAPER = {"blendserve": (1.2084, 0.8655)}
"""Over depth first, of the practical optimum: means of the four traces."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    rows: list[Row] = []
    long_tokens = QUICK_LONG_TOKENS if quick else FULL_LONG_TOKENS
    for number in TRACES[:1] if quick else TRACES:
        set_ = with_shorter_answers(number, QUICK_REQUESTS if quick else FULL_REQUESTS, long_tokens)
        ways: dict[str, tuple[float, float]] = {}
        for way, (policy, plan) in WAYS.items():
            logger.info("trace %d, %s", number, way)
            ways[way] = throughput(set_, policy, plan)
        found[f"trace {number}"] = ways
        base_s, _ = ways[BASE]
        for way, (seconds, of_bound) in ways.items():
            paper_gain, paper_share = PAPER.get(way, (None, None))
            rows += [
                Row(f"trace {number}: {way} over {BASE}", base_s / seconds, paper_gain, digits=3),
                Row(f"trace {number}: {way}, of the bound", of_bound, paper_share, digits=3),
            ]
    notes = [
        f"Whole runs of a pool on {PROFILE}, overlap kappa {OVERLAP_KAPPA}, {SEATS} seats, 2,048 tokens a step. The "
        f"traces are the paper's but for the long answers: {long_tokens:,} tokens on average, not 16,000, and so many "
        "more of them that the density stays: a simulation takes a step for every token of the longest. They share "
        "nothing, so the sharing of the whole is a little lower.",
        "The bound is that of the roofline in the long run (docs/simulation.md); the paper's optimum is measured.",
    ]
    return ExperimentResult(NAME, rows, notes, {"seconds_and_share": found}, lambda f: _plot(f, found))


def with_shorter_answers(number: int, num_requests: int, long_tokens: int) -> OfflineSet:
    """A trace of the paper whose long answers are shorter, and so many more that its density stays."""
    density, sharing = TRACE_TARGETS[number]
    rest = [r for r in trace(number, num_requests).requests if r.output_tokens < LONG_FROM_TOKENS]
    compute = sum(r.input_tokens + r.output_tokens for r in rest)
    memory = sum((r.input_tokens + r.output_tokens / 2) * r.output_tokens for r in rest)
    weight = DENSITY_TOKENS / density
    # A uniform length in D/2 .. 3D/2 has E[d^2] / 2 = 13/24 D^2.
    read_tokens = long_tokens * LONG_PROMPT_TOKENS + 13 / 24 * long_tokens**2
    of_long = read_tokens - weight * (LONG_PROMPT_TOKENS + long_tokens)
    count = max(round((weight * (1.0 - sharing) * compute - memory) / of_long), 1)
    rng = np.random.default_rng(0)
    first = content_base(f"{NAME}#{number}")
    lengths = np.linspace(long_tokens // 2, 3 * long_tokens // 2, count).astype(int).tolist()
    longs = [TraceRequest(0.0, ((first + k, LONG_PROMPT_TOKENS),), length) for k, length in enumerate(lengths)]
    requests = rest + longs
    order = rng.permutation(len(requests)).tolist()
    return OfflineSet(f"{NAME}-{number}", [requests[k] for k in order], synthetic=True)


def throughput(set_: OfflineSet, policy: str, plan: str | None) -> tuple[float, float]:
    """Seconds of the whole run, and its tokens per second as a share of the roofline's bound."""
    scenario = Scenario(
        profile=profile(),
        offline=[set_],
        policy=policy,
        plan=plan,
        overlap_kappa=OVERLAP_KAPPA,
        refill=False,
        window_s=(0.0, FOR_EVER_S),
        max_num_seqs=SEATS,
    )
    run_ = simulate(scenario)
    steps = run_.measures.steps((float("-inf"), float("inf")))
    seconds = float(steps["end_s"].max())
    tokens = float(steps["prompt_tokens"].sum()) + float(steps["output_tokens"].sum())
    bound = run_.result.offline.bound_tokens_per_s["long_run"]
    return seconds, tokens / seconds / bound if bound else 0.0


def _plot(figure: Any, found: dict[str, dict[str, tuple[float, float]]]) -> None:
    axes = figure.subplots()
    width = 0.8 / len(WAYS)
    for index, way in enumerate(WAYS):
        places = [place + index * width for place in range(len(found))]
        axes.bar(places, [ways[BASE][0] / ways[way][0] for ways in found.values()], width, label=way)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel(f"throughput over {BASE}")
    axes.legend()
