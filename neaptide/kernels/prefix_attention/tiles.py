"""Tile sizes of the attention kernel, read from a file. Nothing is searched for while serving."""

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tile sizes of a launch; rows and keys are powers of 2, at least 16."""

    wide_rows: int
    """Most rows per item, tokens times query heads per KV head."""
    wide_keys: int
    """Keys per tile of a wide item."""
    narrow_rows: int
    """Items of at most this many rows use narrow tiles."""
    narrow_keys: int
    stages: int
    """Tiles of keys in flight at once."""
    warps: int
    registers: int
    """Most registers per thread, where the compiler accepts a limit (NVIDIA's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileEntry:
    """The tiles for some heads on some devices."""

    element_bytes: int
    head_dim: int
    """Also used for smaller heads, down to the next entry's size."""
    group: int | None
    """Query heads per KV head; None for any."""
    device: str | None
    """Prefix of the device's name; None for any."""
    source: str
    """How the tiles were found."""
    tiles: Tiles


def load_tiles(path: Path = FILE) -> list[TileEntry]:
    """The entries of the file.

    Raises:
        TypeError: an entry lacks a field or has an unknown one.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    return [TileEntry(**entry | {"tiles": Tiles(**entry["tiles"])}) for entry in entries]


def pick_tiles(entries: list[TileEntry], head_dim: int, group: int, element_bytes: int, device: str) -> Tiles | None:
    """The most specific entry for these heads on this device; None if no entry has heads that large."""
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
