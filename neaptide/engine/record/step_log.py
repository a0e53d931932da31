"""The step log: what the engine was told, when it planned, and what it decided; enough to replay a run exactly.

JSON Lines, one struct of this module per line, the field ``is`` says which. Prompts are written as numbers of
interned blocks, never as text or token ids. Requests are written as *handles*: integers in the order in which the log
names them, a batch's rows one after the other. The format is described in docs/simulation.md.
"""

import errno
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.params import Tier
from neaptide.engine.private_files import private_opener
from neaptide.engine.record.block_numbers import Ranges

VERSION = 3
GZIP_MAGIC = b"\x1f\x8b"


class _Line(msgspec.Struct, tag_field="is", omit_defaults=True):
    pass


class HeaderLine(_Line, tag="header"):
    version: int
    scheduler: SchedulerConfig
    block_size: int
    prefix_cache: bool
    num_blocks: int
    recipe: dict[str, Any]
    """How the cost model and the headroom predictor were made; the engine does not look inside."""
    num_host_blocks: int = 0
    two_tenant_blocks: bool = False


class AddLine(_Line, tag="add"):
    """An ``AddRequest``; it takes the next handle."""

    id: str
    tier: Tier
    arrival_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    max_tokens: int
    tokens: int
    """Of the prompt."""
    blocks: Ranges
    """The prompt's full blocks: equal numbers are equal text behind equal text."""
    scores_prompt: bool = False
    """It takes no prefix hit, because its prompt's log-probabilities are wanted."""
    share: str = ""


class BatchLine(_Line, tag="batch"):
    """An ``AddBatch``; each row takes the next handle. What a row says follows in its ``RowLine``."""

    id: str
    now_s: float
    deadline_s: float
    rows: list[tuple[int, int, int]]
    """Row, prompt tokens, max_tokens."""
    scores_prompt: list[int] = []
    """Rows that take no prefix hit."""
    order: list[int] = []
    """Under a policy that sorts rows by their text: the order of ``rows``, as indices into it ..."""
    behind: list[int] = []
    """... and if rows of the batch came before: for each in this order, the handle of the one that it stands behind; -1
    for none."""
    share: str = ""
    file: int = 0
    """Under a policy that goes by shared prefixes: a number of the token file; rows of one file are in one order ..."""
    prefixes: dict[str, list[int]] = {}
    """... that of its ``PrefixTree``, whose arrays these are; left out if no rows share a prefix, or if an earlier
    line has them."""


class RowLine(_Line, tag="row"):
    """The scheduler looks at a batch row for the first time. A row without full blocks has no such line."""

    request: int
    """Its handle."""
    blocks: Ranges


class AbortLine(_Line, tag="abort"):
    ids: list[str]
    reason: int
    now_s: float


class CancelLine(_Line, tag="cancel"):
    id: str


class OfflineLine(_Line, tag="offline"):
    paused: bool


class OrderLine(_Line, tag="order"):
    """A ``PlanReady``: an order over rows that wait."""

    rows: list[int]
    """Handles in the order; -1 for a row that has ended."""
    ends: list[float] = []
    """If it is followed from both ends: density of all of it, seconds of a computed token, of a read one ..."""
    densities: list[float] = []
    """... of windows ..."""
    memory_s: list[float] = []
    """... with what they read ..."""
    held_tokens: list[int] = []
    """... and of each row ..."""
    lasting_steps: list[int] = []
    """... how long its answer is ..."""
    turns: list[int] = []
    """... and its place in the order in which both ends are expected to hand them out."""
    starts: list[int] = []
    """[order] Of a timetable, if there is one ..."""
    kv_tokens: int = 0
    """... and the memory that it is for."""
    first: int = 0
    """Rows at the front that come before either end."""
    tile: int = 1
    """Tokens of which steps should have multiples."""


class ObserveLine(_Line, tag="observe"):
    """A measured step that the cost model was shown before the engine's first."""

    shape: list[int]
    """The fields of ``BatchShape``, in order."""
    seconds: float


class IdleLine(_Line, tag="idle"):
    """A step was planned for and no request could run. While nothing else happens, a line in a second is enough: the
    plans between change nothing."""

    start_s: float


class PlanLine(_Line, tag="plan"):
    """Where the engine plans with a step in flight: a step is planned while none is. It stands where it is planned;
    its ``StepLine`` where it is done."""

    t: list[float]
    """Seconds: planning began, ended."""


class StepLine(_Line, tag="step"):
    """A step: its plan as differences to the step before, and what ended with it."""

    step: int
    t: list[float]
    """Seconds: planning began, ended (left out if at once), the step was done."""
    predicted: list[float]
    """Seconds: prediction, margin, budget (0 for none); rounded to nanoseconds."""
    kv: list[int]
    """Blocks after the step: cached, held by online, held by offline."""
    join: list[int] = []
    """Requests that compute one token now and did not in the step before ..."""
    leave: list[int] = []
    """... and those that did."""
    chunks: list[tuple[int, int]] = []
    """Every request that computes more than one token: handle, tokens."""
    admit: list[tuple[int, int]] = []
    """Requests that got their blocks in this step: handle, tokens found in the cache."""
    preempt: list[int] = []
    slots: list[int] = []
    """Slots copied, if any: to host memory, to other blocks, back from host memory."""
    end: list[tuple[int, int, int, Ranges]] = []
    """Requests that ended since the step before: handle, output tokens, ``FinishReason``, the full blocks that end
    in the output."""
    errors: dict[str, str] = {}
    """Requests (handles) that the executor failed."""
    late: dict[str, float] = {}
    """Requests (handles) whose masks were late: they sampled nothing. Values: seconds for which they were put off."""
    mask_s: float = 0.0
    """Seconds that the step waited for masks."""
    in_parts: bool = False
    """The step had to be run in parts; nothing was learnt from its time."""
    given_up: bool = False
    """An online request came, and nothing of the step counts but what it admitted and preempted."""
    next: list[float] = []
    """Where the engine plans with a step in flight, seconds: planning, while this step was, began, and if that gave a
    step: ended. All messages above this line were known then."""


Message = AddLine | BatchLine | AbortLine | CancelLine | OfflineLine | OrderLine
Line = HeaderLine | ObserveLine | Message | RowLine | IdleLine | PlanLine | StepLine


def create_log(path: str | Path, max_bytes: int | None = None) -> IO[bytes]:
    """Opens a new step log for writing; compressed if the name ends in ``.gz``, the same bytes every time.

    Beyond ``max_bytes`` on disk a write raises OSError: the log ends there.
    """
    raw = _BoundedFile(path, max_bytes)
    if str(path).endswith(".gz"):
        return cast(IO[bytes], _OwningGzip(raw))
    return io.BufferedWriter(raw)


class _BoundedFile(io.FileIO):
    """For its owner's eyes only, and no longer than it may be."""

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
            raise OSError(errno.EFBIG, "it has reached its largest size")
        return num_written


class _OwningGzip(gzip.GzipFile):
    """Without name and time in its header, and closing the file below it."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(filename="", mode="wb", fileobj=raw, mtime=0)
        self._raw = raw

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._raw.close()


def read_log(path: str | Path) -> Iterator[Line]:
    """The lines of a step log. One that was cut off, by the end of its engine, ends before what is cut.

    Raises:
        ValueError: the file is not a step log of this version, or a line is damaged.
        OSError: it cannot be read.
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
