"""Prompts of a whole pool: lines of several jobs' token files with common numbers."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.token_file import TokenFile


class Prompts:
    """All prompts of a pool. A line's number is its index in its file plus the lines of the files before.

    Args:
        files: one for each job.
        salts: salt of each file; prompts with different salts share nothing. None is one salt for all.
    """

    def __init__(self, files: Sequence[TokenFile], salts: Sequence[str] | None = None) -> None:
        self._files = files
        sizes = np.array([len(file) for file in files], np.int64)
        self._first_row = np.concatenate(([0], np.cumsum(sizes)))
        """[files + 1] number of each file's first line."""
        self._first_rows: list[int] = self._first_row.tolist()
        """``_first_row`` as a list, for one line at a time."""
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(file.lengths(np.arange(len(file))) for file in files)])
        """[rows] in tokens."""
        names = sorted(set(salts or ()))
        of_file = np.array([names.index(salt) for salt in salts] if salts else [0] * len(files), np.int64)
        self.salt = np.repeat(of_file, sizes)
        """[rows] number of the line's salt."""

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def windows(self, rows: IntArray, start: int, num_tokens: int) -> npt.NDArray[np.uint32]:
        """[rows, num_tokens] token ids plus one, from ``start`` on; 0 after a prompt's end."""
        found = np.zeros((len(rows), num_tokens), np.uint32)
        file_of = np.searchsorted(self._first_row, rows, side="right") - 1
        by_file = np.argsort(file_of, kind="stable")
        bounds = np.flatnonzero(np.diff(file_of[by_file], prepend=-1, append=len(self._files)))
        for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            places = by_file[first:end]
            number = int(file_of[places[0]])
            self._files[number].fill_windows(rows[places] - self._first_row[number], start, found, places)
        return found

    def heads(self, rows: IntArray, start: int) -> npt.NDArray[np.uint64]:
        """[rows] two tokens from ``start`` on, as a number; prompts that differ there sort like these numbers."""
        window = self.windows(rows, start, 2).astype(np.uint64)
        return (window[:, 0] << np.uint64(32)) | window[:, 1]

    def sort_key(self, row: int) -> tuple[int, bytes]:
        """Sort key of ``PromptOrder``."""
        file, number = self._file_row(row)
        return int(self.salt[row]), file.sort_key(number)

    def num_shared(self, row: int, other: int) -> int:
        """Number of tokens that both prompts begin with."""
        if self.salt[row] != self.salt[other]:
            return 0
        (file, number), (other_file, other_number) = self._file_row(row), self._file_row(other)
        one, two = file.tokens(number), other_file.tokens(other_number)
        length = min(len(one), len(two))
        differs = one[:length] != two[:length]
        return int(differs.argmax()) if differs.any() else length

    def _file_row(self, row: int) -> tuple[TokenFile, int]:
        number = bisect_right(self._first_rows, row) - 1
        return self._files[number], row - self._first_rows[number]
