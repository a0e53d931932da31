"""The fluid model: exact cases, and what holds whatever the record is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.server.quotes.fluid import (
    DAY_PERIODS,
    LoadPaths,
    PoolBatch,
    finish_times,
    load_paths,
    quantile,
    work_before,
)

CURVE = 0.5 + 0.4 * np.sin(np.arange(DAY_PERIODS) / DAY_PERIODS * 2 * math.pi)


def one_path(*loads: float, first_s: float = 600.0, lag_s: float = 0.0) -> LoadPaths:
    return LoadPaths(np.array([loads]), first_s, 600.0, True, lag_s)


def finish_s(paths: LoadPaths, work_s: float, efficiency: float = 1.0) -> float:
    return float(finish_times(paths, np.array([work_s]), np.array([efficiency]))[0])


@pytest.mark.parametrize(
    ("work_s", "efficiency", "wanted_s"),
    [
        (300.0, 1.0, 300.0),
        (600.0, 1.0, 600.0),
        (750.0, 1.0, 900.0),  # chats leave half of the second period
        (900.0, 1.0, 1200.0),
        (901.0, 1.0, math.inf),  # and nothing of the third
        (300.0, 0.5, 600.0),
    ],
)
def test_work_flows_through_what_chats_leave(work_s: float, efficiency: float, wanted_s: float) -> None:
    assert finish_s(one_path(0.0, 0.5, 1.3), work_s, efficiency) == pytest.approx(wanted_s)


def test_the_period_that_has_begun_counts_for_its_rest() -> None:
    assert finish_s(one_path(0.0, 0.5, first_s=60.0), 120.0) == pytest.approx(60.0 + 120.0)


@pytest.mark.parametrize(
    ("work_s", "wanted_s"),
    [
        (9.0, 9.0),  # chats give way, and leave the whole device
        (10.0, 10.0),
        (155.0, 300.0),  # half of the device, and half of ten seconds
        (305.0, 600.0),
        (369.0, 1200.0),  # a tenth of the device, and nine of ten seconds
        (370.0, math.inf),
    ],
)
def test_chats_that_fall_behind_leave_the_batch_more(work_s: float, wanted_s: float) -> None:
    assert finish_s(one_path(0.5, 0.9, lag_s=10.0), work_s) == pytest.approx(wanted_s, abs=1e-6)


def test_chats_behind_by_more_than_a_period_hold_up_no_batch() -> None:
    path = one_path(1.0, 0.2, 0.0, lag_s=2000.0)
    assert [finish_s(path, work_s) for work_s in (1500.0, 2000.0)] == [1500.0, 2000.0]
    assert finish_s(path, 2001.0) == math.inf


def test_infinite_times_are_the_largest() -> None:
    values = np.array([3.0, math.inf, 1.0, 2.0])
    assert [quantile(values, share) for share in (0.25, 0.5, 0.75, 0.9)] == [1.0, 2.0, 3.0, math.inf]


def test_days_that_are_alike_come_again() -> None:
    """From noon on, after three equal days."""
    noon = DAY_PERIODS // 2
    loads = np.tile(CURVE, 4)[: 3 * DAY_PERIODS + noon]
    paths = load_paths(loads, 0, np.random.default_rng(1))
    assert paths.has_days
    wanted = np.concatenate((CURVE[noon:], CURVE, CURVE[:noon]))
    assert paths.loads == pytest.approx(np.broadcast_to(wanted, paths.loads.shape), abs=1e-9)


def test_a_busier_day_than_usual_makes_all_its_paths_busier_at_first() -> None:
    rng = np.random.default_rng(3)
    levels = 0.4 * np.exp(np.repeat(rng.normal(0, 0.2, 40), 18))  # levels that last for three hours
    usual, busy = levels[: 4 * DAY_PERIODS], levels[: 4 * DAY_PERIODS].copy()
    usual[-3:], busy[-3:] = 0.3, 0.6
    soon = [float(load_paths(one, 0, np.random.default_rng(1)).loads[:, 0].mean()) for one in (usual, busy)]
    late = [float(load_paths(one, 0, np.random.default_rng(1)).loads[:, -1].mean()) for one in (usual, busy)]
    assert soon[1] > 1.5 * soon[0]
    assert abs(late[1] - late[0]) < 0.1


@pytest.mark.parametrize("loads", [[], [math.nan] * 3], ids=["empty", "unseen"])
def test_without_a_record_the_device_is_idle(loads: list[float]) -> None:
    paths = load_paths(np.array(loads), 5, np.random.default_rng(1))
    assert (paths.loads == 0.0).all()
    assert not paths.has_days


RECORDS = st.lists(st.floats(0.0, 3.0) | st.just(math.nan), min_size=1, max_size=3 * DAY_PERIODS)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    loads=RECORDS,
    slot=st.integers(0, DAY_PERIODS - 1),
    work_s=st.floats(0.0, 1e6),
    more_s=st.floats(0.0, 1e6),
    lag_s=st.just(0.0) | st.floats(0.0, 5000.0),
)
def test_more_work_never_ends_sooner_and_p50_not_after_p90(
    loads: list[float], slot: int, work_s: float, more_s: float, lag_s: float
) -> None:
    rng = np.random.default_rng(1)
    paths = replace(load_paths(np.array(loads), slot, rng, num_paths=20), lag_s=lag_s)
    assert np.isfinite(paths.loads).all()
    assert (paths.loads >= 0.0).all()
    one = np.ones(20)
    found, later = (finish_times(paths, work * one, one) for work in (work_s, work_s + more_s))
    assert (later >= found).all()
    assert (found >= work_s - 1e-6).all()
    assert quantile(found, 0.5) <= quantile(found, 0.9)


def before_s(
    pool: list[PoolBatch], key: str, own_s: float, window_s: float, weights: dict[str, float] | None = None
) -> float:
    return float(work_before(pool, key, np.array([own_s]), window_s, weights or {})[0])


def test_a_key_runs_its_batches_by_deadline_and_shares_with_others() -> None:
    pool = [PoolBatch("a", 100.0, 50.0), PoolBatch("a", 400.0, 500.0), PoolBatch("b", 30.0, 900.0)]
    assert before_s(pool, "a", 10.0, 60.0) == pytest.approx(100.0 + 30.0)
    assert before_s(pool, "a", 10.0, 600.0) == pytest.approx(500.0 + 30.0)
    assert before_s(pool, "c", 10.0, 600.0) == pytest.approx(10.0 + 10.0)  # each gets as much as it does
    assert before_s(pool, "c", 10.0, 600.0, {"c": 2.0}) == pytest.approx(5.0 + 5.0)


POOLS = st.lists(st.builds(PoolBatch, st.sampled_from("abc"), st.floats(0.0, 1e5), st.floats(0.0, 1e5)), max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pool=POOLS, own_s=st.floats(0.0, 1e5), more_s=st.floats(0.0, 1e5), window_s=st.floats(0.0, 1e5))
def test_what_goes_before_grows_with_the_batch_and_its_window_and_is_no_more_than_there_is(
    pool: list[PoolBatch], own_s: float, more_s: float, window_s: float
) -> None:
    found_s = before_s(pool, "a", own_s, window_s)
    assert 0.0 <= found_s <= sum(one.work_s for one in pool) * (1 + 1e-9)
    assert before_s(pool, "a", own_s + more_s, window_s) >= found_s - 1e-6
    assert before_s(pool, "a", own_s, window_s + more_s) >= found_s - 1e-6
