"""Lengths of time for people."""

import pytest

from neaptide.durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (1e-9, "0 ms"),
        (0.0004, "under 1 ms"),
        (0.0006, "1 ms"),
        (0.1804, "180 ms"),
        (0.9995, "1 s"),
        (1.44, "1.4 s"),
        (9.95, "10 s"),
        (119.4, "119 s"),
        (120.0, "2 min"),
        (7_199.0, "120 min"),
        (7_560.0, "2.1 h"),
        (10_800.0, "3 h"),
        (172_800.0, "2 days"),
    ],
)
def test_a_length_of_time_has_two_digits_or_so(seconds: float, text: str) -> None:
    assert duration(seconds) == text
