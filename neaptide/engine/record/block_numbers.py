"""Numbers of prompt blocks in the step log."""

from collections.abc import Callable, Iterable

Ranges = list[int]
"""Ascending runs of block numbers, flat: first number, count, next first number, next count."""


class BlockNumbers:
    """Numbers blocks by their ``kv.prefix_index`` hashes: equal numbers mean equal blocks after equal blocks and salt.

    No number is used twice. A block that was swept and comes again gets a new number.
    """

    LEAST_SWEPT = 1 << 15
    """Number of blocks up to which none is swept: a sweep takes milliseconds, so it must be rare."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._next = 0
        self._sweep_at = self.LEAST_SWEPT

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, hashes: Iterable[bytes]) -> Ranges:
        ranges: Ranges = []
        expected = -1
        for block_hash in hashes:
            number = self._numbers.setdefault(block_hash, self._next)
            self._next += number == self._next
            if number == expected:
                ranges[-1] += 1
            else:
                ranges += (number, 1)
            expected = number + 1
        return ranges

    @property
    def is_full(self) -> bool:
        """Whether to sweep: there are twice as many blocks as the last sweep kept."""
        return len(self._numbers) > self._sweep_at

    def sweep(self, is_kept: Callable[[bytes], bool]) -> None:
        """Forgets the blocks that are not kept."""
        self._numbers = {h: number for h, number in self._numbers.items() if is_kept(h)}
        self._sweep_at = max(self.LEAST_SWEPT, 2 * len(self._numbers))
