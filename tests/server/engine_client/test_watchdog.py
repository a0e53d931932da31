"""When the silence of an engine means that it hangs. Times are passed in."""

import pytest

from neaptide.server.engine_client.watchdog import Watchdog
from tests.server.fake_engine import some_stats

CEILING_S = 120.0


def served(num_steps: int, duration_s: float = 0.1, predicted_s: float = 0.1) -> Watchdog:
    """The watchdog of an engine that has done so many steps and spoke of the last one at 0."""
    watchdog = Watchdog(CEILING_S, 0.0)
    for _ in range(num_steps):
        watchdog.hear(0.0, [some_stats(duration_s=duration_s, predicted_s=predicted_s)])
    return watchdog


def test_an_engine_between_steps_hangs_after_nine_seconds() -> None:
    watchdog = Watchdog(CEILING_S, 100.0)
    assert watchdog.left_s(0.0, 108.0) == 1.0
    assert watchdog.left_s(0.0, 109.0) == 0.0
    watchdog.hear(109.0)
    assert watchdog.left_s(0.0, 109.0) == 9.0


@pytest.mark.parametrize(
    ("predicted_s", "limit_s"),
    [(0.1, 9.0), (3.0, 9.0), (4.0, 12.0), (40.0, 120.0), (1e9, 120.0), (float("inf"), 120.0)],
)
def test_a_step_may_take_three_times_its_prediction_up_to_the_ceiling(predicted_s: float, limit_s: float) -> None:
    assert served(0).limit_s(predicted_s) == limit_s


def test_a_prediction_that_is_no_number_leaves_the_shortest_limit() -> None:
    assert served(0).limit_s(float("nan")) == 9.0


@pytest.mark.parametrize("stall_s", [1.0, 9.0, 25.0, 60.0])
@pytest.mark.parametrize("num_steps", [0, 3, 19, 20, 500])
def test_one_pause_of_the_machine_changes_no_limit(stall_s: float, num_steps: int) -> None:
    watchdog = served(num_steps)
    watchdog.hear(0.0, [some_stats(duration_s=stall_s, predicted_s=0.1)])
    assert watchdog.limit_s(0.1) == 9.0
    assert watchdog.limit_s(5.0) == 15.0


def test_a_machine_that_is_always_slow_is_given_the_time_that_it_takes() -> None:
    assert served(19, duration_s=0.4).limit_s(5.0) == 15.0
    assert served(20, duration_s=0.4).limit_s(5.0) == pytest.approx(60.0)
    assert served(20, duration_s=0.01).limit_s(5.0) == 15.0  # a fast one is given no less


def test_what_was_slow_is_forgotten() -> None:
    watchdog = served(200, duration_s=1.0)
    for _ in range(200):
        watchdog.hear(0.0, [some_stats(duration_s=0.1, predicted_s=0.1)])
    assert watchdog.limit_s(5.0) == 15.0


def test_steps_without_a_prediction_say_nothing() -> None:
    assert served(200, predicted_s=0.0).limit_s(5.0) == 15.0


def test_time_in_which_the_server_stood_still_is_no_silence_of_the_engine() -> None:
    watchdog = served(0)
    watchdog.excuse(60.0)
    watchdog.excuse(-1.0)  # a look that came early takes nothing back
    assert watchdog.left_s(0.0, 68.0) == 1.0
