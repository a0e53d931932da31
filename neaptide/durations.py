"""Lengths of time: their units in seconds, and as people read them."""

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
NOTHING_S = 1e-6
"""What is shorter is rounding, and 0 ms."""


def duration(seconds: float) -> str:
    """A length of time with two digits or so: under 1 ms, 4 ms, 180 ms, 1.4 s, 16 s, 75 min, 2.1 h, 3 days."""
    if NOTHING_S < seconds < 0.0005:
        return "under 1 ms"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{_one_decimal(seconds)} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / MINUTE_S:.0f} min"
    if seconds < 172_800:
        return f"{_one_decimal(seconds / HOUR_S)} h"
    return f"{_one_decimal(seconds / DAY_S)} days"


def _one_decimal(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
