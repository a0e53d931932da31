"""Recorded request traces: lengths, arrival times and shared prefixes, without any text.

A prompt is a sequence of segments ``(content id, tokens)``. Equal leading segments mean equal leading tokens, so a
replay has the prefix hits that production could have had. ``token_ids`` turns segments into tokens.
"""

import csv
import gzip
import io
import logging
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neaptide.loadgen.workloads.trace_reader import WHOLE, TraceFile, read_trace
from neaptide.loadgen.workloads.trace_rows import (
    GZIP_MAGIC,
    NUM_BLOCK_IDS,
    BoundedGzip,
    UnpacksTooMuchError,
    content_name,
    json_cells,
    line_of_other_text,
)

log = logging.getLogger(__name__)

Segments = tuple[tuple[int, int], ...]
Row = dict[str, Any]

FIRST_TOKEN_ID = 6
"""Smaller ids are the special tokens of the bundled tokenizer."""
ONLINE_TRACES = {
    "azure_conv_2023": "azure_conv_2023.csv.gz",
    "azure_code_2023": "azure_code_2023.csv.gz",
    "mooncake_conversation": "mooncake_conversation.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic.jsonl.gz",
    "agent_miniswe": "agent_miniswe.jsonl.gz",
    "servegen_r1_resampled": "servegen_r1_resampled.csv.gz",
}


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request of a trace or of an offline set."""

    arrival_s: float
    """Seconds since the start of the replay; 0.0 if the set has no arrival times."""
    segments: Segments
    """``(content id, tokens)`` in prompt order: equal leading segments are equal leading tokens."""
    output_tokens: int
    """The true length, at least 1. The scheduler must not see it before the request ends."""
    is_fixed: bool = False
    """The caller asked for exactly this length (``ignore_eos``), so it is known for offline requests."""

    @property
    def input_tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


def online_names() -> tuple[str, ...]:
    """The traces that ``load_online`` knows by name."""
    return tuple(ONLINE_TRACES)


def load_online(
    name_or_path: str | Path,
    *,
    window_s: tuple[float, float] | None = None,
    speed: float = 1.0,
    max_input_tokens: int | None = None,
) -> list[TraceRequest]:
    """The requests of a trace, sorted by arrival.

    name_or_path: a name of ``online_names()``, or a file in one of the formats of ``trace_formats``, recognised by its
    columns.
    window_s: ``(A, B)`` keeps the requests with A <= arrival < B, in trace seconds before ``speed``. Their arrivals
    then count from A.
    speed: arrival times are divided by it.
    max_input_tokens: skips requests with longer prompts.

    Content ids depend only on the trace's content and a request's position in it, not on the window, speed or file
    name. Raises ValueError for an unknown name, like ``read_trace`` for the file, and like ``select``.
    """
    check_cut(window_s, speed)
    path = _online_path(name_or_path)
    bundled = str(name_or_path) in ONLINE_TRACES
    trace = read_trace(path, window_s or WHOLE)
    if window_s is not None and not trace.rows:
        raise empty_window(window_s, trace.last_s)
    requests = _requests(trace, content_base(path.name if bundled else content_name(path)))
    return select(requests, window_s=window_s, speed=speed, max_input_tokens=max_input_tokens)


def load_lengths(
    path: Path, base: int, limit: int | None = None, *, recorded_arrivals: bool = False
) -> list[TraceRequest]:
    """The requests of a trace in file order, with content ids from ``base`` on; arrivals are 0.

    recorded_arrivals: sort by arrival instead; the trace must have arrivals. Raises ValueError like ``read_trace``.
    """
    trace = read_trace(path, needs_arrivals=recorded_arrivals)
    if recorded_arrivals:
        return _requests(trace, base)[:limit]
    trace.rows.sort(key=lambda row: row.number)
    return [replace(request, arrival_s=0.0) for request in _requests(trace, base)[:limit]]


def select(
    requests: Sequence[TraceRequest],
    *,
    window_s: tuple[float, float] | None = None,
    speed: float = 1.0,
    max_input_tokens: int | None = None,
) -> list[TraceRequest]:
    """The requests of a window, replayed at a speed, sorted by arrival; the arguments are those of ``load_online``.

    Raises ValueError for a speed that is not positive, and for a window that starts before 0, has no length or contains
    no request.
    """
    check_cut(window_s, speed)
    start_s, end_s = window_s or WHOLE
    inside = [request for request in requests if start_s <= request.arrival_s < end_s]
    if requests and not inside:
        raise empty_window((start_s, end_s), max(request.arrival_s for request in requests))
    kept = [
        TraceRequest((request.arrival_s - start_s) / speed, request.segments, request.output_tokens)
        for request in inside
        if max_input_tokens is None or request.input_tokens <= max_input_tokens
    ]
    if left_out := len(inside) - len(kept):
        log.info("%d of %d requests skipped: prompts above %s tokens", left_out, len(inside), max_input_tokens)
    return sorted(kept, key=lambda request: request.arrival_s)


def check_cut(window_s: tuple[float, float] | None, speed: float) -> None:
    """Raises ValueError for a speed that is not positive, and a window that starts before 0 or has no length."""
    if not 0 < speed < math.inf:
        raise ValueError(f"speed must be positive, not {speed}")
    start_s, end_s = window_s or WHOLE
    if not start_s >= 0:
        raise ValueError(f"window {start_s:g}:{end_s:g} starts before the trace, which starts at 0")
    if not end_s > start_s:
        raise ValueError(f"window {start_s:g}:{end_s:g} has no length")


def window_of(text: str | None, flag: str) -> tuple[float, float] | None:
    """``A:B`` in seconds from the command line. Raises ValueError, naming the flag."""
    if text is None:
        return None
    start, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(start), float(end)
    except ValueError:
        raise ValueError(f"{flag} must be two numbers A:B in seconds, not {text!r}") from None


def empty_window(window_s: tuple[float, float], last_s: float) -> ValueError:
    start_s, end_s = window_s
    return ValueError(f"no request lies in the window {start_s:g}:{end_s:g}: the last one arrives at {last_s:.1f} s")


def token_ids(segments: Segments, vocab_size: int) -> NDArray[np.int32]:
    """The tokens of a prompt, shape ``[input tokens]``, with ids in 6 .. vocab_size - 1.

    A token is a hash of its content id and its position in the segment, equal on every machine and in every process. So
    a shorter segment is the beginning of a longer one with the same content id. Raises ValueError for a vocabulary
    without ordinary tokens.
    """
    choices = vocab_size - FIRST_TOKEN_ID
    if choices <= 0:
        raise ValueError(f"a vocabulary of {vocab_size} has no ordinary tokens")
    if not segments:
        return np.zeros(0, np.int32)
    content, counts = np.array(segments, np.uint64).T
    lengths = counts.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    mixed = _mix(np.repeat(_mix(content), lengths) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    scaled = (mixed >> np.uint64(32)) * np.uint64(choices) >> np.uint64(32)
    return scaled.astype(np.int32) + np.int32(FIRST_TOKEN_ID)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def content_base(namespace: str) -> int:
    """The first of a namespace's 2**31 content ids. Two sets share no content unless intended."""
    return zlib.crc32(namespace.encode()) << 31


def salted(requests: Iterable[TraceRequest], salt: str) -> list[TraceRequest]:
    """The same load with other words.

    Sharing between the prompts stays the same; they share nothing with those of another salt or none.
    """
    # Not by CRC, as for namespaces: the difference between two CRCs also occurs between two others.
    moved = int.from_bytes(sha256(salt.encode()).digest()[:4]) << 31
    return [
        replace(request, segments=tuple((content ^ moved, tokens) for content, tokens in request.segments))
        for request in requests
    ]


def delayed(requests: Iterable[TraceRequest], seconds: float) -> list[TraceRequest]:
    """The same requests ``seconds`` later, so that offline work can reach its level first."""
    return [replace(request, arrival_s=request.arrival_s + seconds) for request in requests]


def block_segments(base: int, hash_ids: Sequence[int], block_tokens: int, input_tokens: int) -> Segments:
    """Segments of a prompt whose blocks are numbered. The last block is cut to the prompt's length."""
    whole = input_tokens // block_tokens
    segments = [(base + block, block_tokens) for block in hash_ids[:whole]]
    if rest := input_tokens - whole * block_tokens:
        segments.append((base + hash_ids[whole], rest))
    return tuple(segments)


def data_file(*parts: str) -> Path:
    """Path of a bundled trace file."""
    return Path(str(resources.files("neaptide"))).joinpath("data", "traces", *parts)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header, gzipped or not."""
    return list(csv.DictReader(_read_text(path).splitlines()))


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSON lines file, gzipped or not, without empty lines. Raises like ``numbered_jsonl``."""
    return [row for _, row in numbered_jsonl(path)]


def numbered_jsonl(path: Path) -> list[tuple[int, Row]]:
    """The objects of a JSON lines file with their line numbers, from 1.

    Raises ValueError, with the file's name and the line's number, for a line that is not a JSON object.
    """
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            rows.append((number, json_cells(path.name, number, line)))
    return rows


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        content = BoundedGzip(fileobj=io.BytesIO(content)).read() if content.startswith(GZIP_MAGIC) else content
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        line = line_of_other_text(content.split(b"\n"))
        raise ValueError(f"{path.name}, line {line}: not text in UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path.name}: not a gzip file, or truncated") from None
    except UnpacksTooMuchError as error:
        raise ValueError(f"{path.name}: {error}") from None


def check_regular(path: Path) -> None:
    """Raises ValueError for a pipe or a directory. A name that does not exist passes, because callers know
    other names."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file; a trace is read more than once, so save a pipe to a file first")


def _online_path(name_or_path: str | Path) -> Path:
    if bundled := ONLINE_TRACES.get(str(name_or_path)):
        return data_file("online", bundled)
    path = Path(name_or_path)
    check_regular(path)
    if not path.is_file():
        raise ValueError(f"no trace {str(name_or_path)!r}: neither a file nor one of {', '.join(ONLINE_TRACES)}")
    return path


def _requests(trace: TraceFile, base: int) -> list[TraceRequest]:
    """The requests of the rows. Contents of rows without block ids are after all block ids, so they share nothing."""
    size = trace.format.block_tokens
    return [
        TraceRequest(
            row.arrival_s,
            ((base + NUM_BLOCK_IDS + row.number, row.entry.input_tokens),)
            if row.entry.block_ids is None
            else block_segments(base, row.entry.block_ids, size, row.entry.input_tokens),
            row.entry.output_tokens,
        )
        for row in trace.rows
    ]
