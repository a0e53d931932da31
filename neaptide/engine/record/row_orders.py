"""Order of a batch's lines under a policy that sorts them by text, which the step log does not contain."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.engine.offline.row_source import RowKey
from neaptide.engine.offline.token_file import TokenFile


class OrderPlace(NamedTuple):
    """Position of the lines of one message."""

    order: list[int]
    """Order of the message's lines, as indices into them."""
    behind: list[int]
    """Handle of the earlier message's line that precedes each one, in this order. -1 if it precedes all of those. Empty
    without earlier messages."""


class _Row(NamedTuple):
    tokens: TokenFile
    number: int
    handle: int


@dataclass(slots=True)
class _Batch:
    rows: list[_Row] = field(default_factory=list)
    """All lines that messages named, in order."""
    num_open: int = 0
    """Lines that have not ended."""


class RowOrders:
    """Keeps the order of every batch with open lines. Reads prompts from their token files and stores none."""

    def __init__(self, row_key: RowKey) -> None:
        self._row_key = row_key
        self._batches: dict[str, _Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch_id: str, tokens: TokenFile, rows: list[int], first_handle: int) -> OrderPlace:
        """Adds the lines of a message, whose handles are consecutive."""
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
        return OrderPlace(order, behind if earlier else [])

    def row_ended(self, batch_id: str) -> None:
        """Counts an ended line. Forgets the batch with its last open line, as later lines have no predecessor then."""
        batch = self._batches.get(batch_id)
        if batch is not None:
            batch.num_open -= 1
            if not batch.num_open:
                self.forget(batch_id)

    def forget(self, batch_id: str) -> None:
        """Forgets a cancelled batch."""
        self._batches.pop(batch_id, None)

    def _key(self, row: _Row) -> Any:
        return self._row_key(row.tokens, row.number)
