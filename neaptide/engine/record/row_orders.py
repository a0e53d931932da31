"""Where the rows of a batch stand under a policy that sorts them by their text, which the step log does not have."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.engine.offline.delivery import RowKey
from neaptide.engine.offline.token_file import TokenFile


class Place(NamedTuple):
    """Of the rows that one message brought."""

    order: list[int]
    """Their order among themselves, as indices into the message's rows."""
    behind: list[int]
    """For each of them, in this order, the handle of the earlier messages' row that it stands behind; -1 if it stands
    before all of these. Empty if there are none."""


class _Row(NamedTuple):
    tokens: TokenFile
    number: int
    handle: int


@dataclass(slots=True)
class _Batch:
    rows: list[_Row] = field(default_factory=list)
    """All that were named, in order."""
    num_open: int = 0
    """Rows without an end."""


class RowOrders:
    """The order of every batch that has rows without an end. Prompts are read where they lie, none is kept."""

    def __init__(self, row_key: RowKey) -> None:
        self._row_key = row_key
        self._batches: dict[str, _Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch_id: str, tokens: TokenFile, rows: list[int], first_handle: int) -> Place:
        """Takes in the rows of a message, whose handles follow each other."""
        batch = self._batches.setdefault(batch_id, _Batch())
        keys = [self._row_key(tokens, row) for row in rows]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        earlier, start = batch.rows, 0
        merged: list[_Row] = []
        behind: list[int] = []
        for index in order:
            end = bisect_right(earlier, keys[index], lo=start, key=self._key)
            behind.append(earlier[end - 1].handle if end else -1)
            merged += earlier[start:end]
            merged.append(_Row(tokens, rows[index], first_handle + index))
            start = end
        batch.rows = merged + earlier[start:]
        batch.num_open += len(rows)
        return Place(order, behind if earlier else [])

    def row_ended(self, batch_id: str) -> None:
        """Without rows that wait there is nothing to stand behind."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.num_open -= 1
            if not batch.num_open:
                self.forget(batch_id)

    def forget(self, batch_id: str) -> None:
        """The batch was cancelled."""
        self._batches.pop(batch_id, None)

    def _key(self, row: _Row) -> Any:
        return self._row_key(row.tokens, row.number)
