"""Which cached block goes first when no block is free."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice


class EvictionOrder:
    """Cached blocks, first to go first: least recently released. Every operation is O(1)."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        """The block has lost its last reader: from now on it goes last."""
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        """The block has a reader again, or nothing worth keeping."""
        del self._blocks[block]

    def pop(self, count: int) -> list[int]:
        """Takes the blocks that go first."""
        blocks = list(islice(self._blocks, count))
        for block in blocks:
            del self._blocks[block]
        return blocks
