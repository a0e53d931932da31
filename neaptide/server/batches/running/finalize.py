"""Writes output and error files from the records of ended lines. Blocking; for a thread.

 records in input order -> temporary file -> fsync -> rename -> fsync directory -> (caller) one transaction

After a crash at any point, all of it is repeated. The ids were chosen with the last change of the records, so the bytes
are the same. An existing file with the name and other bytes is not overwritten: the batch gets other names.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from neaptide.engine.private_files import private_opener
from neaptide.server.batches.checking.validate import dump_json
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.data_dir import sync_directory
from neaptide.server.batches.storing.models import BatchRecord, EndedLine, FileRecord, LineState
from neaptide.server.batches.storing.store import Store

_LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Characters that JSON allows in strings and at which many readers split lines, including the OpenAI SDK."""
PAGE_LINES = 256
PURPOSE = "batch_output"

_EXPIRED = "This request could not be executed before the completion window expired."
CANCELLED_ERROR = dump_json(
    {"code": "batch_cancelled", "message": "The batch was cancelled before this request was executed."}
)
LOST_ERROR = dump_json(
    {"code": "input_file_lost", "message": "The input file was lost on the server's disk before this request ran."}
)
DAMAGED_ERROR = dump_json({"code": "result_damaged", "message": "The result was damaged on the server's disk."})


def expired_error(why: str | None = None) -> str:
    """Error of a line that did not run in time. ``why`` is a sentence on what was missing."""
    return dump_json({"code": "batch_expired", "message": _EXPIRED if why is None else f"{_EXPIRED} {why}"})


class NameTakenError(Exception):
    """A file with other bytes, unknown to the database, has a planned name."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is another file with the name {file_id}")
        self.file_id = file_id


class DamagedLinesError(Exception):
    """Stored results are damaged."""

    def __init__(self, line_nos: list[int]) -> None:
        super().__init__(f"{len(line_nos)} results are damaged")
        self.line_nos = line_nos


class FinalizeStoppedError(Exception):
    """The server stops; the next start writes the files."""


class _Sink:
    """One unfinished file. It is created on disk with its first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temp = path.with_name(f"{path.name}.tmp")
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._file = open(self._temp, "wb", opener=private_opener)  # noqa: SIM115 (closed by publish or discard)
        self._file.write(line)
        self._hash.update(line)
        self.num_bytes += len(line)

    def publish(self) -> str | None:
        """Gives the finished file its name; returns its SHA-256, or None if it has no line.

        Raises:
            NameTakenError: another file has the name.
        """
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = self._hash.hexdigest()
        if not os.path.lexists(self.path):
            self._temp.rename(self.path)
        elif _has_digest(self.path, digest):
            self._temp.unlink()
        else:
            raise NameTakenError(self.path.name)
        sync_directory(self.path.parent)
        return digest

    def discard(self) -> None:
        """Deletes an unpublished file, so that the next attempt starts with a new one."""
        if self._file is None:
            return
        try:
            self._file.close()
        finally:
            self._temp.unlink(missing_ok=True)


def _has_digest(path: Path, digest: str) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == digest


def output_line(batch_id: str, line: EndedLine) -> bytes:
    """One line of an output or error file. Bodies are stored bytes, with Unicode line ends escaped for readers that
    split there."""
    digest = hashlib.sha256(f"{batch_id}:{line.line_no}".encode()).hexdigest()
    head = dump_json({"id": f"batch_req_{digest[:24]}", "custom_id": line.custom_id})[:-1]
    if line.result is None:
        tail = f'"response":null,"error":{line.error}'
    else:
        request_id = json.dumps(line.request_id)
        response = f'{{"status_code":{line.status_code},"request_id":{request_id},"body":{line.result}}}'
        tail = f'"response":{response},"error":null'
    text = f"{head},{tail}}}\n"
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode()


def write_files(
    store: Store, record: BatchRecord, directory: Path, should_stop: Callable[[], bool], now: int, life_s: int
) -> tuple[FileRecord | None, FileRecord | None]:
    """Writes the output and the error file of a batch whose lines have all ended; None for a file without lines.

    ``life_s`` is the lifetime of files whose client sets none.

    Raises:
        FinalizeStoppedError: ``should_stop`` returned True.
        DamagedLinesError: some results are damaged and must not be shown.
        NameTakenError: a planned name belongs to another file.
        OSError: a file cannot be written.
    """
    with ExitStack() as stack:
        output = _Sink(directory / record.planned_output_file_id)
        error = _Sink(directory / record.planned_error_file_id)
        stack.callback(output.discard)
        stack.callback(error.discard)
        damaged: list[int] = []
        for line in lines_of(store, record.id):
            if should_stop():
                raise FinalizeStoppedError
            if line.is_damaged:
                damaged.append(line.line_no)
            sink = output if line.state is LineState.COMPLETED else error
            sink.write(output_line(record.id, line))
        if damaged:
            raise DamagedLinesError(damaged)
        expires_at = now + (record.output_expires_after_s or life_s)
        return _publish(output, record, "output", now, expires_at), _publish(error, record, "error", now, expires_at)


def lines_of(store: Store, batch_id: str) -> Iterator[EndedLine]:
    """All lines of a batch, in file order."""
    after = 0
    while page := store.read_blocking(batch_rows.ended_lines, batch_id, after, PAGE_LINES):
        yield from page
        after = page[-1].line_no


def _publish(sink: _Sink, record: BatchRecord, kind: str, now: int, expires_at: int) -> FileRecord | None:
    digest = sink.publish()
    if digest is None:
        return None
    return FileRecord(
        id=sink.path.name,
        owner=record.owner,
        filename=f"{record.id}_{kind}.jsonl",
        purpose=PURPOSE,
        num_bytes=sink.num_bytes,
        sha256=digest,
        created_at=now,
        expires_at=expires_at,
    )
