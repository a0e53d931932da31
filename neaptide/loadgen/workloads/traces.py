"""Recorded request traces: lengths, arrival times and shared prefixes, without any text.

A prompt is a row of segments ``(content id, tokens)``. Equal leading segments mean equal leading tokens, so a prefix
cache finds in a replay what it could have found in production. ``token_ids`` turns segments into tokens.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Segments = tuple[tuple[int, int], ...]
Row = dict[str, Any]

FIRST_TOKEN_ID = 6
"""Ids below are the special tokens of the bundled tokenizer."""
CHARS_PER_TOKEN = 4
"""What a token is taken to be where a source has characters only."""
TEXT_BLOCK_TOKENS = 16
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_MS = 3000
AGENT_SESSION_GAP_S = 10.0
"""The agents' sessions were recorded one after the other; a replay starts one every so many seconds."""
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
    """Seconds since the start of the replay; 0.0 where the set has no arrival times."""
    segments: Segments
    """``(content id, tokens)`` in prompt order: equal leading segments are equal leading tokens."""
    output_tokens: int
    """The true length, at least 1. The scheduler must not see it before the request ends."""

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

    name_or_path: a name of ``online_names()``, or a file in one of their formats (its columns tell which).
    window_s: ``(A, B)`` keeps the requests with A <= arrival < B, in trace seconds before ``speed``; their arrivals
        then count from A.
    speed: arrival times are divided by it.
    max_input_tokens: leaves out the requests with longer prompts.

    Content ids depend on the trace and on a request's place in it only: another window or speed keeps them.
    Raises ValueError for an unknown name or format, and as ``select`` does.
    """
    path = _online_path(name_or_path)
    requests = _read_online(path, content_base(path.name))
    return select(requests, window_s=window_s, speed=speed, max_input_tokens=max_input_tokens)


def select(
    requests: Sequence[TraceRequest],
    *,
    window_s: tuple[float, float] | None = None,
    speed: float = 1.0,
    max_input_tokens: int | None = None,
) -> list[TraceRequest]:
    """The requests of a window, replayed at a speed, sorted by arrival; the arguments are those of ``load_online``.

    Raises ValueError for a speed that is not positive, and for a window that starts before 0, has no length or holds
    no request.
    """
    if not speed > 0:
        raise ValueError(f"speed must be positive, not {speed}")
    start_s, end_s = window_s or (0.0, float("inf"))
    if not start_s >= 0:
        raise ValueError(f"window {start_s:g}:{end_s:g} starts before the trace, which starts at 0")
    if not end_s > start_s:
        raise ValueError(f"window {start_s:g}:{end_s:g} has no length")
    inside = [request for request in requests if start_s <= request.arrival_s < end_s]
    if requests and not inside:
        last_s = max(request.arrival_s for request in requests)
        raise ValueError(f"no request lies in the window {start_s:g}:{end_s:g}: the last one arrives at {last_s:.1f} s")
    kept = [
        TraceRequest((request.arrival_s - start_s) / speed, request.segments, request.output_tokens)
        for request in inside
        if max_input_tokens is None or request.input_tokens <= max_input_tokens
    ]
    return sorted(kept, key=lambda request: request.arrival_s)


def token_ids(segments: Segments, vocab_size: int) -> NDArray[np.int32]:
    """The tokens of a prompt, shape ``[input tokens]``, ids in 6 .. vocab_size - 1.

    A token is a hash of its content id and its position inside the segment: a shorter segment is the start of a longer
    one with the same content id. The same on every machine and in every process. Raises ValueError for a vocabulary
    without room for ordinary tokens.
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
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def content_base(namespace: str) -> int:
    """The first content id of a namespace, with room for 2**31: two sets share no content unless they mean to."""
    return zlib.crc32(namespace.encode()) << 31


def delayed(requests: Iterable[TraceRequest], seconds: float) -> list[TraceRequest]:
    """The same requests, so much later: time for offline work to come up to its level before the first of them."""
    return [replace(request, arrival_s=request.arrival_s + seconds) for request in requests]


def block_segments(base: int, hash_ids: Sequence[int], block_tokens: int, input_tokens: int) -> Segments:
    """Segments of a prompt whose blocks are numbered; the last block is cut to the prompt's length."""
    whole = input_tokens // block_tokens
    segments = [(base + block, block_tokens) for block in hash_ids[:whole]]
    if rest := input_tokens - whole * block_tokens:
        segments.append((base + hash_ids[whole], rest))
    return tuple(segments)


def data_file(*parts: str) -> Path:
    """A file of the bundled traces."""
    return Path(str(resources.files("neaptide"))).joinpath("data", "traces", *parts)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header, gzipped or not."""
    return list(csv.DictReader(_read_text(path).splitlines()))


def read_jsonl(path: Path) -> list[Row]:
    """The objects of a JSON lines file, gzipped or not; empty lines are passed over. Raises as ``numbered_jsonl``."""
    return [row for _, row in numbered_jsonl(path)]


def numbered_jsonl(path: Path) -> list[tuple[int, Row]]:
    """The objects of a JSON lines file, each with the number of its line; the first is 1.

    Raises ValueError, with the file's name and the line's number, for a line that is no JSON object.
    """
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}, line {number}: not a JSON object")
        rows.append((number, row))
    return rows


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path.name}: not text in UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ValueError(f"{path.name}: not a gzip file, or cut off") from None


def _online_path(name_or_path: str | Path) -> Path:
    if bundled := ONLINE_TRACES.get(str(name_or_path)):
        return data_file("online", bundled)
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"no trace {str(name_or_path)!r}: neither a file nor one of {', '.join(ONLINE_TRACES)}")
    return path


def _read_online(path: Path, base: int) -> list[TraceRequest]:
    rows: Sequence[Row] = read_csv(path) if ".csv" in path.suffixes else read_jsonl(path)
    if not rows:
        raise ValueError(f"{path.name} has no requests")
    read = _format(path, set(rows[0]))
    try:
        return read(rows, base)
    except KeyError as error:
        raise ValueError(f"{path.name}: a row has no {error}") from error
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path.name}: a row is not as its format wants it: {error}") from error


def _format(path: Path, columns: set[str]) -> Callable[[Sequence[Row], int], list[TraceRequest]]:
    if "TIMESTAMP" in columns:
        return _azure
    if "arrival_s" in columns:
        return _resampled
    if "session" in columns:
        return _agents
    if {"timestamp", "hash_ids"} <= columns:
        return _mooncake
    raise ValueError(f"{path.name} has no columns of a known trace format: {sorted(columns)}")


def _azure(rows: Sequence[Row], base: int) -> list[TraceRequest]:
    stamps_s = [_azure_seconds(row["TIMESTAMP"]) for row in rows]
    return [
        _unshared(base + k, stamp_s - stamps_s[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for k, (stamp_s, row) in enumerate(zip(stamps_s, rows, strict=True))
    ]


def _azure_seconds(stamp: str) -> float:
    # seven decimals: one more than datetime reads
    whole, _, fraction = stamp.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float("0." + (fraction or "0"))


def _resampled(rows: Sequence[Row], base: int) -> list[TraceRequest]:
    return [
        _unshared(base + k, float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
        for k, row in enumerate(rows)
    ]


def _unshared(content_id: int, arrival_s: float, input_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(arrival_s, ((content_id, input_tokens),), max(1, output_tokens))


def _mooncake(rows: Sequence[Row], base: int) -> list[TraceRequest]:
    arrivals_s = _spread_ticks([row["timestamp"] for row in rows])
    return [
        TraceRequest(
            arrival_s,
            block_segments(base, row["hash_ids"], MOONCAKE_BLOCK_TOKENS, row["input_length"]),
            max(1, row["output_length"]),
        )
        for arrival_s, row in zip(arrivals_s, rows, strict=True)
    ]


def _spread_ticks(stamps_ms: list[int]) -> list[float]:
    """Arrival seconds of sorted stamps; where all stamps are ticks, a tick's requests are spread evenly over it."""
    stamps = np.array(stamps_ms)
    ticks = np.rint(stamps / MOONCAKE_TICK_MS).astype(np.int64)
    if np.abs(stamps - ticks * MOONCAKE_TICK_MS).max() > 1:  # the recorded ticks are up to 1 ms off
        return [(stamp - stamps_ms[0]) / 1000 for stamp in stamps_ms]
    _, ranks, counts = np.unique(ticks, return_inverse=True, return_counts=True)
    place = np.arange(len(ticks)) - (np.cumsum(counts) - counts)[ranks]
    spread: list[float] = ((ticks - ticks[0] + place / counts[ranks]) * (MOONCAKE_TICK_MS / 1000)).tolist()
    return spread


def _agents(rows: Sequence[Row], base: int) -> list[TraceRequest]:
    order = {session: k for k, session in enumerate(dict.fromkeys(row["session"] for row in rows))}
    return [
        TraceRequest(
            order[row["session"]] * AGENT_SESSION_GAP_S + row["offset_ms"] / 1000,
            block_segments(base, row["hash_ids"], TEXT_BLOCK_TOKENS, row["input_chars"] // CHARS_PER_TOKEN),
            max(1, row["output_chars"] // CHARS_PER_TOKEN),
        )
        for row in rows
    ]
