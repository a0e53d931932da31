"""Bisection over sizes."""

from collections.abc import Callable


def smallest(holds: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The least size from 1 to ``most`` that holds, if a size holds wherever a smaller one does; None if none does.

    It goes out from the guess in strides that double, until one size failed and a larger one held, and bisects between
    them. Whatever the sizes are like, the answer was asked for and held, and the size below it was and failed.
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
