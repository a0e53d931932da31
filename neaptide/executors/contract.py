"""What the start of an executor answers with. Read by whatever runs one: no torch here."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from neaptide.engine.interfaces import Executor
from neaptide.models.config import ModelFacts


class ProfiledExecutor(Executor, Protocol):
    """An executor on a real device, whose step times can be measured."""

    @property
    def device_name(self) -> str:
        """A product name."""
        ...

    @property
    def dtype_name(self) -> str: ...

    @property
    def num_threads(self) -> int:
        """Compute threads; 0 where a GPU computes."""
        ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def build(self) -> str:
        """What else its step times depend on: version and arguments of the software; empty where that is ours alone."""
        ...

    def touch_blocks(self, count: int) -> None:
        """Writes to the first ``count`` KV blocks, so that steps over them take the time that they take in use."""
        ...


class Capabilities(NamedTuple):
    """What the engine may ask of an executor beyond one step after the other."""

    placeholders: bool
    """A step may name tokens that the step before it samples (``ScheduledRequest.token_ids``)."""
    asynchronous: bool
    """``submit`` returns before the step is done, so that planning ahead saves time."""
    two_tenant_blocks: bool = False
    """It reads blocks whose entries have the direction bit (``BlockTables``), and copies single slots
    (``StepPlan.slot_copies``)."""
    gives_up_steps: bool = False
    """It looks, while it computes a step that may be given up, whether an online request comes."""


@dataclass(slots=True, frozen=True)
class StartedExecutor:
    """An executor that has its model and its KV cache."""

    executor: Executor
    device: str
    """Its kind, for example ``cpu``."""
    dtype: str
    model: ModelFacts
    block_size: int
    """As configured, or its own choice where that was left to it."""
    capabilities: Capabilities
    profiled: ProfiledExecutor | None
    """The executor, for calibration; None where steps take no time of a real device."""
    num_host_blocks: int = 0
    """Blocks that leave the cache and fit into its host memory."""
