"""Which of several plans is the cheapest, on plans made by hand."""

import pytest

from neaptide.cluster.capacity.cheapest import cheapest, credit_per_token, net_per_hour
from neaptide.cluster.capacity.result import Beside, OfflinePlan, Peak, Plan, Point
from neaptide.cluster.capacity.tuning import points_of, tuned
from neaptide.simulation.points import PolicyPoint

PEAK = Peak(start_s=0.0, end_s=300.0, requests=100, work_s=50.0)


def plan(
    replicas: int | None,
    price: float = 1.0,
    rates: tuple[float, float] | None = None,
    *,
    attained: float = 0.95,
    policy: str = "neaptide",
) -> Plan:
    """``rates``: offline tokens/s beside the trace, and of one replica alone."""
    point = None
    if replicas is not None:
        shares = dict.fromkeys(("ttft", "tpot", "both"), attained)
        point = Point(replicas=replicas, kv_blocks=64, kv_gib=1.0, attainment=shares, too_large=0, holds=True)
    offline = None
    if rates is not None:
        whole = Beside(start_s=0.0, end_s=9.0, tokens_per_s=rates[0], attainment={}, holds=True, valid=True)
        offline = OfflinePlan(
            rows=1,
            tokens=100,
            whole=whole,
            tokens_per_day=86_400 * rates[0],
            alone_tokens_per_s=rates[1],
            finish_s=(None, None),
        )
    return Plan(
        profile="a",
        policy=policy,
        devices=2,
        price_per_hour=price,
        peak=PEAK,
        tried=[] if point is None else [point],
        answer=point,
        one_smaller=None,
        is_monotone=True,
        offline=offline,
    )


def test_without_offline_work_the_hour_decides() -> None:
    plans = [plan(2, 3.0), plan(1, 5.0), plan(None)]
    assert credit_per_token(plans) == 0.0
    assert [net_per_hour(each, 0.0) for each in plans] == [6.0, 5.0, None]
    assert cheapest(plans) is plans[1]
    assert cheapest([plans[2]]) is None
    assert cheapest([plans[1], plan(5, 1.0)]) is plans[1]


def test_offline_work_is_worth_what_the_cheapest_device_takes_for_it() -> None:
    """4 an hour with 1,000 tokens/s, or 3 an hour with 100. Alone, the devices do 1,000 and 600."""
    more, less = plan(1, 4.0, (1000.0, 1000.0)), plan(1, 3.0, (100.0, 600.0))
    credit = credit_per_token([more, less])
    assert credit == pytest.approx(4.0 / (3600 * 1000.0))
    assert net_per_hour(more, credit) == pytest.approx(0.0)
    assert net_per_hour(less, credit) == pytest.approx(2.6)
    assert cheapest([less, more]) is more


def test_the_price_of_a_million_tokens_is_the_whole_price_over_those_of_an_hour() -> None:
    assert plan(2, 3.0, (500.0, 1000.0)).price_per_million_tokens == pytest.approx(1e6 * 6.0 / (3600 * 500.0))
    assert plan(2, 3.0, (0.0, 1000.0)).price_per_million_tokens is None
    assert plan(2, 3.0).price_per_million_tokens is None
    assert plan(None, 3.0, (500.0, 1000.0)).price_per_million_tokens is None


def test_the_best_limits_cost_least_then_do_most_offline_work_then_have_most_chats_in_time() -> None:
    plans = {
        "a@1": plan(None, policy="a@1"),
        "a@2": plan(2, 1.0, (900.0, 900.0), policy="a@2"),
        "a@3": plan(1, 1.0, (300.0, 900.0), policy="a@3"),
        "a@4": plan(1, 1.0, (400.0, 900.0), policy="a@4"),
        "a@5": plan(1, 1.0, (400.0, 900.0), attained=0.99, policy="a@5"),
    }
    points = [PolicyPoint("a", number) for number in range(1, 6)]
    best = tuned(points, lambda point: plans[str(point)])
    assert best.policy == "a@5"
    assert [(each.policy, each.replicas) for each in best.limits] == [
        ("a@1", None),
        ("a@2", 2),
        ("a@3", 1),
        ("a@4", 1),
        ("a@5", 1),
    ]


def test_no_fewer_step_tokens_than_slots_are_tried() -> None:
    points = points_of("priority")
    assert len(points) == len(set(points)) == 12
    assert all((point.step_tokens or 0) >= (point.seats or 0) for point in points)
