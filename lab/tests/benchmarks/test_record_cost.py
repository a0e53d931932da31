"""What the records cost: the figures, and a short run of each part."""

import pytest

from lab.benchmarks.record_cost import MIB, StepCost, of_periods, of_steps, recorded_periods, rows_of, summary
from neaptide.durations import DAY_S
from neaptide.server.quotes.periods import MAX_KEYS, PERIOD_S
from neaptide.server.why.steps import MAX_BYTES


def test_figures_are_those_of_a_step_and_of_fifteen_minutes() -> None:
    costs = [StepCost(4, 1e-4, 1e-5, 1e-6), StepCost(64, 3e-4, 5e-5, 3e-6), StepCost(8, 2e-4, 3e-5, 2e-6)]
    found = summary(costs, ring_bytes=300, length_s=0.3)
    assert found["step_requests"] == 8
    assert (found["reporter_us"], found["ring_us"], found["periods_step_us"]) == pytest.approx((200.0, 30.0, 2.0))
    assert found["ring_mib"] == pytest.approx(900 * 10 * 100 / MIB)
    assert summary(costs, ring_bytes=10**9, length_s=0.3)["ring_mib"] == MAX_BYTES / MIB


def test_the_periods_of_a_day_end_at_the_moment() -> None:
    periods = recorded_periods(2 * DAY_S + 17.0, 1.0)
    assert [(one.start_s, len(one.keys)) for one in periods[:: len(periods) - 1]] == [
        (DAY_S, MAX_KEYS),
        (2 * DAY_S - PERIOD_S, MAX_KEYS),
    ]
    assert len(periods) == 144


async def test_periods_are_stored_and_read_back() -> None:
    found = await of_periods(0.25)
    assert found["periods"] == 36
    assert found["disk_mib"] * MIB > 36 * found["period_bytes"] / 2
    assert found["decoded_mib"] > 0.0


def test_a_run_has_a_cost_for_each_row_of_the_table() -> None:
    found = of_steps(0.3)
    assert found["steps"] > 0
    assert found["ring_bytes_per_step"] > 0.0
    of_periods = dict.fromkeys(("period_bytes", "store_ms", "disk_mib", "read_ms", "decoded_mib"), 1.0)
    assert all(cost > 0.0 for _, cost in rows_of(found | of_periods))
