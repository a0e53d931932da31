"""Bisection over sizes."""

from collections.abc import Callable


def smallest(holds: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The smallest size from 1 to ``most`` that holds, assuming that every larger size holds too; None if none does.

    It starts at the guess and doubles its stride until one size failed and a larger one held. Then it bisects between
    them. Even without that assumption, the answer itself was tested and held, and the size below it failed.
    """
    failed, held = 0, most + 1
    size, stride = min(max(guess, 1), most), 1
    while failed + 1 < held:
        if holds(size):
            held = size
        else:
            failed = size
        if held > most:
            size = min(failed + stride, most)
        elif failed == 0:
            size = max(held - stride, 1)
        else:
            size = (failed + held) // 2
        stride *= 2
    return held if held <= most else None
