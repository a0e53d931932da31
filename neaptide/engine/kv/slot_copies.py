"""Copies of single slots that a step makes before it computes."""

from dataclasses import dataclass, field
from typing import NamedTuple


class SlotRun(NamedTuple):
    """Slots ``first .. end - 1`` of one block become those of another; the same slots, whichever way they are read."""

    source: int
    target: int
    first: int
    end: int

    @property
    def num_slots(self) -> int:
        return self.end - self.first


@dataclass(slots=True)
class SlotCopies:
    """All that a step copies, consolidated (BROS section 5.2): first all saves, then all moves, then all restores."""

    saves: list[SlotRun] = field(default_factory=list)
    """From blocks to blocks of host memory, before anything is overwritten."""
    moves: list[SlotRun] = field(default_factory=list)
    """From blocks to blocks; all are read before any is written."""
    restores: list[SlotRun] = field(default_factory=list)
    """From blocks of host memory to blocks."""
    touched: list[tuple[str, int]] = field(default_factory=list)
    """Requests, and the number of the block in their table, whose tokens these are."""
    num_checkpointed: int = 0
    """Requests that were whole and lost slots to another tenant ..."""
    num_swapped: int = 0
    """... and those that left their blocks altogether."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.moves or self.restores)

    @property
    def num_saved(self) -> int:
        """Slots that go to host memory."""
        return sum([run.num_slots for run in self.saves])

    @property
    def num_moved(self) -> int:
        return sum([run.num_slots for run in self.moves])

    @property
    def num_restored(self) -> int:
        """Slots that come back."""
        return sum([run.num_slots for run in self.restores])

    def num_blocks(self, block_size: int) -> int:
        """To and from host memory, in blocks."""
        return -(-(self.num_saved + self.num_restored) // block_size)
