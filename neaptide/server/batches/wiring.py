"""Parts of the batch service: its settings, its clocks, and the context of its state machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from neaptide.durations import window_seconds
from neaptide.server.batches.checking.validate import Checker, FileLimits
from neaptide.server.batches.lines import LineCompiler
from neaptide.server.batches.planning.planning import MakesPlans
from neaptide.server.batches.receipts.book import CostBook
from neaptide.server.batches.sharing import BatchSharing
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import JOBS
from neaptide.server.batches.storing.faults import no_such_file
from neaptide.server.batches.storing.files import DEFAULT_LIFE_S, FileStore
from neaptide.server.batches.storing.models import BatchRecord, FileRecord
from neaptide.server.batches.storing.store import Store
from neaptide.server.engine_client.client import EngineClient


@dataclass(frozen=True, slots=True)
class Clocks:
    """Unix seconds for displayed times, and the engine's monotonic seconds for deadlines."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of the batch service. Raises ValueError for an invalid completion window."""

    data_dir: Path
    sharing: BatchSharing | None = None
    """Storage outside the data directory; None for one server with SQLite and files in it."""
    completion_windows: tuple[str, ...] = ("24h",)
    max_file_bytes: int = 200_000_000
    file_life_s: int = DEFAULT_LIFE_S
    """Lifetime of input and result files whose client sets none."""
    limits: FileLimits = field(default_factory=FileLimits)
    tick_s: float = 1.0
    """Time between two checks for overdue batches."""

    def __post_init__(self) -> None:
        for window in self.completion_windows:
            try:
                window_seconds(window)
            except ValueError as error:
                raise ValueError(f"completion_windows: {error}") from None


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Context of the state machine of batches."""

    store: Store
    files: FileStore
    engine: EngineClient
    compiler: LineCompiler
    checker: Checker
    settings: BatchSettings
    clocks: Clocks
    planner: MakesPlans | None = None
    """Planner of the order of all batches; None plans none."""
    costs: CostBook | None = None
    """Costs of batches, where one server runs all of them."""

    @property
    def jobs_dir(self) -> Path:
        """Directory of the plans and token files of running batches."""
        return self.settings.data_dir / JOBS

    def stem(self, batch_id: str) -> Path:
        return self.jobs_dir / batch_id

    def describe(self, batch_id: str, deadline_at: int) -> tuple[Path, float]:
        """Stem of the token file and deadline in monotonic seconds, for the engine."""
        remaining_s = max(0.0, deadline_at - self.clocks.wall())
        return self.stem(batch_id), self.clocks.monotonic() + remaining_s

    def now(self, record: BatchRecord) -> int:
        """The wall clock, but never before the batch's own past events: clocks may be set back."""
        past = (record.created_at, record.in_progress_at, record.finalizing_at, record.cancelling_at)
        return max(int(self.clocks.wall()), *(at for at in past if at is not None))

    async def verify_input(self, record: BatchRecord) -> FileRecord:
        """The batch's input file, after comparing its bytes with their hash.

        Raises:
            NotFoundError: it has no record any more.
            FileAwayError, StoreUnavailableError: a temporary failure.
        """
        # The file as at the batch's creation, even if it has expired since.
        file = await self.store.read(file_rows.get_file, record.input_file_id, record.owner, record.created_at)
        if file is None:
            raise no_such_file()
        await self.files.verify(file)
        return file
