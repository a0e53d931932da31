"""Pairs, their sums and the interval of their mean."""

import pytest

from lab.tests.experiments.judgement.runs_by_hand import figures
from neaptide_lab.experiments.judgement.compare import Interval, Pair, Summary, bootstrap, not_below


def test_the_same_values_give_the_same_interval_around_their_mean() -> None:
    values = [3.0, -1.0, 0.5, 0.0, 2.5, -2.0]
    interval = bootstrap(values)
    assert bootstrap(values) == interval
    assert interval.low < interval.mean < interval.high
    assert interval.mean == pytest.approx(0.5)


def test_of_equal_values_the_interval_is_a_point() -> None:
    assert bootstrap([1.5, 1.5, 1.5]) == Interval(1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("interval", "holds"),
    [
        (Interval(-0.5, -1.5, 0.4), True),
        (Interval(-0.51, -0.6, 0.0), False),
        (Interval(0.2, -1.51, 2.0), False),
    ],
)
def test_not_below_asks_for_the_mean_and_for_three_times_that_of_the_lower_end(interval: Interval, holds: bool) -> None:
    assert not_below(interval, 0.5) is holds


def test_a_pair_counts_requests_and_ratios() -> None:
    pair = Pair(
        "a", figures(attained=0.95, longest=0.6), figures(attained=0.9, longest=0.5, offline_tokens_per_s=500.0)
    )
    assert pair.points == pytest.approx(5.0)
    assert pair.requests == 5
    assert pair.longest_points == pytest.approx(10.0)
    assert pair.offline_ratio == pytest.approx(2.0)


def test_where_the_other_did_no_offline_work_there_is_no_ratio() -> None:
    assert Pair("a", figures(), figures(offline_tokens_per_s=0.0)).offline_ratio is None


def test_a_sum_is_the_mean_of_pairs_and_names_what_lost_most() -> None:
    better = Pair("better", figures(attained=0.94), figures())
    worse = Pair("worse", figures(attained=0.8), figures())
    much_worse = Pair("much worse", figures(attained=0.7), figures())
    one = Summary((better, worse, much_worse))
    assert one.points is not None
    assert one.points.mean == pytest.approx((4.0 - 10.0 - 20.0) / 3)
    assert one.requests == -26
    assert [pair.cell for pair in one.named] == ["much worse", "worse"]


def test_offline_work_is_summed_by_case_and_the_cases_have_equal_weight() -> None:
    little, much = figures(offline_tokens_per_s=10.0), figures(offline_tokens_per_s=990.0)
    first = [Pair("a", figures(offline_tokens_per_s=40.0), little, "x"), Pair("b", much, much, "x")]
    second = [Pair("c", figures(offline_tokens_per_s=2000.0), figures(), "y")]
    assert Summary(tuple(first)).offline_ratio == pytest.approx(1.03)
    assert Summary((*first, *second)).offline_ratio == pytest.approx((1.03 * 2.0) ** 0.5)


def test_without_online_requests_there_are_no_points() -> None:
    one = Summary((Pair("a", figures(attained=None), figures(attained=None)),))
    assert one.points is None
    assert one.named == []
