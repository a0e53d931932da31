"""Compares reservations: what counts as covered, and a small real run."""

from dataclasses import replace

import msgspec
import pytest

from neaptide.estimator.recipes import DEFAULT_HEADROOM
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments import headroom
from neaptide_lab.experiments.headroom import CONV, Kept, Outcome, ReservationWatch, Size, rows_of
from neaptide_lab.experiments.rivals import loads
from tests.simulation.scenes import constant, offline, online


def kept(reserved: list[int], demand: list[int], num_blocks: int = 100) -> Kept:
    return Kept.of(ReservationWatch(reserved, demand), (0.0, float(len(demand))), num_blocks)


def test_a_second_is_covered_if_the_most_of_the_next_thirty_was_reserved() -> None:
    # Judged are the first three seconds of 33; the demand of 50 comes in second 31, the horizon of the second one on.
    demand = [10] * 31 + [50, 10]
    assert kept([49, 50, 49], demand) == Kept(2 / 3, 0.0, pytest.approx(148 / 300))


def test_demand_beyond_all_blocks_is_told_apart() -> None:
    demand = [10] * 31 + [101, 10]
    assert kept([100, 100, 9], demand) == Kept(1.0, pytest.approx(2 / 3), pytest.approx(209 / 300))
    assert kept([100] * 3, [101] * 33).covered is None


def test_a_window_without_a_horizon_judges_nothing() -> None:
    assert kept([5] * 30, [5] * 30) == Kept(None, 0.0, 0.0)


def test_prompts_that_wait_count_as_demand() -> None:
    """A cache of 64 blocks of 4 tokens, and three prompts of 100 tokens each: two fit."""
    watch = ReservationWatch()
    simulate(constant(online((0.0, 100, 3), (0.0, 100, 3), (0.0, 100, 3))), observers=[watch])
    assert watch.demand_blocks[0] >= 75


def test_the_default_ties_with_the_best_that_attains_as_much() -> None:
    template = simulate(constant(online((0.0, 8, 1), (1.0, 8, 1)), [offline((0, 4, 1))])).result

    def outcome(attained: float, tokens_per_s: float) -> Outcome:
        attainment = template.online.attainment | {"both": attained}
        both = (
            msgspec.structs.replace(template.online, attainment=attainment),
            msgspec.structs.replace(template.offline, tokens_per_s=tokens_per_s),
        )
        return Outcome(msgspec.structs.replace(template, online=both[0], offline=both[1]), Kept(1.0, 0.0, 0.1))

    runs = {"fixed@5": outcome(0.9, 5000.0), "fixed@10": outcome(0.985, 1000.0), DEFAULT_HEADROOM: outcome(0.99, 990.0)}
    assert rows_of("window", runs, judged=True)[-1].holds
    runs[DEFAULT_HEADROOM] = outcome(0.99, 989.0)
    assert rows_of("window", runs, judged=True)[-1].holds is False


def test_every_reservation_stands_beside_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(CONV, window_s=(600.0, 600.4), offline="batchllm-2000-200-s4", warm_up_s=0.2)
    monkeypatch.setattr(headroom, "QUICK", Size((load,), ("fixed@50", DEFAULT_HEADROOM)))
    monkeypatch.setattr(loads, "CLIENT_LIMIT_TOKENS", 8)
    monkeypatch.setattr(loads, "OFFLINE_REQUESTS", 100)
    result = headroom.run(quick=True)
    assert [row.case.split(",")[0] for row in result.rows] == [
        "azure_conv_2023 600:600.4: fixed@50",
        f"azure_conv_2023 600:600.4: {DEFAULT_HEADROOM}",
        f"azure_conv_2023 600:600.4: {DEFAULT_HEADROOM}",
    ]
    assert not result.failed
    assert any("preemptions" in note for note in result.notes)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert result.plot is not None
    result.plot(figure)
    assert len(figure.axes) == 1
