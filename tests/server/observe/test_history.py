"""The history of a server: bounded, and the sum of several servers' histories."""

import msgspec
import pytest

from neaptide.server.observe.history import (
    INTERVAL_S,
    KEPT_S,
    NUM_BUCKETS,
    Absence,
    History,
    Interval,
    Targets,
    bucket_of,
    merged,
    quantile,
    total,
)
from neaptide.server.observe.judgement import JudgedChoice
from tests.server.fake_engine import some_stats

MET, MISSED = JudgedChoice(0.1, 0.02, True, True), JudgedChoice(3.0, None, False, True)


class At:
    """A wall clock that is set."""

    def __init__(self) -> None:
        self.s = 1_000_000.0

    def __call__(self) -> float:
        return self.s


def test_an_interval_has_what_happened_in_it() -> None:
    at = At()
    history = History(at)
    history.on_choice("default", MET)
    history.on_choice("default", MISSED)
    history.on_ended("default", "ok", None)
    history.on_ended("flex", "shed", "overloaded")
    history.on_step(some_stats(online_decode_tokens=3, offline_prefill_tokens=40, margin_s=0.0, duration_s=0.02))
    at.s += INTERVAL_S
    history.on_choice("priority", MET)
    first, second = history.intervals
    assert first.targets == {"default": Targets(1, 1, 2, 0, 1)}
    assert (first.outcomes, first.errors, first.ended) == (
        {"ok": 1, "shed": 1},
        {"overloaded": 1},
        {"default": 1, "flex": 1},
    )
    assert (first.online_tokens, first.offline_tokens, first.steps, first.steps_within_margin) == (3, 40, 1, 0)
    assert first.predicted_s == pytest.approx(0.011)
    assert first.occupancy[4:8] == (60, 0, 4, 0)
    assert (second.start_s, second.targets) == (first.start_s + INTERVAL_S, {"priority": Targets(1, 0, 1, 0)})


def test_fifteen_minutes_are_kept_and_no_more() -> None:
    at = At()
    history = History(at)
    for _ in range(1000):
        history.on_choice("default", MET)
        at.s += INTERVAL_S
    assert len(history.intervals) == KEPT_S // INTERVAL_S
    at.s += KEPT_S + INTERVAL_S
    assert history.intervals == []


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    at = At()
    history = History(at)
    history.on_choice("default", MET)
    at.s -= 60
    history.on_choice("default", MET)
    assert [one.targets["default"].ttft_met for one in history.intervals] == [2]


@pytest.mark.parametrize("seconds", [0.0005, 0.001, 0.0011, 0.05, 1.0, 30.0])
def test_a_bucket_ends_at_most_a_fiftieth_above_its_values(seconds: float) -> None:
    top_s = quantile({bucket_of(seconds): 1}, 0.99)
    assert top_s is not None
    assert seconds <= top_s + 1e-9
    assert top_s <= max(seconds, 0.001) * 1.02 + 1e-9


def test_quantiles_are_of_the_rank() -> None:
    buckets = {bucket_of(0.1): 99, bucket_of(5.0): 1}
    assert quantile(buckets, 0.99) == quantile({bucket_of(0.1): 1}, 1.0)
    assert quantile(buckets | {bucket_of(5.0): 2}, 0.99) == quantile({bucket_of(5.0): 1}, 1.0)
    assert quantile({}, 0.5) is None
    assert bucket_of(1e9) == NUM_BUCKETS - 1


def test_histories_of_two_servers_add_up() -> None:
    def one(start_s: int, tokens: int, free: int) -> Interval:
        return Interval(
            start_s=start_s,
            online_tokens=tokens,
            occupancy=(0, 0, 0, 0, free),
            ttft={3: 1},
            targets={"default": Targets(1, 0, 1, 0)},
        )

    found = merged([[one(10, 5, 60), one(15, 1, 50)], [one(15, 7, 30)]])
    assert [(i.start_s, i.online_tokens, i.occupancy[4], i.ttft) for i in found] == [
        (10, 5, 60, {3: 1}),
        (15, 8, 80, {3: 2}),
    ]
    assert found[1].targets == {"default": Targets(2, 0, 2, 0)}
    assert (total(found).online_tokens, total(found).occupancy[4]) == (13, 80)
    assert msgspec.json.decode(msgspec.json.encode(found[1]), type=Interval) == found[1]


def test_a_time_without_an_engine_ends_when_one_is_ready_and_is_forgotten_in_the_end() -> None:
    at = At()
    history = History(at)
    history.on_engine_ready(None)
    assert history.absences == []
    lost_s = at.s
    history.on_engine_lost(None)
    at.s += 3
    history.on_engine_lost(None)  # the next engine, before it was ready
    assert history.absences == [Absence(lost_s)]
    at.s += 3
    history.on_engine_ready(None)
    assert history.absences == [Absence(lost_s, lost_s + 6)]
    at.s += KEPT_S + INTERVAL_S
    assert history.absences == []
