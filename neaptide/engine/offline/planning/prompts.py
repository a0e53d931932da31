"""The prompts of a whole pool: rows of several jobs' token files, numbered through."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.token_file import TokenFile


class Prompts:
    """A row's number is its place in its file behind the rows of the files before.

    Args:
        files: one for each job.
        salts: of each file; prompts share nothing across different ones. None is one salt for all.
    """

    def __init__(self, files: Sequence[TokenFile], salts: Sequence[str] | None = None) -> None:
        self._files = files
        sizes = np.array([len(file) for file in files], np.int64)
        self._first_row = np.concatenate(([0], np.cumsum(sizes)))
        """[files + 1]"""
        self._first_rows: list[int] = self._first_row.tolist()
        """The same, for one row at a time."""
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(file.lengths(np.arange(len(file))) for file in files)])
        """[rows] in tokens."""
        names = sorted(set(salts or ()))
        of_file = np.array([names.index(salt) for salt in salts] if salts else [0] * len(files), np.int64)
        self.salt = np.repeat(of_file, sizes)
        """[rows] a number for the row's salt."""

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def windows(self, rows: IntArray, start: int, num_tokens: int) -> npt.NDArray[np.uint32]:
        """[rows, num_tokens] token ids plus one, from ``start`` on; 0 behind a prompt's end."""
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
        """[rows] two tokens from ``start`` on, as a number: prompts that differ in them are ordered as these are."""
        window = self.windows(rows, start, 2).astype(np.uint64)
        return (window[:, 0] << np.uint64(32)) | window[:, 1]

    def sort_key(self, row: int) -> tuple[int, bytes]:
        """Orders prompts as ``PromptOrder`` does."""
        file, number = self._file_row(row)
        return int(self.salt[row]), file.sort_key(number)

    def num_shared(self, row: int, other: int) -> int:
        """Tokens that both prompts begin with."""
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
