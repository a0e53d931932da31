"""When a pool is planned."""

from neaptide.engine.offline.planning.occasions import GROWTH, LEAST_ROWS, Occasions


def planned(num_rows: int = 10_000, now_s: float = 0.0) -> Occasions:
    """A pool of so many rows that has been planned once."""
    occasions = Occasions(period_s=20.0)
    occasions.grown(num_rows)
    occasions.begin(now_s)
    occasions.planned(num_rows)
    return occasions


def test_a_pool_is_planned_when_it_has_grown() -> None:
    occasions = Occasions()
    occasions.grown(LEAST_ROWS - 1)
    assert not occasions.is_due(0.0)
    occasions.grown(1)
    assert occasions.is_due(0.0)
    occasions.begin(0.0)
    assert not occasions.is_due(1e9)


def test_a_large_pool_is_planned_again_when_it_has_grown_by_a_tenth() -> None:
    occasions = planned()
    occasions.grown(int(GROWTH * 10_000) - 1)
    assert not occasions.is_due(1e9)
    occasions.grown(1)
    assert occasions.is_due(0.0)


def test_it_is_planned_again_once_answers_tell_more_each_time_after_twice_as_long() -> None:
    occasions, plans_s = planned(), list[int]()
    for now_s in range(1, 1000):
        occasions.ended(1)
        if occasions.is_due(now_s):
            occasions.begin(now_s)
            occasions.planned(5000)
            plans_s.append(now_s)
    assert plans_s == [20, 60, 140, 300, 620]


def test_growth_begins_the_doubling_anew() -> None:
    occasions = planned()
    occasions.ended(1)
    occasions.begin(20.0)  # the next one is due at 60
    occasions.grown(10_000)
    occasions.begin(30.0)
    occasions.ended(1)
    assert [occasions.is_due(now_s) for now_s in (49.9, 50.0)] == [False, True]


def test_where_no_row_has_ended_nothing_is_planned_again() -> None:
    assert not planned().is_due(1e9)


def test_what_is_left_of_a_pool_when_it_is_small_is_not_planned_again() -> None:
    for num_left, is_due in ((LEAST_ROWS - 1, False), (LEAST_ROWS, True)):
        occasions = planned()
        occasions.planned(num_left)
        occasions.ended(1)
        assert occasions.is_due(1e9) is is_due


def test_a_new_engine_follows_no_plan_and_its_rows_are_new() -> None:
    occasions = planned()
    occasions.ended(1)
    occasions.engine_is_new()
    assert not occasions.is_due(1e9)
    occasions.grown(LEAST_ROWS)
    assert occasions.is_due(0.0)
