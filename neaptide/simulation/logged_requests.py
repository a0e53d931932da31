"""The requests of a step log, by handle."""

from dataclasses import dataclass

from neaptide.engine.params import RequestClass, request_class
from neaptide.engine.record.block_numbers import Ranges
from neaptide.engine.record.step_log import AddLine, BatchLine, Line, RowLine
from neaptide.engine.row_id import RowId


@dataclass(slots=True)
class LoggedRequest:
    request_id: str
    is_online: bool
    prompt_tokens: int
    blocks: Ranges
    """Full blocks of the prompt; empty until the request has been materialized."""


class LoggedRequests(list[LoggedRequest]):
    """A list that grows with the log's lines; a request's index is its handle."""

    def take(self, line: Line) -> None:
        if isinstance(line, AddLine):
            is_online = request_class(line.tier) is RequestClass.ONLINE
            self.append(LoggedRequest(line.id, is_online, line.tokens, line.blocks))
        elif isinstance(line, BatchLine):
            self += [LoggedRequest(str(RowId(line.id, row)), False, tokens, []) for row, tokens, _ in line.rows]
        elif isinstance(line, RowLine):
            self[line.request].blocks = line.blocks
