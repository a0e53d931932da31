"""The supported trace formats, recognised by their columns. ``docs/simulate-plan-loadtest.md`` lists them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.loadgen.workloads.trace_rows import Row

CHARS_PER_TOKEN = 4
"""Assumed token length where a source has only characters."""
TEXT_BLOCK_TOKENS = 16
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_MS = 3000
AGENT_SESSION_GAP_S = 10.0
"""Start interval of the agents' sessions in a replay; they were recorded one after the other."""
ARRIVAL_COLUMNS = ("arrival_s", "arrived_at", "arrival_time_s")
LENGTH_COLUMNS = (
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_length", "output_length"),
)
STAMP_ADVICE = (
    "if its timestamp is in seconds, call that column arrival_s (Mooncake's, in milliseconds, is read from JSON lines)"
)
FAILED = "failed requests, which have no response"
NO_OUTPUT = "requests without output"
NO_LENGTH = "requests without output_length"
NO_STAMP = "requests with a delay after an unknown one"


class TraceEntry(NamedTuple):
    """The content of a row."""

    stamp: float
    """In the format's own unit."""
    input_tokens: int
    output_tokens: int
    block_ids: Sequence[int] | None = None
    """None: nothing is known about shared prefixes."""


@dataclass(slots=True, kw_only=True)
class TraceFormat:
    """Reads the rows of one file; it may remember earlier rows."""

    name: str
    read: Callable[[Row], TraceEntry | str]
    """Returns an entry, or the reason why the row is not a request."""
    has_arrivals: bool = True
    advice: str = "add a column arrival_s"
    """Advice for a file without arrivals where they are needed."""
    from_first: bool = False
    """Arrivals count from the earliest stamp; else from 0."""
    in_order: bool = True
    """Whether the source is sorted by arrival, so that an unsorted file was changed."""
    stamps_per_s: float = 1.0
    tick: float | None = None
    """If all stamps are multiples of it, requests are spread evenly over each tick."""
    block_tokens: int = 1
    may_be_seconds: bool = False
    """Whether some files with these columns have stamps in seconds."""


def format_of(row: Row) -> TraceFormat | None:
    """The format that matches the columns of a file's first row; None if none does."""
    return next((make(row) for fits, make in _FORMATS if fits(row)), None)


KNOWN = (
    "TIMESTAMP, ContextTokens, GeneratedTokens (Azure)",
    "Timestamp, Request tokens, Response tokens (BurstGPT)",
    "timestamp, input_length, output_length, hash_ids as JSON lines (Mooncake)",
    "session, offset_ms, input_chars, output_chars, hash_ids or timestamp, session_id, input, output (LMCache agents)",
    "input_length, output_length, hash_ids as JSON lines (ServeGen's batch jobs)",
    "arrival_s or arrived_at, or neither for offline work, with one of "
    + "; ".join(f"{a}, {b}" for a, b in LENGTH_COLUMNS),
)
"""Listed in the error for a file of unknown format."""


def _azure(row: Row) -> TraceFormat:
    def read(row: Row) -> TraceEntry | str:
        stamp_s, input_tokens = row.stamp_s("timestamp"), row.length("contexttokens")
        output_tokens = row.count("generatedtokens")
        return TraceEntry(stamp_s, input_tokens, output_tokens) if output_tokens else NO_OUTPUT

    return TraceFormat(name="Azure", read=read, from_first=True)


def _burstgpt(row: Row) -> TraceFormat:
    def read(row: Row) -> TraceEntry | str:
        stamp_s, output_tokens = row.number("timestamp"), row.count("response tokens")
        if not output_tokens:
            row.count("request tokens")
            return FAILED
        return TraceEntry(stamp_s, row.length("request tokens"), output_tokens)

    return TraceFormat(name="BurstGPT", read=read, from_first=True)


@dataclass(slots=True)
class _Mooncake:
    """Mooncake's rows, and those of load generators that write its form: a row may have a ``delay`` after its session's
    previous row instead of a stamp, and a text instead of a length."""

    sessions_ms: dict[Any, float] = field(default_factory=dict)
    """Stamp of the last row of each session."""
    renumbered: dict[int, int] = field(default_factory=dict)
    """Block ids that are hashes of 64 bits, and the ids that stand for them."""

    def read(self, row: Row) -> TraceEntry | str:
        stamp_ms = self._stamp_ms(row)
        if stamp_ms is None:
            return NO_STAMP
        if not row.has("output_length"):
            return NO_LENGTH
        output_tokens = row.count("output_length")
        if row.has("input_length"):
            input_tokens = row.length("input_length")
        elif isinstance(text := row.cell("text_input"), str):
            input_tokens = max(1, len(text) // CHARS_PER_TOKEN)
        else:
            raise row.fault("text_input", "is not a text")
        blocks = None
        if row.has("hash_ids"):
            blocks = row.block_ids("hash_ids", input_tokens, MOONCAKE_BLOCK_TOKENS, self.renumbered)
        return TraceEntry(stamp_ms, input_tokens, output_tokens, blocks) if output_tokens else NO_OUTPUT

    def _stamp_ms(self, row: Row) -> float | None:
        """Milliseconds; None for a row that says only how long after an unknown one it comes."""
        session = _session(row, "session_id") if row.has("session_id") else None
        if row.has("timestamp"):
            stamp_ms: float | None = row.number("timestamp")
        elif row.has("delay"):
            before_ms = self.sessions_ms.get(session)
            stamp_ms = None if before_ms is None else before_ms + row.number("delay")
        else:
            stamp_ms = row.number("timestamp")  # Says that it is missing.
        if session is not None and stamp_ms is not None:
            self.sessions_ms[session] = stamp_ms
        return stamp_ms


def _mooncake(row: Row) -> TraceFormat:
    return TraceFormat(
        name="Mooncake",
        read=_Mooncake().read,
        from_first=True,
        in_order=not row.has("session_id"),
        stamps_per_s=1000.0,
        tick=MOONCAKE_TICK_MS,
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        may_be_seconds=True,
    )


def _agents(row: Row) -> TraceFormat:
    starts_s: dict[Any, float] = {}

    def read(row: Row) -> TraceEntry:
        start_s = starts_s.setdefault(_session(row, "session"), len(starts_s) * AGENT_SESSION_GAP_S)
        # a few characters may be less than a token
        input_tokens = max(1, row.length("input_chars") // CHARS_PER_TOKEN)
        output_tokens = max(1, row.length("output_chars") // CHARS_PER_TOKEN)
        blocks = row.block_ids("hash_ids", input_tokens, TEXT_BLOCK_TOKENS)
        return TraceEntry(start_s + row.number("offset_ms") / 1000, input_tokens, output_tokens, blocks)

    return TraceFormat(name="LMCache agents", read=read, in_order=False, block_tokens=TEXT_BLOCK_TOKENS)


@dataclass(slots=True)
class _AgentTexts:
    """The agents' traces as published: texts, whose equal beginnings become equal block ids."""

    starts_s: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """Start of each session in the replay and in the file."""
    blocks: dict[tuple[int, str], int] = field(default_factory=dict)

    def read(self, row: Row) -> TraceEntry:
        stamp_s, session = row.number("timestamp"), _session(row, "session_id")
        started = (len(self.starts_s) * AGENT_SESSION_GAP_S, stamp_s)
        start_s, first_s = self.starts_s.setdefault(session, started)
        if stamp_s < first_s:
            raise row.fault("timestamp", f"{stamp_s:g} is before the session's first row, {first_s:g}")
        text = row.cell("input")
        text = text if isinstance(text, str) else _conversation(row, text)
        if not text:
            raise row.fault("input", "is empty")
        output = row.cell("output")
        if not isinstance(output, str):
            raise row.fault("output", "is not a text")
        input_tokens = max(1, len(text) // CHARS_PER_TOKEN)
        chars = TEXT_BLOCK_TOKENS * CHARS_PER_TOKEN
        chain, before = [], -1
        for at in range(0, input_tokens * CHARS_PER_TOKEN, chars):
            before = self.blocks.setdefault((before, text[at : at + chars]), len(self.blocks))
            chain.append(before)
        return TraceEntry(start_s + stamp_s - first_s, input_tokens, max(1, len(output) // CHARS_PER_TOKEN), chain)


def _agent_texts(row: Row) -> TraceFormat:
    return TraceFormat(
        name="LMCache agents, texts", read=_AgentTexts().read, in_order=False, block_tokens=TEXT_BLOCK_TOKENS
    )


def _batch_job(row: Row) -> TraceFormat:
    def read(row: Row) -> TraceEntry | str:
        input_tokens = row.length("input_length")
        blocks = row.block_ids("hash_ids", input_tokens, TEXT_BLOCK_TOKENS) if row.has("hash_ids") else None
        # the source has no outputs: one token each, so prefill work
        output_tokens = row.count("output_length") if row.has("output_length") else 1
        return TraceEntry(0.0, input_tokens, output_tokens, blocks) if output_tokens else NO_OUTPUT

    return TraceFormat(name="ServeGen batch job", read=read, has_arrivals=False, block_tokens=TEXT_BLOCK_TOKENS)


def _lengths(row: Row) -> TraceFormat:
    arrivals = [name for name in ARRIVAL_COLUMNS if name in row.columns]
    lengths = [names for names in LENGTH_COLUMNS if row.columns.issuperset(names)]
    for alike in (arrivals, [names[0] for names in lengths]):
        if len(alike) > 1:
            raise row.fault(alike[1], f"is ambiguous with {alike[0]}: remove one of them")
    arrival = arrivals[0] if arrivals else None
    inputs, outputs = lengths[0]

    def read(row: Row) -> TraceEntry | str:
        if row.has("hash_ids"):
            raise row.fault("hash_ids", "is not in the first row, which defines the format")
        arrival_s, input_tokens = row.number(arrival) if arrival else 0.0, row.length(inputs)
        output_tokens = row.count(outputs)
        return TraceEntry(arrival_s, input_tokens, output_tokens) if output_tokens else NO_OUTPUT

    lengths_only = TraceFormat(name="lengths", read=read, has_arrivals=arrival is not None)
    if "timestamp" in row.columns:
        lengths_only.advice = STAMP_ADVICE
    return lengths_only


def _session(row: Row, column: str) -> Any:
    session = row.cell(column)
    if not isinstance(session, str | int):
        raise row.fault(column, "is not a name or a number")
    return session


def _conversation(row: Row, messages: Any) -> str:
    """The text of a list of messages."""
    try:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    except (KeyError, TypeError):
        raise row.fault("input", "is neither a text nor a list of messages") from None


def _has_lengths(row: Row) -> bool:
    """Without block ids, whose block size only the other columns of their format define."""
    return any(row.columns.issuperset(names) for names in LENGTH_COLUMNS) and "hash_ids" not in row.columns


def _with(*columns: str) -> Callable[[Row], bool]:
    wanted = set(columns)
    return lambda row: wanted <= row.columns


def _is_mooncake(row: Row) -> bool:
    """A CSV file with these columns is not Mooncake's, and most likely in seconds."""
    return row.is_json and "timestamp" in row.columns and not row.columns.isdisjoint({"input_length", "text_input"})


_FORMATS: tuple[tuple[Callable[[Row], bool], Callable[[Row], TraceFormat]], ...] = (
    (_with("timestamp", "contexttokens", "generatedtokens"), _azure),
    (_with("timestamp", "request tokens", "response tokens"), _burstgpt),
    (_with("session", "offset_ms", "input_chars", "output_chars", "hash_ids"), _agents),
    (_with("timestamp", "session_id", "input", "output"), _agent_texts),
    (_is_mooncake, _mooncake),
    (_has_lengths, _lengths),
    (_with("input_length"), _batch_job),
)
