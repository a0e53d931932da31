"""What stands under every table that compares policies: all of a result that throughput may have been bought with."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from lab.tests.experiments.bros.runs import cell
from neaptide.simulation.result import PreemptionResult, SimResult
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.tables import price_notes
from neaptide_lab.experiments.price import price
from tests.simulation.scenes import constant, offline, online

SAID = (
    "TTFT 70 / 90 ms, TPOT 40 / 49 ms, gaps 41 / 75 ms (p50 / p99), 99.5% both targets, 98.0% from arrival; preempted "
    "1,203 (3 online); 12,345 tokens computed again, 1,100 blocks copied, longest wait 12 s"
)


@pytest.fixture(scope="module")
def result() -> SimResult:
    one = simulate(constant(online((0.0, 8, 1), (1.0, 8, 1)), [offline((0, 4, 1))])).result
    seconds = {"ttft_s": (0.07, 0.09), "tpot_s": (0.04, 0.049), "itl_s": (0.041, 0.075)}
    latencies = {name: {"p50": p50, "p90": 0.08, "p99": p99} for name, (p50, p99) in seconds.items()}
    attainment = {"ttft": 1.0, "tpot": 1.0, "both": 0.995, "both_from_arrival": 0.98}
    preemptions = PreemptionResult(
        count_by_class={"online": 3, "offline": 1200},
        count_by_kind={},
        recomputed_tokens=44_000,
        swapped_blocks=1100,
    )
    return replace(
        one,
        online=replace(one.online, attainment=attainment, **latencies),
        offline=replace(one.offline, longest_wait_s=12.4),
        preemptions=preemptions,
        wasted_tokens=12_345,
    )


def test_every_figure_that_may_have_been_traded_is_said(result: SimResult) -> None:
    assert price(result) == SAID


def test_what_there_was_none_of_has_no_figure(result: SimResult) -> None:
    nothing: dict[str, float | None] = dict.fromkeys(("p50", "p90", "p99"))
    attainment: dict[str, float | None] = dict.fromkeys(result.online.attainment)
    without = replace(result, online=replace(result.online, tpot_s=nothing, attainment=attainment))
    assert "TPOT - / - ms, " in price(without)
    assert "- both targets, - from arrival" in price(without)


def test_a_cell_of_bros_has_it_for_each_policy_that_is_asked_for(result: SimResult) -> None:
    runs: Any = {
        cell(3.0): SimpleNamespace(
            by_policy=dict.fromkeys(("neaptide", "fcfs", "bros"), SimpleNamespace(result=result))
        )
    }
    assert price_notes(runs, ("neaptide", "fcfs")) == [
        f"{cell(3.0)}, neaptide: {SAID}.",
        f"{cell(3.0)}, fcfs: {SAID}.",
    ]
