"""Reply file of a job: data for the reply to each line, so that a line is prepared only once.

``STEM.replies`` holds records one after another, of the compiler's own form. Lines that ask for the same kind of reply
share a record. The job's plan has the place and the checksum of each. Nothing else depends on the file: a line whose
record is missing or damaged is prepared again from the input.
"""

import os
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from neaptide.engine.private_files import private_opener

VERSION = 1
"""Version of the records. Those of another version are not used."""
_PLACE = np.dtype([("offset", "<u8"), ("num_bytes", "<u4"), ("checksum", "<u4")])
_NO_PLACE = np.zeros((), _PLACE).tobytes()
MAX_SHARED_BYTES = 1024
MAX_SHARED = 1024
"""Records that later lines may share; each has at most ``MAX_SHARED_BYTES``."""


class ReplyWriter:
    """Writes the records of a job, row by row. Blocking."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "wb", opener=private_opener)  # noqa: SIM115 (closed by ``close``)
        self._num_bytes = 0
        self._shared: dict[bytes, bytes] = {}
        self._places = bytearray()

    @property
    def places(self) -> bytes:
        """Places of the records, for the job's plan."""
        return bytes(self._places)

    def append(self, record: bytes | None, num_rows: int) -> None:
        """Adds the record of the next rows, which belong to one line."""
        self._places += (_NO_PLACE if record is None else self._place(record)) * num_rows

    def _place(self, record: bytes) -> bytes:
        place = self._shared.get(record)
        if place is None:
            place = np.array((self._num_bytes, len(record), zlib.crc32(record)), _PLACE).tobytes()
            self._file.write(record)
            self._num_bytes += len(record)
            if len(record) <= MAX_SHARED_BYTES and len(self._shared) < MAX_SHARED:
                self._shared[record] = place
        return place

    def close(self) -> None:
        """Makes the file durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class ReplyPlace(NamedTuple):
    """Position, length and checksum of a record."""

    offset: int
    num_bytes: int
    checksum: int

    def read(self, path: Path) -> bytes:
        """Reads a record.

        Raises:
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        with path.open("rb", buffering=0) as f:
            record = os.pread(f.fileno(), self.num_bytes, self.offset)
        if len(record) != self.num_bytes or zlib.crc32(record) != self.checksum:
            raise ValueError("the reply file is damaged")
        return record


class ReplyPlaces:
    """Positions of the records of a job's rows.

    Raises:
        ValueError: the positions are invalid.
    """

    def __init__(self, places: bytes) -> None:
        self._places = np.frombuffer(places, _PLACE)

    def of(self, row: int) -> ReplyPlace | None:
        """The place of a row's record; None if it has none."""
        if row >= len(self._places):
            return None
        place = ReplyPlace(*self._places[row].item())
        return place if place.num_bytes else None
