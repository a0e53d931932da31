"""Forecasts of the KV blocks that online work will hold."""

import math
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.interfaces import HeadroomPredictor
from neaptide.estimator.forecast import (
    WARM_UP_ARRIVALS,
    ConformalForecast,
    MuSigmaForecast,
    QuantileForecast,
    TwoSpeedForecast,
    WindowForecast,
)
from neaptide.estimator.recipes import build_headroom

Forecast = TypeVar("Forecast", bound=WindowForecast)
OF_ITS_WINDOW = [MuSigmaForecast, QuantileForecast, ConformalForecast]
"""They know what is in the window, and nothing else."""
FORECASTS = [*OF_ITS_WINDOW, TwoSpeedForecast]


def warmed(forecast: Forecast) -> Forecast:
    for _ in range(WARM_UP_ARRIVALS):
        forecast.observe_arrival(0.0)
    return forecast


def feed(forecast: HeadroomPredictor, held_blocks: list[int], start_s: int = 0) -> list[int]:
    """One observation at the start of each second; the headroom after each."""
    headroom = []
    for second, blocks in enumerate(held_blocks, start_s):
        forecast.observe(second, blocks)
        headroom.append(forecast.headroom_blocks(second))
    return headroom


def test_mu_sigma_is_the_mean_plus_k_deviations() -> None:
    forecast = warmed(MuSigmaForecast(1000, k=2.0, horizon_s=2))
    # closed bins hold 10, 30, 10, 30: mean 20, deviation 10
    assert feed(forecast, [10, 30, 10, 30, 0])[-1] == 40


def test_mu_sigma_weighs_values_by_the_time_they_were_held() -> None:
    forecast = warmed(MuSigmaForecast(1000, k=2.0, horizon_s=1))
    for now_s, held in [(0.0, 0), (0.75, 80), (1.0, 0)]:
        forecast.observe(now_s, held)
    # 80 for a quarter of the time: mean 20, mean square 1600, deviation sqrt(1200)
    assert forecast.headroom_blocks(1.0) == math.ceil(20 + 2 * math.sqrt(1200))


def test_mu_sigma_takes_the_last_value_to_last_through_a_silence() -> None:
    forecast = warmed(MuSigmaForecast(1000, k=1.0, horizon_s=1))
    forecast.observe(0.0, 40)
    forecast.observe(1.0, 0)
    forecast.observe(4.0, 0)
    # seconds 0 to 3 held 40, 0, 0, 0: mean 10, mean square 400, deviation sqrt(300)
    assert forecast.headroom_blocks(4.0) == math.ceil(10 + math.sqrt(300))


def test_quantile_is_that_of_the_horizons_peaks() -> None:
    held = [5, 1, 9, 2, 2, 2, 7, 2, 2, 0]
    # peaks of the eight horizons of two seconds that have passed: 5 9 9 2 2 7 7 2
    for q, expected in [(0.25, 2), (0.375, 2), (0.5, 5), (0.75, 7), (0.8, 9), (1.0, 9)]:
        assert feed(warmed(QuantileForecast(1000, q=q, horizon_s=2)), held)[-1] == expected


def test_conformal_is_midway_between_present_and_mean_plus_two_deviations_at_first() -> None:
    forecast = warmed(ConformalForecast(1000, horizon_s=4))
    # mean 20, deviation 10, present 30
    assert feed(forecast, [10, 30, 10, 30, 0])[-1] == 25 + 2 * 10


def test_conformal_learns_from_horizons_that_have_passed_only() -> None:
    forecast = ConformalForecast(1000, alpha=0.1, horizon_s=2)
    feed(forecast, [10, 10, 10])
    assert forecast._k == 2.0
    # The horizon of seconds 1 and 2 has passed with the third second: 10 were reserved for it, and 10 sufficed.
    feed(forecast, [50], start_s=3)
    assert forecast._k == pytest.approx(2.0 - 0.05 * 0.1)
    # The one of seconds 2 and 3 did not see 50 coming.
    feed(forecast, [50], start_s=4)
    assert forecast._k == pytest.approx(2.0 - 0.05 * 0.1 + 0.05 * 0.9)


def test_conformal_owes_no_misses_after_a_long_silence() -> None:
    forecast = ConformalForecast(1000)
    feed(forecast, [100] * 10 + [0] * 3000)
    assert forecast._k == 0.0


def test_two_speed_keeps_a_tenth_until_a_residual_is_known() -> None:
    """Horizons of two seconds: nothing is learned of those that begin in the first four, and the fifth ends at 7 s."""
    assert feed(warmed(TwoSpeedForecast(1000, horizon_s=2)), [20] * 8) == [100] * 7 + [20]


def test_two_speed_reserves_what_peaks_were_above_the_level() -> None:
    """Demand of 10 that rises to 50 for one second in four: every horizon's peak is 50, and the level is the same at
    the same second of each period once two minutes are known, and all residuals of before are forgotten."""
    forecast = warmed(TwoSpeedForecast(1000, horizon_s=4))
    headroom = feed(forecast, [50 if second % 4 == 3 else 10 for second in range(4000)])
    # mean 20; at the end of a bin that held 10 the level is 0.6 * 10 + 0.4 * 20 = 14: the residual of such a horizon is
    # 36, and that is the 95% quantile; at the end of one that held 50 the level is 38.
    assert headroom[-3:] == [14 + 36, 14 + 36, 50]
    assert forecast.headroom_blocks(4000.0) == 50
    forecast.observe(4000.0, 10)
    assert forecast.headroom_blocks(4000.0) == 38 + 36


def test_two_speed_learns_nothing_from_the_first_two_horizons() -> None:
    """A machine that fills from nothing."""
    forecast = TwoSpeedForecast(1000, horizon_s=5)
    feed(forecast, [10 * second for second in range(10)] + [90] * 6)
    assert not forecast._residuals
    feed(forecast, [90], start_s=16)
    assert len(forecast._residuals) == 1


def test_two_speed_reserves_less_than_conformal_after_a_step_in_load() -> None:
    """Five minutes at 1,000, ten at 3,000. Conformal's deviation is still that of the step, and its factor what the
    step's misses made of it."""
    rng = np.random.default_rng(0)
    level = np.repeat([1000, 3000], [300, 600])
    held = [int(x) for x in level * rng.uniform(0.9, 1.1, len(level))]
    two_speed, conformal = (feed(warmed(kind(20_000)), held)[-1] for kind in (TwoSpeedForecast, ConformalForecast))
    assert 3200 < two_speed < 4200
    assert conformal > 4700


@pytest.mark.parametrize(("kind", "ahead_s"), [("near", 5), ("two-speed", 30)])
def test_near_reserves_for_five_seconds_of_a_rise_where_others_do_for_thirty(kind: str, ahead_s: int) -> None:
    """Ten blocks more every second."""
    forecast = build_headroom(kind, 20_000)
    for _ in range(WARM_UP_ARRIVALS):
        forecast.observe_arrival(0.0)
    held = list(range(0, 8000, 10))
    assert feed(forecast, held)[-1] - held[-1] == pytest.approx(10 * ahead_s, abs=20)


def test_two_speed_expects_a_rise_to_go_on_until_enough_arrivals_are_known() -> None:
    """A tenth alone, 100, would be nothing above what is held once that is more. Ten blocks more every second, then ten
    less: of the bins in a horizon of five seconds the least peak is that of five seconds ago, or of the last one."""
    rising, falling = list(range(0, 400, 10)), list(range(390, 0, -10))
    headroom = feed(TwoSpeedForecast(1000, horizon_s=5), rising + falling)
    assert headroom[:40] == [max(100, held + 50) for held in rising]
    # The peak was 390 and fell to 380: of the five seconds before only those after the peak are below what is held.
    assert headroom[40:46] == [390 + 40, 380 + 20, 370, 360, 350, 340]
    assert headroom[46:] == [max(100, held) for held in falling[6:]]


def test_two_speed_goes_by_residuals_as_soon_as_enough_arrivals_are_known() -> None:
    forecast = TwoSpeedForecast(1000, horizon_s=2)
    assert feed(forecast, [20] * 20) == [100] * 20
    warmed(forecast)
    assert feed(forecast, [20], start_s=20) == [20]


def test_two_speed_forgets_residuals_after_half_an_hour() -> None:
    forecast = warmed(TwoSpeedForecast(20_000, horizon_s=1, window_s=10))
    feed(forecast, [100] * 10 + [5000, 100] * 200)
    feed(forecast, [100] * 1801, start_s=410)
    assert forecast.headroom_blocks(2210.0) == 100


@pytest.mark.parametrize("kind", OF_ITS_WINDOW)
def test_a_tenth_of_the_pool_is_kept_until_enough_arrivals_are_known(kind: type[WindowForecast]) -> None:
    forecast = kind(1000, horizon_s=2)
    assert forecast.headroom_blocks(0.0) == 100
    assert feed(forecast, [1, 1, 1, 300, 1]) == [100, 100, 100, 300, 100]
    for _ in range(WARM_UP_ARRIVALS - 1):
        forecast.observe_arrival(5.0)
    assert forecast.headroom_blocks(5.0) == 100
    forecast.observe_arrival(5.0)
    assert forecast.headroom_blocks(5.0) != 100


def test_enough_arrivals_are_200() -> None:
    assert WARM_UP_ARRIVALS == 200


def test_quantile_keeps_the_peaks_of_horizons_that_began_in_the_window() -> None:
    """A window of 5 s and horizons of 2 s: four horizons. The peak of 9 has left with the fifth after it."""
    forecast = warmed(QuantileForecast(1000, q=1.0, window_s=5, horizon_s=2))
    assert feed(forecast, [9, 1, 1, 1, 1, 1, 1, 1])[-3:] == [9, 1, 1]


@pytest.mark.parametrize("kind", OF_ITS_WINDOW)
def test_a_tenth_of_the_pool_is_kept_until_a_horizon_has_passed(kind: type[WindowForecast]) -> None:
    forecast = warmed(kind(1000, horizon_s=30))
    headroom = feed(forecast, [1] * 31)
    assert headroom[:30] == [100] * 30
    assert headroom[30] == 1


@pytest.mark.parametrize("kind", OF_ITS_WINDOW)
def test_what_left_the_window_is_forgotten(kind: type[WindowForecast]) -> None:
    forecast = warmed(kind(1000, window_s=10, horizon_s=2))
    assert feed(forecast, [500] * 5 + [7] * 7)[-1] > 7
    assert feed(forecast, [7] * 8, start_s=12)[-1] == 7


@pytest.mark.parametrize("kind", OF_ITS_WINDOW)
def test_a_silence_longer_than_the_window_empties_it(kind: type[WindowForecast]) -> None:
    forecast = warmed(kind(1000, window_s=60, horizon_s=30))
    feed(forecast, [500] * 60 + [0])
    assert feed(forecast, [0], start_s=1_000_000) == [0]


@pytest.mark.parametrize("kind", FORECASTS)
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 100)), min_size=1, max_size=100),
    st.booleans(),
)
def test_headroom_covers_what_is_held_and_fits_the_pool(
    kind: type[WindowForecast], observations: list[tuple[float, int]], is_warm: bool
) -> None:
    forecast, again = kind(100, window_s=50, horizon_s=5), kind(100, window_s=50, horizon_s=5)
    if is_warm:
        warmed(forecast), warmed(again)
    now_s = 0.0
    for gap_s, held in observations:
        now_s += gap_s
        forecast.observe(now_s, held)
        again.observe(now_s, held)
        assert held <= forecast.headroom_blocks(now_s) <= 100
        assert forecast.headroom_blocks(now_s) == again.headroom_blocks(now_s)


def drifting_demand(num_seconds: int, seed: int) -> list[int]:
    """Slow tide, a level that doubles half way, bursts from a heavy tail."""
    rng = np.random.default_rng(seed)
    second = np.arange(num_seconds)
    tide = 2000 + 1000 * np.sin(second / 2000)
    tide[num_seconds // 2 :] *= 2
    bursts = np.zeros(num_seconds)
    for start in rng.integers(0, num_seconds, num_seconds // 60):
        bursts[start : start + 20] += 300 * rng.pareto(2.0)
    return [int(held) for held in np.minimum(20_000, tide * rng.uniform(0.8, 1.2, num_seconds) + bursts)]


def coverage(forecast: WindowForecast, held: list[int], horizon_s: int = 30) -> float:
    headroom = feed(forecast, held)
    covered = [max(held[t + 1 : t + 1 + horizon_s]) <= headroom[t] for t in range(300, len(held) - horizon_s)]
    return sum(covered) / len(covered)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_conformal_keeps_its_coverage_on_drifting_demand(alpha: float) -> None:
    held = drifting_demand(12_000, seed=1)
    assert coverage(warmed(ConformalForecast(20_000, alpha=alpha)), held) == pytest.approx(1 - alpha, abs=0.02)


def test_two_speed_keeps_its_coverage_on_drifting_demand() -> None:
    held = drifting_demand(12_000, seed=1)
    assert coverage(warmed(TwoSpeedForecast(20_000)), held) == pytest.approx(0.95, abs=0.02)


def test_mu_plus_two_sigma_misses_its_coverage_on_drifting_demand() -> None:
    assert coverage(warmed(MuSigmaForecast(20_000)), drifting_demand(12_000, seed=1)) < 0.9


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1])
def test_a_quantile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="q must be in"):
        QuantileForecast(100, q=q)


@pytest.mark.parametrize("kind", [ConformalForecast, TwoSpeedForecast])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_an_alpha_outside_its_range_is_refused(
    kind: type[ConformalForecast] | type[TwoSpeedForecast], alpha: float
) -> None:
    with pytest.raises(ValueError, match="alpha must be in"):
        kind(100, alpha=alpha)


@pytest.mark.parametrize("kind", FORECASTS)
def test_being_told_the_same_again_changes_nothing(kind: type[WindowForecast]) -> None:
    """Not even a rounding: the step log leaves out planning in which nothing happened."""
    often, rarely = warmed(kind(100)), warmed(kind(100))
    for step in range(20_000):
        now_s, held = 0.005 * step, 30 + step // 700 % 3
        often.observe(now_s, held)
        if step % 100 == 0:
            rarely.observe(now_s, held)
        if step % 1000 == 0:
            assert often.headroom_blocks(now_s) == rarely.headroom_blocks(now_s)
            assert often.__dict__ == rarely.__dict__
