"""What starting an executor returns. Imported by every process that runs one, so it must not import torch."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from neaptide.engine.config import SharedReads
from neaptide.engine.interfaces import Executor
from neaptide.models.config import ModelFacts


class ProfiledExecutor(Executor, Protocol):
    """An executor on a real device, whose step times can be measured."""

    @property
    def device_name(self) -> str:
        """Product name of the device."""
        ...

    @property
    def dtype_name(self) -> str: ...

    @property
    def num_threads(self) -> int:
        """Compute threads; 0 on a GPU."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def build(self) -> str:
        """Other facts that step times depend on, such as the software's version and arguments; empty if only our own
        code counts."""
        ...

    def touch_blocks(self, count: int) -> None:
        """Writes to the first ``count`` KV blocks, so that steps over them take realistic times."""
        ...


class Capabilities(NamedTuple):
    """Optional abilities of an executor."""

    placeholders: bool
    """A plan may contain placeholders for tokens that the previous step samples (``ScheduledRequest.token_ids``)."""
    asynchronous: bool
    """``submit`` returns before the step is done, so planning ahead saves time."""
    slot_copies: bool = False
    """The executor copies single KV slots (``StepPlan.slot_copies``) and reads block table entries with a direction bit
    (``BlockTables``)."""
    abortable_steps: bool = False
    """While computing an abortable step, the executor checks for arriving online requests."""
    shared_reads: SharedReads | None = None
    """Prefixes that its attention kernel reads once for several requests; None if every request reads its own."""


@dataclass(slots=True, frozen=True)
class StartedExecutor:
    """An executor whose model and KV cache are ready."""

    executor: Executor
    device: str
    """Device type, for example ``cpu``."""
    dtype: str
    model: ModelFacts
    block_size: int
    """As configured, or the executor's own choice if the setting was left open."""
    capabilities: Capabilities
    profiled: ProfiledExecutor | None
    """The executor, for calibration; None if its steps take no real time."""
    num_host_blocks: int = 0
    """Number of KV blocks that the executor's host memory can hold."""
