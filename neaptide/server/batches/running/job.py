"""One running batch: which rows are still to run, and the lines whose outputs are arriving."""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from neaptide.engine.messages import AddBatch, RequestOutput
from neaptide.engine.params import FinishReason
from neaptide.server.batches.checking.job_files import JobPlan
from neaptide.server.batches.checking.validate import dump_json, new_request_id, read_body, refused
from neaptide.server.batches.lines import Assembler, LineCompiler
from neaptide.server.batches.storing.models import BatchRecord, LineResult, LineState, PendingLine, Usage
from neaptide.server.edge.errors import ApiError, EngineFailedError

logger = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 2
PART_ROWS = 2000
"""Rows that the engine is given in one message."""


class Job:
    """Assembles a batch's lines from row outputs. One thread at a time; knows neither store nor event loop.

    Holds numbers for every line, and bodies only of lines that have begun to answer.
    """

    def __init__(
        self, record: BatchRecord, plan: JobPlan, lines: Sequence[PendingLine], input_path: Path, compiler: LineCompiler
    ) -> None:
        self.batch_id = record.id
        self.endpoint = record.endpoint
        self.salt = bytes.fromhex(record.salt)
        self.expires_at = record.expires_at
        self.num_undurable = len(lines)
        """Lines whose result has not been committed."""
        self.submitted_epoch = -1
        """The engine (counted) that knows this job."""
        self._plan = plan
        self._stream_rows = frozenset(plan.stream_rows)
        self._lines = [line for line in lines if line.num_rows]
        self._first_rows = [line.first_row for line in self._lines]
        self._input_path = input_path
        self._compiler = compiler
        self._ended = bytearray(len(self._lines))
        self._deaths = {i: line.attempts for i, line in enumerate(self._lines) if line.attempts}
        """Lines that were in an engine's last step, and how often that counted: they run after the others, one at a
        time."""
        self._next = 0
        """Lines before this one have been given to the engine, or have to wait as suspects."""
        self._part: set[int] = set()
        """Lines that the engine has been given and that have not ended."""
        self._open: dict[int, Assembler] = {}

    # ---- what the engine is told ----

    @property
    def wants_part(self) -> bool:
        """Whether there may be more to give: lines not given yet, or the next suspect."""
        return self._next < len(self._lines) or not self._part

    def message(self, path: Path, deadline_s: float, *, anew: bool) -> AddBatch | None:
        """The next part for the engine; None when nothing is left to give. ``anew``: it has none of the others.

        Lines that may have killed an engine come last, each in a part of its own: the next death is then held
        against one line, not against all that ran beside it.
        """
        if anew:
            self._next, self._part = 0, set()
        part = self._take_part()
        rows = [row for i in part for row in self._rows(self._lines[i])]
        if not rows:
            return None
        self._part.update(part)
        used = {self._plan.params_index[row] for row in rows}
        place = {index: i for i, index in enumerate(sorted(used))}
        return AddBatch(
            batch_id=self.batch_id,
            path=str(path),
            rows=rows,
            params_table=[self._plan.params_table[index] for index in place],
            params_index=[place[self._plan.params_index[row]] for row in rows],
            stream_rows=[row for row in rows if row in self._stream_rows],
            deadline_s=deadline_s,
            salt=self.salt,
        )

    def _take_part(self) -> list[int]:
        part: list[int] = []
        num_rows = 0
        while self._next < len(self._lines) and num_rows < PART_ROWS:
            index = self._next
            self._next += 1
            if not self._ended[index] and index not in self._deaths:
                part.append(index)
                num_rows += self._lines[index].num_rows
        if not part and not self._part:
            part = [i for i in sorted(self._deaths) if not self._ended[i]][:1]
        return part

    def forget_open(self) -> None:
        """The engine is gone: lines that have not ended will be run again from their first token."""
        self._open.clear()

    # ---- what the engine says ----

    def feed(self, outputs: Iterable[RequestOutput]) -> tuple[list[LineResult], list[str]]:
        """Takes outputs of this job's rows; returns lines that ended and rows the engine should stop. Blocking."""
        results: list[LineResult] = []
        stops: list[str] = []
        for output in outputs:
            row = int(output.request_id.rpartition(":")[2])
            index = bisect_right(self._first_rows, row) - 1
            if index < 0 or self._ended[index] or row >= self._first_rows[index] + self._lines[index].num_rows:
                continue
            if output.finish_reason is FinishReason.ABORT:
                # The engine let go of the row, and somebody will give it out again: from its first token.
                self._open.pop(index, None)
                continue
            result = self._feed_line(index, row, output, stops)
            if result is not None:
                if result.state is LineState.FAILED:
                    stops += [f"{self.batch_id}:{r}" for r in self._rows(self._lines[index]) if r != row]
                self._end(index)
                results.append(result)
        return results, stops

    def _feed_line(self, index: int, row: int, output: RequestOutput, stops: list[str]) -> LineResult | None:
        line = self._lines[index]
        try:
            if output.error is not None or output.finish_reason is FinishReason.ERROR:
                logger.warning("batch %s line %d: the engine failed: %s", self.batch_id, line.line_no, output.error)
                return refused(line.line_no, EngineFailedError(output.error))
            assembler = self._open.get(index)
            if assembler is None:
                assembler = self._open[index] = self._assembler(line)
            choice = row - line.first_row
            assembler.feed(choice, output)
            if output.finish_reason is None and assembler.stop_hit[choice]:
                stops.append(output.request_id)
            return _ended(line.line_no, assembler) if assembler.finished else None
        except ApiError as error:
            return refused(line.line_no, error)
        except Exception:
            # Isolation: whatever one line does, the others of the job complete.
            logger.exception("batch %s line %d: its response could not be assembled", self.batch_id, line.line_no)
            return refused(line.line_no, ApiError("Internal server error.", code="internal_error"))

    def suspect(self, rows: Iterable[int], is_counted: bool) -> tuple[list[int], list[LineResult]]:
        """Notes that an engine died in a step with these rows.

        Returns the numbers of the unfinished lines they belong to, which are suspects from now on, and the ends of
        those that have seen too many deaths.
        """
        found = {bisect_right(self._first_rows, row) - 1 for row in rows} - {-1}
        suspects = sorted(i for i in found if not self._ended[i])
        poisoned = []
        for i in suspects:
            self._deaths[i] = self._deaths.get(i, 0) + is_counted
            if self._deaths[i] >= MAX_ENGINE_DEATHS:
                error = ApiError("The engine failed repeatedly on this request.", code="engine_crash")
                poisoned.append(refused(self._lines[i].line_no, error))
                self._end(i)
        return [self._lines[i].line_no for i in suspects], poisoned

    def _end(self, index: int) -> None:
        self._ended[index] = 1
        self._part.discard(index)
        self._open.pop(index, None)

    def _assembler(self, line: PendingLine) -> Assembler:
        body = read_body(self._input_path, line.byte_offset, line.num_bytes)
        return self._compiler.assembler(self._compiler.compile(self.endpoint, body))

    @staticmethod
    def _rows(line: PendingLine) -> range:
        return range(line.first_row, line.first_row + line.num_rows)


def _ended(line_no: int, assembler: Assembler) -> LineResult:
    if assembler.error is not None:
        return refused(line_no, assembler.error)
    request_id = new_request_id()
    body = assembler.body(request_id)
    return LineResult(line_no, LineState.COMPLETED, 200, request_id, dump_json(body), _usage(body))


def _usage(body: dict[str, Any]) -> Usage:
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        input_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
    )
