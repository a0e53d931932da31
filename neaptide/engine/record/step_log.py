"""The step log: the engine's messages, its planning times and its decisions, enough to replay a run exactly.

JSON Lines, one struct of this module per line; the field ``is`` names the struct. Prompts are written as numbers of
interned blocks, never as text or token ids. Requests are written as *handles*: integers in the order in which the log
names them, consecutive for the lines of a batch. docs/simulation.md describes the format.
"""

import errno
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from neaptide.engine.config import SchedulerConfig, SharedReads
from neaptide.engine.params import Tier
from neaptide.engine.private_files import private_opener
from neaptide.engine.record.block_numbers import Ranges

VERSION = 3
GZIP_MAGIC = b"\x1f\x8b"


class _LogLine(msgspec.Struct, tag_field="is", omit_defaults=True):
    pass


class HeaderLine(_LogLine, tag="header"):
    version: int
    scheduler: SchedulerConfig
    block_size: int
    prefix_cache: bool
    num_blocks: int
    recipe: dict[str, Any]
    """How to make the cost model and the headroom predictor again; the engine does not read it."""
    num_host_blocks: int = 0
    slot_copies: bool = False
    shared_reads: SharedReads | None = None


class AddLine(_LogLine, tag="add"):
    """An ``AddRequest``; it takes the next handle."""

    id: str
    tier: Tier
    arrival_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    max_tokens: int
    tokens: int
    """Number of prompt tokens."""
    blocks: Ranges
    """The prompt's full blocks. Equal numbers mean equal text after equal text."""
    scores_prompt: bool = False
    """Whether the prompt's log-probabilities are requested; it then takes no prefix hit."""
    share: str = ""


class BatchLine(_LogLine, tag="batch"):
    """An ``AddBatch``; each line takes the next handle. The blocks of each follow in its ``RowLine``."""

    id: str
    now_s: float
    deadline_s: float
    rows: list[tuple[int, int, int]]
    """Line number, prompt tokens and max_tokens of each."""
    scores_prompt: list[int] = []
    """Lines that take no prefix hit."""
    order: list[int] = []
    """Order of ``rows`` as indices into it, under a policy that sorts lines by text."""
    behind: list[int] = []
    """Handle of the preceding line for each entry of ``order``, if earlier messages brought lines of the batch; -1 for
    none."""
    share: str = ""
    file: int = 0
    """Number of the token file, under a policy that follows shared prefixes. Lines of one file are in one order."""
    prefixes: dict[str, list[int]] = {}
    """Arrays of the file's ``PrefixTree``. Omitted if no lines share a prefix or an earlier record has them."""


class RowLine(_LogLine, tag="row"):
    """First time that the scheduler makes a batch line into a request. Omitted for a line without full blocks."""

    request: int
    """Handle of the line."""
    blocks: Ranges


class AbortLine(_LogLine, tag="abort"):
    ids: list[str]
    reason: int
    now_s: float


class CancelLine(_LogLine, tag="cancel"):
    id: str


class OfflineLine(_LogLine, tag="offline"):
    paused: bool


class WeightsLine(_LogLine, tag="weights"):
    """A ``SetShareWeights``."""

    weights: dict[str, float]


class OrderLine(_LogLine, tag="order"):
    """A ``PlanReady``: an order of waiting lines."""

    rows: list[int]
    """Handles in the order; -1 for a line that has ended."""
    ends: list[float] = []
    """Dual scan: density of the whole order, seconds per computed token, seconds per read token. Empty without dual
    scan."""
    densities: list[float] = []
    """Density of each window."""
    memory_s: list[float] = []
    """Memory time of each window, in seconds."""
    held_tokens: list[int] = []
    """Tokens of KV that each row holds."""
    lasting_steps: list[int] = []
    """Length of each row's answer, in steps."""
    turns: list[int] = []
    """Place of each row in the expected order of admission."""
    starts: list[int] = []
    """[order] Start steps of the timetable; empty if there is none."""
    kv_tokens: int = 0
    """Tokens of KV memory that the timetable was planned for."""
    first: int = 0
    """Rows at the front that are admitted before both ends."""
    tile: int = 1
    """Tile size: the token count of a step should be a multiple of it."""


class ObserveLine(_LogLine, tag="observe"):
    """A measured step that the cost model learned from before the engine's first."""

    shape: list[int]
    """The fields of ``BatchShape``, in order."""
    seconds: float


class IdleLine(_LogLine, tag="idle"):
    """A planning that found no request that could run. While nothing else happens, one such line per second is written:
    the plannings between them change nothing."""

    start_s: float


class PlanLine(_LogLine, tag="plan"):
    """Planning of a step while none is in flight, of an engine that overlaps steps. The step's ``StepLine`` follows
    when it is done."""

    t: list[float]
    """Seconds: when planning began and ended."""


class StepLine(_LogLine, tag="step"):
    """A step: its plan as differences from the step before, and the requests that ended with it."""

    step: int
    t: list[float]
    """Seconds: when planning began and ended (omitted if equal), and when the step was done."""
    predicted: list[float]
    """Seconds: prediction, margin, budget (0 for none); rounded to nanoseconds."""
    kv: list[int]
    """Blocks after the step: cached, held by online, held by offline."""
    join: list[int] = []
    """Requests that compute one token now and did not in the step before."""
    leave: list[int] = []
    """Requests that computed one token in the step before and do not now."""
    chunks: list[tuple[int, int]] = []
    """Every request that computes more than one token: handle, tokens."""
    admit: list[tuple[int, int]] = []
    """Requests that got their blocks in this step: handle, tokens found in the cache."""
    preempt: list[int] = []
    end: list[tuple[int, int, int, Ranges]] = []
    """Requests that ended since the step before: handle, output tokens, ``FinishReason``, and the full blocks that end
    in the output."""
    errors: dict[str, str] = {}
    """Errors of the requests (handles) that failed in the executor."""
    late: dict[str, float] = {}
    """Requests (handles) that sampled nothing because their masks were late. Values: seconds for which they were put
    off."""
    mask_s: float = 0.0
    """Seconds that the step waited for masks."""
    in_parts: bool = False
    """Whether the step had to be run in parts; its time then taught the cost model nothing."""
    given_up: bool = False
    """Whether an online arrival aborted the step. Only its admissions and preemptions count."""
    next: list[float] = []
    """Times of the next planning, in seconds, of an engine that overlaps steps: when it began, and when it ended if it
    gave a step. All messages above this line were known then."""


Message = AddLine | BatchLine | AbortLine | CancelLine | OfflineLine | WeightsLine | OrderLine
Line = HeaderLine | ObserveLine | Message | RowLine | IdleLine | PlanLine | StepLine


def create_log(path: str | Path, max_bytes: int | None = None) -> IO[bytes]:
    """Opens a new step log for writing. It is compressed if the name ends in ``.gz``, with the same bytes every time.

    Beyond ``max_bytes`` on disk a write raises OSError; the log ends there.
    """
    raw = _BoundedFile(path, max_bytes)
    if str(path).endswith(".gz"):
        return cast(IO[bytes], _OwningGzip(raw))
    return io.BufferedWriter(raw)


class _BoundedFile(io.FileIO):
    """A private file of limited size."""

    def __init__(self, path: str | Path, max_bytes: int | None) -> None:
        super().__init__(path, "wb", opener=private_opener)
        self._left_bytes = max_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._left_bytes is None:
            return super().write(view)
        fits = view[: self._left_bytes]
        self._left_bytes -= len(fits)
        num_written = super().write(fits)
        if len(fits) < len(view):
            raise OSError(errno.EFBIG, "it has reached its size limit")
        return num_written


class _OwningGzip(gzip.GzipFile):
    """Gzip file without name and time in its header; closes the underlying file."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(filename="", mode="wb", fileobj=raw, mtime=0)
        self._raw = raw

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._raw.close()


def read_log(path: str | Path) -> Iterator[Line]:
    """The lines of a step log. A log that was cut off yields its whole lines.

    Raises:
        ValueError: the file is not a step log of this version, or a line is damaged.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(Line)
    for number, text in enumerate(_whole_lines(path), 1):
        try:
            line: Line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if (number == 1) != isinstance(line, HeaderLine):
            raise ValueError(f"{path}, line {number}: a step log has one header, its first line")
        if isinstance(line, HeaderLine) and line.version != VERSION:
            raise ValueError(f"{path} is a step log of version {line.version}, not {VERSION}")
        yield line


def _whole_lines(path: str | Path) -> Iterator[bytes]:
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] != GZIP_MAGIC:
            yield from (text for text in raw if text.endswith(b"\n"))
            return
        with gzip.GzipFile(fileobj=raw) as lines:
            try:
                yield from (text for text in lines if text.endswith(b"\n"))
            except EOFError:
                return
            except (zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}: {error}") from error
