"""Copies of single cache slots before a step computes."""

from dataclasses import dataclass, field
from typing import NamedTuple


class SlotRun(NamedTuple):
    """Copies slots ``first .. end - 1`` of one block to the same slots of another block."""

    source: int
    target: int
    first: int
    end: int

    @property
    def num_slots(self) -> int:
        return self.end - self.first


@dataclass(slots=True)
class SlotCopies:
    """All copies of a step: first all saves, then all moves, then all restores."""

    saves: list[SlotRun] = field(default_factory=list)
    """Copies from blocks to host memory, before anything is overwritten."""
    moves: list[SlotRun] = field(default_factory=list)
    """Copies between blocks; all are read before any is written."""
    restores: list[SlotRun] = field(default_factory=list)
    """Copies from host memory to blocks."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.moves or self.restores)

    @property
    def num_saved(self) -> int:
        """Number of slots copied to host memory."""
        return sum([run.num_slots for run in self.saves])

    @property
    def num_moved(self) -> int:
        return sum([run.num_slots for run in self.moves])

    @property
    def num_restored(self) -> int:
        """Number of slots copied from host memory."""
        return sum([run.num_slots for run in self.restores])

    def num_blocks(self, block_size: int) -> int:
        """Number of blocks copied to and from host memory."""
        return -(-(self.num_saved + self.num_restored) // block_size)
