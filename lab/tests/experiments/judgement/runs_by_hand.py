"""Figures made by hand."""

from typing import Any

from neaptide_lab.experiments.judgement.cell import Cell, Part
from neaptide_lab.experiments.judgement.worker import Figures

A_FIGURE = Figures(
    requests=100,
    attained=0.9,
    ttft=0.95,
    tpot=0.92,
    from_arrival=0.93,
    longest=0.5,
    ttft_p50_s=0.1,
    ttft_p99_s=0.9,
    tpot_p50_s=0.03,
    tpot_p99_s=0.05,
    gap_p99_s=0.07,
    gap_max_s=0.12,
    wait_max_s=2.0,
    latency_s=0.06,
    offline_tokens_per_s=1000.0,
    offline_wait_s=20.0,
    online_hits=0.1,
    offline_hits=0.2,
    again_tokens=0,
    preempted_online=0,
    preempted_offline=0,
    work=0.8,
    steps=500,
    plan_mean_ms=0.3,
    plan_p99_ms=0.9,
    valid=True,
    failed=0,
    wall_s=1.0,
)


def figures(**changed: Any) -> Figures:
    values = {name: getattr(A_FIGURE, name) for name in A_FIGURE.__struct_fields__}
    return Figures(**(values | changed))


def cell(name: str = "a", group: str = "w5", **changed: Any) -> Cell:
    values: dict[str, Any] = {
        "profile": "a100-40g-llama-3.1-8b",
        "online": (Part("fixed-64-4", (0.0, 2.0), rate_rps=2.0),),
        "case": name,
    }
    return Cell(name=name, group=group, **(values | changed))
