"""Events that an ``EngineClient`` passes to its subscribers, in addition to the engine's own messages."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from neaptide.engine.messages import (
    BatchDeadlineStatus,
    EngineReady,
    Occupancy,
    RequestOutput,
    Room,
    StepStats,
    Traffic,
)
from neaptide.engine.row_id import RowId
from neaptide.server.engine_client.deaths import Evidence


class BatchOutputs(NamedTuple):
    """Outputs of batch rows; each ``request_id`` is a ``RowId``."""

    outputs: Sequence[RequestOutput]


class BatchOutlooks(NamedTuple):
    """Deadline status of all batches of the engine; empty after its end."""

    outlooks: Sequence[BatchDeadlineStatus]


class RequestFailed(NamedTuple):
    """The engine failed a request."""

    code: str


class EngineLost(NamedTuple):
    """The engine ended, and its requests are lost."""

    suspects: Sequence[RowId]
    """Batch rows in its last step; empty after an orderly stop."""
    evidence: Evidence
    """What the engine's end says against these rows."""


Event = StepStats | Occupancy | Traffic | Room | EngineReady | EngineLost | BatchOutputs | BatchOutlooks | RequestFailed
"""All events that can be subscribed to. ``EngineReady`` announces a new engine, which has no requests."""
EventT = TypeVar("EventT", bound=Event)
