"""Request id of one line of a batch job."""

from typing import NamedTuple

_SEPARATOR = ":"


class RowId(NamedTuple):
    """Line ``row`` of the job's token file. ``str`` gives the request id, ``parse`` reads it."""

    batch_id: str
    row: int

    def __str__(self) -> str:
        return f"{self.batch_id}{_SEPARATOR}{self.row}"

    @classmethod
    def parse(cls, request_id: str) -> "RowId | None":
        """The batch and line of a request id; None if the request belongs to no batch."""
        batch_id, separator, row = request_id.rpartition(_SEPARATOR)
        return cls(batch_id, int(row)) if separator and row.isdecimal() else None


def is_row_of(request_id: str, batch_id: str) -> bool:
    """Whether the request is one of the batch's lines."""
    return request_id.startswith(f"{batch_id}{_SEPARATOR}")
