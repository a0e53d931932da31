import pytest

from neaptide.cluster.capacity.stretch import busiest, cut, works_s
from tests.simulation.scenes import online, profile

TRACE = online((0.0, 8, 1), (4.0, 8, 1), (5.0, 8, 1), (9.0, 8, 1), (20.0, 8, 1))


@pytest.mark.parametrize(
    ("work_s", "length_s", "start_s"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 5.0, 0.0),  # 0, 4 and 5, the end included; 4, 5 and 9 are as many, and later
        ([1.0, 1.0, 1.0, 2.0, 1.0], 5.0, 4.0),
        ([1.0, 1.0, 1.0, 1.0, 9.0], 5.0, 20.0),
        ([1.0, 1.0, 1.0, 1.0, 9.0], 100.0, 0.0),
    ],
)
def test_the_busiest_span_begins_at_an_arrival_and_has_the_most_work(
    work_s: list[float], length_s: float, start_s: float
) -> None:
    assert busiest(TRACE, work_s, length_s) == (start_s, start_s + length_s)


def test_a_stretch_has_margins_on_a_clock_of_its_own() -> None:
    stretch = cut(TRACE, (4.0, 8.0), 4.0)
    assert [request.arrival_s for request in stretch.requests] == [0.0, 4.0, 5.0, 9.0]
    assert stretch.window_s == (4.0, 5.0)
    assert (stretch.start_s, stretch.end_s, stretch.num_inside) == (4.0, 5.0, 2)


def test_a_margin_may_reach_beyond_the_trace() -> None:
    stretch = cut(TRACE, (0.0, 20.0), 30.0)
    assert [request.arrival_s for request in stretch.requests] == [30.0, 34.0, 35.0, 39.0, 50.0]
    assert stretch.window_s == (30.0, 50.0)
    assert stretch.start_s == 0.0


def test_work_is_what_a_cache_without_limit_leaves() -> None:
    """The scene's profile charges 0.1 ms a token, 0.2 ms a prompt, 0.1 ms a decode, and 0.1 us for a pair of tokens."""
    first, second = online((0.0, 8, 1), (1.0, 8, 1))
    requests = [first, second, first]
    prompt_s = 8 * 1e-4 + 2e-4 + 36 * 1e-7
    half_cached_s = 4 * 1e-4 + 2e-4 + (5 + 6 + 7 + 8) * 1e-7 + 4 * 1e-6
    assert works_s(requests, profile(), 1.0, 4) == pytest.approx([prompt_s, prompt_s, half_cached_s])
