"""Rows of trace files, one at a time: CSV or JSON lines, gzipped or not, recognised by their content.

A file is never held in memory as a whole. An invalid value is an error with file, line and column, because a trace with
wrong values gives wrong figures without notice.
"""

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import file_digest
from pathlib import Path
from typing import Any, BinaryIO, TextIO

GZIP_MAGIC = b"\x1f\x8b"
MAX_UNPACKED_BYTES = 1 << 30
"""Limit of what a gzip file may unpack to: a small file can unpack to more than the memory holds."""
DELIMITERS = ",;\t"
MAX_TOKENS = 1 << 24
"""Longer than any context: a larger length is a mistake, and would need as much memory."""
NUM_BLOCK_IDS = 1 << 30
"""Half of a set's content ids; the other half is for rows without block ids."""
MAX_NUMBER = 1e15
"""Above it a stamp in milliseconds is no longer exact."""
SHOWN_CHARS = 40


class Row:
    """One row. Its readers raise ValueError with file, line and column."""

    __slots__ = ("_cells", "_file", "_names", "line")

    def __init__(self, file: str, line: int, cells: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        self._file = file
        self.line = line
        self._cells = cells
        self._names = names

    @property
    def columns(self) -> set[str]:
        return set(self._cells)

    @property
    def is_json(self) -> bool:
        """Whether the row is JSON; otherwise it is CSV."""
        return self._names is None

    def has(self, column: str) -> bool:
        """Whether the column exists and is not null."""
        return self._cells.get(column) is not None

    def cell(self, column: str) -> Any:
        value = self._cells.get(column)
        if value is None or value == "":
            raise self.fault(column, "is missing")
        return value

    def fault(self, column: str, complaint: str) -> ValueError:
        shown = self._names.get(column, column) if self._names else column
        return ValueError(f"{self._file}, line {self.line}, column {shown}: {complaint}")

    def number(self, column: str) -> float:
        """A finite number of at least 0."""
        value = self.cell(column)
        try:
            if isinstance(value, str):
                if "_" in value or not value.isascii():
                    raise ValueError
                number = float(value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError
            else:
                number = float(value)
        except (ValueError, OverflowError):
            raise self.fault(column, f"{_shown(value)} is not a number") from None
        if not math.isfinite(number):
            raise self.fault(column, f"{_shown(value)} is not finite")
        if not 0 <= number <= MAX_NUMBER:
            raise self.fault(column, f"{_shown(value)} is {'negative' if number < 0 else 'too large'}")
        return number

    def count(self, column: str) -> int:
        """A whole number of at least 0; ``12.0`` is accepted, as tables with gaps write it."""
        number = self.number(column)
        if number != int(number):
            raise self.fault(column, f"{_shown(self.cell(column))} is not a whole number")
        if number > MAX_TOKENS:
            raise self.fault(column, f"{_shown(self.cell(column))} is more than {MAX_TOKENS:,}")
        return int(number)

    def length(self, column: str) -> int:
        """Tokens or characters, at least 1."""
        tokens = self.count(column)
        if tokens == 0:
            raise self.fault(column, "a length must be at least 1, not 0")
        return tokens

    def stamp_s(self, column: str) -> float:
        """Seconds since 1970 of a date and time with any decimals and any zone; UTC without a zone."""
        text = self.cell(column)
        if not isinstance(text, str):
            raise self.fault(column, f"{_shown(text)} is not a date and time")
        whole, dot, rest = text.strip().partition(".")
        if len(whole) <= len("2024-05-10"):  # a date alone would be read as midnight
            raise self.fault(column, f"{_shown(text)} is not a date and time")
        digits = len(rest) - len(rest.lstrip("0123456789"))
        # decimals of minutes or hours would be read as decimals of a second
        if dot and not (digits and re.search(r"[ T]\d\d:?\d\d:?\d\d$", whole, re.IGNORECASE)):
            raise self.fault(column, f"{_shown(text)} is not a date and time")
        try:
            moment = datetime.fromisoformat(whole + rest[digits:])
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            # more decimals than datetime accepts
            return moment.timestamp() + float("0." + (rest[:digits] or "0"))
        except (ValueError, OverflowError):
            raise self.fault(column, f"{_shown(text)} is not a date and time") from None

    def block_ids(
        self, column: str, input_tokens: int, block_tokens: int, renumbered: dict[int, int] | None = None
    ) -> Sequence[int]:
        """One id for each block of the prompt. One extra id is accepted, because a source may count in other units.

        Args:
            renumbered: takes ids that are too large, such as hashes of 64 bits; None refuses these.
        """
        ids = self.cell(column)
        if not isinstance(ids, list):
            raise self.fault(column, f"{_shown(ids)} is not a list of block ids")
        for block in ids:
            if isinstance(block, bool) or not isinstance(block, int):
                raise self.fault(column, f"{_shown(block)} is not a block id")
            if block < 0 or (block >= NUM_BLOCK_IDS and renumbered is None):
                raise self.fault(column, f"block id {_shown(block)} is not in 0 to {NUM_BLOCK_IDS - 1}")
        needed = -(-input_tokens // block_tokens)
        if not needed <= len(ids) <= needed + 1:
            raise self.fault(
                column, f"{len(ids)} block ids for {input_tokens} tokens in blocks of {block_tokens}: {needed} expected"
            )
        if renumbered is None or max(ids, default=0) < NUM_BLOCK_IDS:
            return ids
        # Large ids stand at the end, where small ones hardly reach.
        return [
            block if 0 <= block < NUM_BLOCK_IDS else NUM_BLOCK_IDS - 1 - renumbered.setdefault(block, len(renumbered))
            for block in ids
        ]


class UnpacksTooMuchError(Exception):
    """A gzip file unpacks to more than ``MAX_UNPACKED_BYTES``."""

    def __str__(self) -> str:
        return f"more than {MAX_UNPACKED_BYTES >> 20} MiB when unpacked; unpack it first if that is meant"


class BoundedGzip(gzip.GzipFile):
    """A gzip file that raises UnpacksTooMuchError where it is read beyond the limit."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = MAX_UNPACKED_BYTES + 1
        return self._checked(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        return self._checked(super().read1(size))

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > MAX_UNPACKED_BYTES:
            raise UnpacksTooMuchError
        return data


def trace_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, without empty lines.

    Raises ValueError, with the file and if known the line, for content that is not UTF-8, truncated, or neither CSV
    with a header nor JSON lines.
    """
    with _text(path) as text:
        first = _first_char(text, path.name)
        text.seek(0)
        yield from _json_rows(path.name, text) if first == "{" else _csv_rows(path.name, text)


def content_name(path: Path) -> str:
    """Identifies a file's content: equal bytes under another name are the same trace."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    with path.open("rb") as raw:
        packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        binary: BinaryIO = BoundedGzip(fileobj=raw) if packed else raw  # type: ignore[assignment]
        text = io.TextIOWrapper(binary, "utf-8-sig", newline="")
        try:
            yield text
        except UnicodeDecodeError:
            raw.seek(0)
            line = line_of_other_text(BoundedGzip(fileobj=raw) if packed else raw)
            raise ValueError(f"{path.name}, line {line}: not text in UTF-8") from None
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise ValueError(f"{path.name}: not a gzip file, or truncated") from None
        except UnpacksTooMuchError as error:
            raise ValueError(f"{path.name}: {error}") from None
        finally:
            text.close()


def line_of_other_text(lines: Iterable[bytes]) -> int:
    """The first line that is not UTF-8. The reader is ahead of its rows and does not know it."""
    for number, line in enumerate(lines, 1):  # noqa: B007
        try:
            line.decode()
        except UnicodeDecodeError:
            break
    return number


def _first_char(text: TextIO, file: str) -> str:
    while chunk := text.read(4096):
        if "\0" in chunk:
            raise ValueError(f"{file}: not a text file")
        if found := chunk.lstrip():
            if found[0] == "[":
                raise ValueError(f"{file}: a JSON list; write one object a line instead")
            return found[0]
    raise ValueError(f"{file} has no requests")


def json_cells(file: str, number: int, line: str) -> dict[str, Any]:
    """The object in a line. Raises ValueError, with the file and the line's number, for anything else."""
    try:
        cells = json.loads(line, object_pairs_hook=_cells_of)
    except _TwiceError as error:
        raise ValueError(f"{file}, line {number}, column {_cut(str(error))}: occurs twice") from None
    except json.JSONDecodeError as error:
        advice = "; write one object a line" if line.strip() == "{" else ""
        raise ValueError(f"{file}, line {number}: not JSON: {error.msg}, character {error.pos + 1}{advice}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number}: not JSON: {error}") from None
    if not isinstance(cells, dict):
        raise ValueError(f"{file}, line {number}: not a JSON object")
    return cells


class _TwiceError(Exception):
    """An object has two values of one name; Python's reader would keep the last."""


def _cells_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    cells = dict(pairs)
    if len(cells) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return cells


def _json_rows(file: str, text: TextIO) -> Iterator[Row]:
    for number, line in enumerate(text, 1):
        if line.strip():
            yield Row(file, number, json_cells(file, number, line))


def _csv_rows(file: str, text: TextIO) -> Iterator[Row]:
    before, header_line = next((number, line) for number, line in enumerate(text, 1) if line.strip())
    delimiter = max(DELIMITERS, key=header_line.count)
    names = [name.strip() for name in next(csv.reader([header_line], delimiter=delimiter))]
    columns = [name.lower() for name in names]
    if all(map(_is_number, names)):
        raise ValueError(f"{file}, line {before}: numbers instead of column names: add a header")
    if len(set(columns)) < len(columns):
        twice = next(name for name, column in zip(names, columns, strict=True) if columns.count(column) > 1)
        raise ValueError(f"{file}, line {before}: two columns are called {twice}")
    shown = dict(zip(columns, names, strict=True))
    # Strict: an unclosed quotation would swallow the following rows into one cell.
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    following, rows = before + 1, 0
    try:
        for cells in reader:
            line, following = following, before + reader.line_num + 1
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue
            if len(cells) != len(columns):
                header = f"the header, line {before}, {_shown(header_line.strip())}"
                raise ValueError(f"{file}, line {line}: {len(cells)} columns, but {header}, has {len(columns)}")
            rows += 1
            yield Row(file, line, dict(zip(columns, cells, strict=True)), shown)
    except csv.Error as error:
        raise ValueError(f"{file}, line {following}: not CSV: {error}") from None
    if not rows:
        raise ValueError(f"{file} has no requests: no rows after its header, {_shown(header_line.strip())}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
