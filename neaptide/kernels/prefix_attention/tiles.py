"""Which tiles the kernel takes: fixed, from a file, never searched for while serving."""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of a launch; rows and keys are powers of 2, at least 16."""

    wide_rows: int
    """Rows, tokens times query heads per KV head, of an item at most."""
    wide_keys: int
    """Keys of a tile of such an item."""
    narrow_rows: int
    """Items of at most so many rows take tiles of this size."""
    narrow_keys: int
    stages: int
    """Tiles of keys that are on their way at once."""
    warps: int
    registers: int
    """Of a thread at most, where the compiler takes a limit (NVIDIA's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What holds for which heads on which device."""

    element_bytes: int
    head_dim: int
    """And smaller ones, down to the next entry."""
    group: int | None
    """Query heads per KV head; None for any."""
    device: str | None
    """A device's name begins so; None for any."""
    source: str
    """How they were found."""
    tiles: Tiles


def load_tiles(path: Path = FILE) -> list[Entry]:
    """
    Raises:
        TypeError: an entry lacks a field, or has one that nobody knows.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [Entry(**entry | {"tiles": Tiles(**entry["tiles"])}) for entry in entries]


def pick_tiles(entries: list[Entry], head_dim: int, group: int, element_bytes: int, device: str) -> Tiles | None:
    """The entry that says most about these heads on this device; None if heads are larger than those of all entries."""
    fitting = [
        entry
        for entry in entries
        if entry.element_bytes == element_bytes
        and entry.head_dim >= head_dim
        and entry.group in (None, group)
        and (entry.device is None or device.startswith(entry.device))
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda entry: (entry.head_dim, entry.device is None, entry.group is None)).tiles
