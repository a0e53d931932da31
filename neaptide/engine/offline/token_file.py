"""The token file of a batch job: every prompt of the job as int32 token ids, with offsets of the lines.

Two files with one stem: ``STEM.tokens`` (int32, all prompts one after another) and ``STEM.offsets`` (int64, one more
entry than lines). The API process appends while it validates; engine and planner map both read-only. Little-endian, so
a data directory can move between machines.
"""

import hashlib
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from neaptide.engine.private_files import private_opener

TOKEN_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")


def offsets_path(stem: str | Path) -> Path:
    return Path(f"{stem}.offsets")


def _paths(stem: str | Path) -> tuple[Path, Path]:
    return Path(f"{stem}.tokens"), offsets_path(stem)


class TokenFileWriter:
    """Appends prompts. ``close`` makes them durable before the job that names the file is committed.

    Files that nobody needs after a crash, as in a simulation, need not be durable: syncing takes milliseconds each.
    """

    def __init__(self, stem: str | Path, is_durable: bool = True) -> None:
        tokens, offsets = _paths(stem)
        self._tokens: BinaryIO = open(tokens, "wb", opener=private_opener)  # noqa: SIM115 (both closed by ``close``)
        self._offsets: BinaryIO = open(offsets, "wb", opener=private_opener)  # noqa: SIM115
        self._is_durable = is_durable
        self._num_tokens = 0
        self.hashes = hashlib.sha256(), hashlib.sha256()
        """SHA-256 of both files as written. The files on the disk may change later."""
        self._write_offset()

    def append(self, token_ids: list[int] | npt.NDArray[np.int32]) -> None:
        if isinstance(token_ids, np.ndarray):
            data = token_ids.astype(TOKEN_DTYPE, copy=False).tobytes()
        else:  # Three times as fast as an array made from the list.
            data = struct.pack(f"<{len(token_ids)}i", *token_ids)
        self._tokens.write(data)
        self.hashes[0].update(data)
        self._num_tokens += len(token_ids)
        self._write_offset()

    def _write_offset(self) -> None:
        data = struct.pack("<q", self._num_tokens)
        self._offsets.write(data)
        self.hashes[1].update(data)

    def close(self) -> None:
        for f in (self._tokens, self._offsets):
            f.flush()
            if self._is_durable:
                os.fsync(f.fileno())
            f.close()

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class TokenFile:
    """A job's prompts, mapped read-only.

    Raises:
        ValueError: the offsets do not describe the token file (torn or foreign files).
    """

    def __init__(self, stem: str | Path) -> None:
        self.stem = str(stem)
        tokens_path, offsets_path = _paths(stem)
        num_tokens = tokens_path.stat().st_size // TOKEN_DTYPE.itemsize
        self._offsets: npt.NDArray[np.int64] = np.fromfile(offsets_path, OFFSET_DTYPE)
        if len(self._offsets) == 0 or self._offsets[0] != 0 or self._offsets[-1] != num_tokens:
            raise ValueError(f"{offsets_path} does not match {tokens_path}")
        # A plain view of the map: slicing an np.memmap takes twice as long.
        self._tokens: npt.NDArray[np.int32] = np.asarray(
            np.memmap(tokens_path, TOKEN_DTYPE, mode="r") if num_tokens else np.zeros(0, TOKEN_DTYPE)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def num_tokens(self, row: int) -> int:
        return int(self._offsets[row + 1] - self._offsets[row])

    def lengths(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of tokens of each of these lines."""
        return self._offsets[rows + 1] - self._offsets[rows]

    def sort_key(self, row: int) -> bytes:
        """Sort key of a prompt, ordered like its token ids (none is negative); a comparison is one memcmp."""
        return self._tokens[self._offsets[row] : self._offsets[row + 1]].astype(">u4").tobytes()

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        """A view of one prompt."""
        return self._tokens[self._offsets[row] : self._offsets[row + 1]]

    def fill_windows(
        self, rows: npt.NDArray[np.int64], start: int, into: npt.NDArray[np.uint32], places: npt.NDArray[np.int64]
    ) -> None:
        """Writes token ids plus one into these rows of a table of zeros, from ``start`` of each prompt on."""
        width = into.shape[1]
        begins = self._offsets[rows] + start
        num_left = np.minimum(self._offsets[rows + 1] - begins, width)
        tokens = self._tokens.view(np.uint32)
        # Copies windows as wide as the table, then clears the tokens of the next prompts: no loop over lines.
        is_inside = begins + width <= len(tokens)
        if is_inside.any():
            found = sliding_window_view(tokens, width)[begins[is_inside]] + np.uint32(1)
            if (ends := num_left[is_inside]).min() < width:
                found[np.arange(width) >= ends[:, None]] = 0
            into[places[is_inside]] = found
        rest = ~is_inside & (num_left > 0)
        for place, begin, count in zip(
            places[rest].tolist(), begins[rest].tolist(), num_left[rest].tolist(), strict=True
        ):
            np.add(tokens[begin : begin + count], 1, out=into[place, :count])

    def content(self, row: int) -> bytes:
        """Bytes of a prompt as stored in the file."""
        return self._tokens[self._offsets[row] : self._offsets[row + 1]].tobytes()

    def prompt(self, row: int) -> list[int]:
        start, end = self._offsets[row], self._offsets[row + 1]
        tokens: list[int] = self._tokens[start:end].tolist()
        return tokens
