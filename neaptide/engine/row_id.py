"""The name of one row of a batch job, as the engine's requests carry it."""

from typing import NamedTuple

_SEPARATOR = ":"


class RowId(NamedTuple):
    """Row ``row`` of the job's token file. ``str`` gives the request id, ``parse`` reads it."""

    batch_id: str
    row: int

    def __str__(self) -> str:
        return f"{self.batch_id}{_SEPARATOR}{self.row}"

    @classmethod
    def parse(cls, request_id: str) -> "RowId | None":
        """None for the id of a request that belongs to no batch."""
        batch_id, separator, row = request_id.rpartition(_SEPARATOR)
        return cls(batch_id, int(row)) if separator and row.isdecimal() else None


def is_row_of(request_id: str, batch_id: str) -> bool:
    """Whether the request is one of the batch's rows."""
    return request_id.startswith(f"{batch_id}{_SEPARATOR}")
