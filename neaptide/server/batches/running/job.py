"""State of one running batch or leased chunk: the rows still to run, and the lines whose outputs are arriving."""

import json
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from neaptide.engine.messages import AddBatch, RequestOutput
from neaptide.engine.params import FinishReason
from neaptide.engine.row_id import RowId
from neaptide.server.batches.checking.job_files import JobPlan, PlanLostError, tokens_version
from neaptide.server.batches.checking.validate import dump_json, new_request_id, read_body, refused
from neaptide.server.batches.lines import Assembler, LineCompiler
from neaptide.server.batches.planning.request import JobRows, packed
from neaptide.server.batches.running.replies import StoredReplies
from neaptide.server.batches.running.suspects import LineKey, Suspects
from neaptide.server.batches.sharing import LineLease
from neaptide.server.batches.storing.models import (
    BatchRecord,
    FileRecord,
    LineResult,
    LineState,
    PendingLine,
    StoredUsage,
)
from neaptide.server.engine_client.events import LineBody, LineReply, RowOutput
from neaptide.server.http.auth import share_of
from neaptide.server.http.errors import ApiError, EngineFailedError, is_passing

logger = logging.getLogger(__name__)

MESSAGE_ROWS = 2000
"""Maximum number of rows in one message to the engine."""
NO_ENGINE = -1
"""Placeholder for the number of an engine."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Files of a job, for this server and the engine."""

    input: FileRecord
    open_input: Callable[[FileRecord], BinaryIO]
    """Opens the input file. Raises OSError if its bytes cannot be read now."""
    stem: Path
    """Path of the token file without its suffix."""
    tokens_version: tuple[int, ...] | None
    """Version of the token file when it was verified."""

    @property
    def have_other_tokens(self) -> bool:
        """Whether the engine's path has another token file. A missing file does not count, as the engine may have it
        open."""
        return tokens_version(self.stem) not in (None, self.tokens_version)

    @property
    def have_lost_tokens(self) -> bool:
        """Whether the token file is missing or replaced although the storage itself is available."""
        try:
            return self.stem.parent.exists() and tokens_version(self.stem) != self.tokens_version
        except OSError:
            return False


@dataclass(slots=True)
class Heard:
    """Outputs of a job that remain to be processed, and the effects of the others."""

    outputs: deque[RowOutput]
    results: list[LineResult] = field(default_factory=list)
    """Results of lines that have ended."""
    stops: list[str] = field(default_factory=list)
    """Rows that the engine should stop."""


class Job:
    """Assembles a batch's lines from row outputs. One thread at a time; independent of store and event loop.

    It has numbers for every line, but bodies only for lines with outputs.
    """

    def __init__(
        self,
        record: BatchRecord,
        plan: JobPlan,
        lines: Sequence[PendingLine],
        files: JobFiles,
        compiler: LineCompiler,
        lease: LineLease | None = None,
    ) -> None:
        self.batch_id = record.id
        self.lease = lease
        """Lease on the lines, if servers share batches."""
        self.id = record.id if lease is None else lease.job_id
        """Name in this server and in the engine."""
        self.endpoint = record.endpoint
        self.salt = bytes.fromhex(record.salt)
        self.owner = record.owner
        self.share = share_of(record.owner)
        self.deadline_at = record.deadline_at
        self.num_undurable = len(lines)
        """Number of lines whose results have not been committed."""
        self.submitted_epoch = NO_ENGINE
        """Number of the engine that has this job."""
        self._plan = plan
        self._stream_rows = frozenset(plan.stream_rows)
        self._lines = [line for line in lines if line.num_rows]
        self._first_rows = [line.first_row for line in self._lines]
        self.files = files
        self._compiler = compiler
        self._ended = bytearray(len(self._lines))
        self._answer_tokens = array("i", [-1]) * len(self._lines)
        """[lines] mean output length of an ended line's rows; -1 if unknown."""
        self._next = 0
        """Lines before this one have been given to the engine, or wait as suspects."""
        self._waiting: dict[int, None] = {}
        """Suspects that have not been given to the engine yet."""
        self._given_alone: set[int] = set()
        """Suspects that were given out of order, because nothing else may run with them."""
        self._open: dict[int, Assembler] = {}
        self._replies = StoredReplies(files.stem, plan)

    # ---- input of the engine ----

    @property
    def attempts(self) -> dict[LineKey, int]:
        """Engine deaths before this server started, by line; lines without any are omitted."""
        return {self._key(i): line.attempts for i, line in enumerate(self._lines) if line.attempts}

    @property
    def num_open(self) -> int:
        """Number of lines that have not ended."""
        return self._ended.count(0)

    def begin_anew(self) -> None:
        """Resets the job for an engine that has none of its rows."""
        self._next = 0
        self._waiting.clear()
        self._given_alone.clear()

    def message(self, path: Path, deadline_s: float, suspects: Suspects) -> AddBatch | None:
        """The next rows for the engine; None if it has all that may run now."""
        rows = [row for i in self._take_lines(suspects) for row in self._rows(self._lines[i])]
        if not rows:
            return None
        used = {self._plan.params_index[row] for row in rows}
        place = {index: i for i, index in enumerate(sorted(used))}
        return AddBatch(
            batch_id=self.id,
            path=str(path),
            rows=rows,
            params_table=[self._plan.params_table[index] for index in place],
            params_index=[place[self._plan.params_index[row]] for row in rows],
            stream_rows=[row for row in rows if row in self._stream_rows],
            deadline_s=deadline_s,
            salt=self.salt,
            share=self.share,
        )

    def left(self, path: Path) -> JobRows:
        """Open lines and known output lengths, for the planner. Any thread; lines that end meanwhile may be
        included."""
        rows, ended_rows, ended_tokens = array("i"), array("i"), array("i")
        for line, is_ended, num_tokens in zip(self._lines, bytes(self._ended), list(self._answer_tokens), strict=True):
            if not is_ended:
                rows.extend(self._rows(line))
            elif num_tokens >= 0:
                ended_rows.extend(self._rows(line))
                ended_tokens.extend([num_tokens] * line.num_rows)
        max_tokens = [params.max_tokens for params in self._plan.params_table]
        limits = [max_tokens[self._plan.params_index[row]] for row in rows]
        return JobRows(
            batch_id=self.id,
            path=str(path),
            salt=self.salt.hex(),
            num_rows=len(self._plan.params_index),
            rows=packed(rows),
            limits=packed(limits),
            ended_rows=packed(ended_rows),
            ended_tokens=packed(ended_tokens),
        )

    def _take_lines(self, suspects: Suspects) -> list[int]:
        if suspects.solitary is not None:
            return self._take_alone(suspects.solitary)
        taken = [i for i in self._waiting if suspects.may_run(self._key(i))]
        for index in taken:
            del self._waiting[index]
        num_rows = sum(self._lines[i].num_rows for i in taken)
        while self._next < len(self._lines) and num_rows < MESSAGE_ROWS:
            index = self._next
            self._next += 1
            if self._ended[index] or index in self._given_alone:
                continue
            if suspects.may_run(self._key(index)):
                taken.append(index)
                num_rows += self._lines[index].num_rows
            else:
                self._waiting[index] = None
        return taken

    def _take_alone(self, line: LineKey) -> list[int]:
        if line.job_id != self.id or (index := self._index(line.line_no)) in self._given_alone:
            return []
        self._given_alone.add(index)
        self._waiting.pop(index, None)
        return [index]

    def forget_open(self) -> None:
        """Resets the open lines after the engine's end; they run again from the first token."""
        self._open.clear()

    # ---- output of the engine ----

    def feed(self, heard: Heard) -> None:
        """Processes outputs of this job's rows, one by one. Blocking.

        Raises:
            OSError: a file cannot be read now. Nothing is lost: the rest can be fed later.
            PlanLostError: the engine may have run other prompts than those that were checked.
        """
        if self.files.have_other_tokens:
            raise PlanLostError(f"the token file of {self.batch_id} has changed")
        while heard.outputs:
            self._take(heard.outputs[0], heard)
            heard.outputs.popleft()

    def _take(self, output: RowOutput, heard: Heard) -> None:
        found = RowId.parse(output.request_id)
        index = None if found is None else self._open_line(found.row)
        if found is None or index is None:
            return
        row = found.row
        if isinstance(output, LineReply):
            result: LineResult | None = _replied(self._lines[index].line_no, output)
        elif output.finish_reason is FinishReason.ABORT:
            # The engine dropped the row, which will be given again from its first token.
            self._open.pop(index, None)
            return
        else:
            result = self._feed_line(index, row, output, heard.stops)
        if result is not None:
            if result.state is LineState.FAILED:
                heard.stops += [str(RowId(self.id, r)) for r in self._rows(self._lines[index]) if r != row]
            self._end(index)
            if result.state is LineState.COMPLETED:
                self._answer_tokens[index] = result.usage.output_tokens // self._lines[index].num_rows
            heard.results.append(result)

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
        except Exception as error:
            if is_passing(error):
                raise
            # Isolation: a line's error does not keep the other lines of the job from completing.
            logger.exception("batch %s line %d: its response could not be assembled", self.batch_id, line.line_no)
            return refused(line.line_no, ApiError("Internal server error.", code="internal_error"))

    def line_of(self, row: int) -> LineKey | None:
        """The line of the row; None if it has ended."""
        index = self._open_line(row)
        return None if index is None else self._key(index)

    def convict(self, line_no: int) -> LineResult:
        """Result of a line that crashes every engine."""
        self._end(self._index(line_no))
        return refused(line_no, ApiError("The engine failed repeatedly on this request.", code="engine_crash"))

    def _key(self, index: int) -> LineKey:
        return LineKey(self.id, self._lines[index].line_no)

    def _index(self, line_no: int) -> int:
        return bisect_left(self._lines, line_no, key=_line_no)

    def _open_line(self, row: int) -> int | None:
        index = bisect_right(self._first_rows, row) - 1
        if index < 0 or self._ended[index] or row >= self._first_rows[index] + self._lines[index].num_rows:
            return None
        return index

    def _end(self, index: int) -> None:
        self._ended[index] = 1
        self._waiting.pop(index, None)
        self._open.pop(index, None)

    def _assembler(self, line: PendingLine) -> Assembler:
        """Assembler made from what was stored when the line was checked; without that, from the line's body.

        Raises:
            OSError: not possible now.
            ApiError: the body is refused.
        """
        record = self._replies.record(line.first_row)
        if record is not None:
            try:
                return self._compiler.stored_assembler(record)
            except ValueError as error:
                self._replies.note_unusable(error)
        return self._compiler.assembler(self.endpoint, self._read_body(line))

    def line_body(self, row: int) -> LineBody | None:
        """The body of the row's line; None if it has ended. Blocking; any thread.

        Raises:
            OSError: the input file cannot be read now.
        """
        index = self._open_line(row)
        return None if index is None else LineBody(self.endpoint, self._read_body(self._lines[index]))

    def _read_body(self, line: PendingLine) -> dict[str, Any]:
        with self.files.open_input(self.files.input) as file:
            return read_body(file, line.byte_offset, line.num_bytes)

    @staticmethod
    def _rows(line: PendingLine) -> range:
        return range(line.first_row, line.first_row + line.num_rows)


def _line_no(line: PendingLine) -> int:
    return line.line_no


def _ended(line_no: int, assembler: Assembler) -> LineResult:
    if assembler.error is not None:
        return refused(line_no, assembler.error)
    request_id = new_request_id()
    body = assembler.body(request_id)
    return LineResult(line_no, LineState.COMPLETED, 200, request_id, dump_json(body), _usage(body))


def _replied(line_no: int, reply: LineReply) -> LineResult:
    if reply.status != HTTPStatus.OK:
        return LineResult(line_no, LineState.FAILED, reply.status, new_request_id(), reply.body)
    usage = _usage(json.loads(reply.body))
    return LineResult(line_no, LineState.COMPLETED, reply.status, new_request_id(), reply.body, usage)


def _usage(body: Mapping[str, Any]) -> StoredUsage:
    usage = body.get("usage") or {}
    # The Responses API has its own names.
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return StoredUsage(
        input_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        cached_tokens=details.get("cached_tokens", 0),
        output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
        reasoning_tokens=of_output.get("reasoning_tokens", 0),
    )
