"""Lengths of time: their units in seconds, and as people read and write them."""

import re

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
_UNIT_S = {"d": DAY_S, "h": HOUR_S, "m": MINUTE_S, "s": 1}
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


def window_seconds(window: str) -> int:
    """Length of a window such as ``24h`` or ``1h30m``. Raises ValueError for anything else."""
    parts = re.findall(r"(\d{1,6})([dhms])", window)
    if not parts or "".join(number + unit for number, unit in parts) != window:
        raise ValueError(f"{window!r} is not a length of time such as 24h, 90m or 1h30m")
    seconds = sum(int(number) * _UNIT_S[unit] for number, unit in parts)
    if seconds == 0:
        raise ValueError("a completion window cannot be empty")
    return seconds


def _one_decimal(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
