"""How many replicas: worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.cluster.autoscaling import (
    Autoscaler,
    Backlog,
    Scale,
    ScalingChange,
    Serving,
    change_to,
    pressure,
)

SCALE = Scale(1, 8, online_share=0.5, offline_efficiency=0.5, deadline_share=1.0, down_after_s=60.0)


def test_online_load_alone_fills_half_of_every_replica() -> None:
    for loads, replicas in (([], 1), ([0.5], 1), ([0.6], 2), ([0.5, 0.5, 0.1], 3), ([9.0], 8)):
        assert Autoscaler(SCALE).desired(0.0, loads, []) == replicas


def test_deadlines_press_by_the_work_that_is_due_before_each() -> None:
    """100 s of work in 100 s is one replica; with 300 s more by 200 s it is two."""
    first, second = Backlog(100.0, 100.0), Backlog(200.0, 300.0)
    assert pressure([first], 0.0, 1.0) == 1.0
    assert pressure([second, first], 0.0, 1.0) == 2.0
    assert pressure([second, first], 50.0, 1.0) == pytest.approx(400.0 / 150.0)
    assert pressure([first], 0.0, 0.5) == 2.0
    assert pressure([], 0.0, 1.0) == 0.0
    assert pressure([first], 100.0, 1.0) == math.inf
    assert pressure([Backlog(0.0, 0.0)], 5.0, 1.0) == 0.0


def test_offline_work_runs_in_what_online_work_leaves() -> None:
    """Half a replica of chats, and one replica's worth of rows that take twice their least time: 2.5."""
    assert Autoscaler(SCALE).desired(0.0, [0.25, 0.25], [Backlog(100.0, 100.0)]) == 3


def test_a_job_that_is_late_takes_all_there_is() -> None:
    assert Autoscaler(SCALE).desired(10.0, [0.1], [Backlog(5.0, 1.0)]) == 8


def test_it_grows_at_once_and_shrinks_when_less_was_enough_for_long() -> None:
    scaler = Autoscaler(SCALE)
    assert scaler.desired(0.0, [0.4], []) == 1
    assert scaler.desired(10.0, [2.0], []) == 4
    assert [scaler.desired(at_s, [0.9], []) for at_s in (20.0, 69.0, 70.0, 71.0)] == [4, 4, 4, 2]


@given(
    moments=st.lists(
        st.tuples(
            st.floats(0.0, 30.0),
            st.lists(st.floats(0.0, 2.0), max_size=5),
            st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.0, 500.0)), max_size=4),
        ),
        max_size=12,
    )
)
def test_the_size_stays_within_its_limits(
    moments: list[tuple[float, list[float], list[tuple[float, float]]]],
) -> None:
    scaler, now_s = Autoscaler(Scale(2, 5)), 0.0
    for gap_s, loads, jobs in moments:
        now_s += gap_s
        assert 2 <= scaler.desired(now_s, loads, [Backlog(*job) for job in jobs]) <= 5


@pytest.mark.parametrize("limits", [(0, 4), (5, 4)])
def test_limits_that_cannot_be_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 to N replicas"):
        Scale(*limits)


def test_the_least_loaded_go_and_of_equals_the_youngest() -> None:
    fleet = [Serving("old", 0.1, 0.0), Serving("young", 0.1, 5.0), Serving("busy", 0.9, 9.0)]
    assert change_to(2, fleet, 0) == ScalingChange(0, ["young"])
    assert change_to(1, fleet, 0) == ScalingChange(0, ["young", "old"])
    assert change_to(1, fleet, 1) == ScalingChange(0, ["young", "old"])  # the one that serves stays
    assert change_to(3, fleet, 0) == ScalingChange(0, [])


def test_those_that_start_count() -> None:
    fleet = [Serving("a", 0.1, 0.0)]
    assert change_to(4, fleet, 1) == ScalingChange(2, [])
    assert change_to(2, fleet, 1) == ScalingChange(0, [])
    assert change_to(3, [], 0) == ScalingChange(3, [])
