"""How much a key has used: any 60 seconds, days of UTC, clocks that jump."""

from hypothesis import given
from hypothesis import strategies as st

from neaptide.durations import DAY_S
from neaptide.server.limits.usage import Excess, KeyLimits, KeyUsage, Level, LimitName, Times

RPM, TPM, TPD = LimitName
NOON_S = 20_000 * DAY_S + DAY_S / 2


def at(steady_s: float, unix_s: float | None = None) -> Times:
    return Times(steady_s, NOON_S + steady_s if unix_s is None else unix_s)


def taken(usage: KeyUsage, limits: KeyLimits, tokens: int, now: Times) -> Excess | None:
    return usage.take(limits, {RPM: 1, TPM: tokens, TPD: tokens}, now)


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=150), st.integers(1, 9))
def test_no_sixty_seconds_have_more_than_the_limit_and_none_below_it_is_refused(
    gaps_s: list[float], limit: int
) -> None:
    usage, now_s, admitted = KeyUsage(0.1), 0.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        excess = taken(usage, KeyLimits(requests_per_minute=limit), 0, at(now_s))
        if excess is None:
            admitted.append(now_s)
            assert sum(then_s > now_s - 60.0 for then_s in admitted) <= limit
        else:
            # Slots are a tenth of a second wide, so a place is free up to that much later.
            assert sum(then_s > now_s - 60.2 for then_s in admitted) >= limit


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 50)), min_size=1, max_size=60))
def test_whoever_waits_as_told_is_admitted(arrivals: list[tuple[float, int]]) -> None:
    usage, limits, now_s = KeyUsage(0.1), KeyLimits(requests_per_minute=3, tokens_per_minute=60), 0.0
    for gap_s, tokens in arrivals:
        now_s += gap_s
        waits = 0
        while (excess := taken(usage, limits, tokens, at(now_s))) is not None:
            assert excess.wait_s is not None
            now_s += excess.wait_s + 1e-6
            waits += 1
        assert waits <= 2  # one limit may be free before the other


def test_a_refusal_says_which_limit_and_counts_nothing() -> None:
    usage, limits = KeyUsage(0.1), KeyLimits(requests_per_minute=5, tokens_per_minute=100)
    assert taken(usage, limits, 80, at(0.0)) is None
    assert taken(usage, limits, 30, at(10.0)) == Excess(TPM, 100, 80, 30, 50.0)
    assert usage.level(RPM, at(10.0)) == Level(1, 50.0)
    assert taken(usage, limits, 20, at(10.0)) is None


def test_what_never_fits_says_no_time() -> None:
    assert taken(KeyUsage(0.1), KeyLimits(tokens_per_minute=100), 101, at(0.0)) == Excess(TPM, 100, 0, 101, None)


def test_what_is_given_back_can_be_taken_again_and_only_while_it_counts() -> None:
    usage, limits = KeyUsage(0.1), KeyLimits(tokens_per_minute=100)
    assert taken(usage, limits, 100, at(0.0)) is None
    place = usage.place(at(0.0))
    usage.give_back(TPM, 60, place)
    assert taken(usage, limits, 60, at(1.0)) is None
    assert taken(usage, limits, 100, at(62.0)) is None
    usage.give_back(TPM, 40, place)
    assert usage.level(TPM, at(62.0)).used == 100


def test_a_day_ends_at_midnight() -> None:
    usage, limits = KeyUsage(0.1), KeyLimits(tokens_per_day=10)
    before = at(0.0, 20_000 * DAY_S + DAY_S - 5.0)
    assert taken(usage, limits, 10, before) is None
    assert taken(usage, limits, 1, before) == Excess(TPD, 10, 10, 1, 5.0)
    assert taken(usage, limits, 1, at(5.0, 20_001 * DAY_S)) is None


def test_a_wall_clock_that_jumps_neither_clears_a_minute_nor_loses_a_day() -> None:
    usage, limits = KeyUsage(0.1), KeyLimits(requests_per_minute=2, tokens_per_day=10)
    assert taken(usage, limits, 6, at(0.0, NOON_S)) is None
    # forward by two days: another day's count, the same minute
    assert taken(usage, limits, 6, at(1.0, NOON_S + 2 * DAY_S)) is None
    assert taken(usage, limits, 1, at(2.0, NOON_S + 2 * DAY_S)) == Excess(RPM, 2, 2, 1, 58.0)
    # and back: today's count is as it was
    assert taken(usage, limits, 5, at(90.0, NOON_S + 90.0)) == Excess(TPD, 10, 6, 5, DAY_S / 2 - 90.0)
    assert taken(usage, limits, 4, at(90.0, NOON_S + 90.0)) is None


def test_a_steady_clock_that_begins_anew_makes_nobody_wait_for_the_old_time() -> None:
    """A database on another machine may have another time."""
    usage, limits = KeyUsage(1.0, 2.0), KeyLimits(requests_per_minute=1)
    assert taken(usage, limits, 0, at(100_000.0)) is None
    assert taken(usage, limits, 0, at(10.0)) == Excess(RPM, 1, 1, 1, 62.0)
    assert taken(usage, limits, 0, at(72.0)) is None


def test_counts_come_back_as_they_were_written() -> None:
    usage, limits = KeyUsage(1.0), KeyLimits(requests_per_minute=9, tokens_per_minute=900, tokens_per_day=5_000)
    for second in range(3):
        assert taken(usage, limits, 100, at(second)) is None
    copy, days = KeyUsage(1.0), KeyUsage(1.0)
    copy.decode(usage.encoded())
    days.decode(usage.encoded_days())
    assert [copy.level(name, at(3.0)).used for name in LimitName] == [3, 300, 300]
    assert [days.level(name, at(3.0)).used for name in LimitName] == [0, 0, 300]
