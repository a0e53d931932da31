"""Numbers that stand for prompt blocks in the step log."""

from collections.abc import Callable, Iterable

Ranges = list[int]
"""Ascending runs of block numbers, flat: first number, count, first number, count, ..."""


class BlockNumbers:
    """The same number is the same block behind the same blocks (and salt): numbers go by ``kv.prefix_index`` hashes.

    No number is given twice. A block that was swept and comes again gets a new one.
    """

    LEAST_SWEPT = 1 << 15
    """Blocks that are always kept: sweeping takes milliseconds, and must be rare."""

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
        """Whether it is time to sweep: twice as many blocks are known as were kept last time."""
        return len(self._numbers) > self._sweep_at

    def sweep(self, is_kept: Callable[[bytes], bool]) -> None:
        """Forgets the blocks that are not kept."""
        self._numbers = {h: number for h, number in self._numbers.items() if is_kept(h)}
        self._sweep_at = max(self.LEAST_SWEPT, 2 * len(self._numbers))
