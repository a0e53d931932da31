"""Events that an ``EngineClient`` passes to its subscribers, in addition to the engine's own messages."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from neaptide.engine.messages import (
    BatchDeadlineStatus,
    EngineReady,
    Occupancy,
    RecentSteps,
    RequestOutput,
    Room,
    StepStats,
    Traffic,
)
from neaptide.engine.row_id import RowId
from neaptide.server.engine_client.deaths import Evidence


class LineBody(NamedTuple):
    """A batch line as its endpoint gets it."""

    endpoint: str
    body: dict[str, Any]


class LineReply(NamedTuple):
    """Whole HTTP reply to a batch line, from an engine that runs lines by their bodies instead of their tokens."""

    request_id: str
    """The line's row, as a ``RowId``: such a line has one row."""
    status: int
    body: str
    """JSON."""


RowOutput = RequestOutput | LineReply


class BatchOutputs(NamedTuple):
    """Outputs of batch rows; each ``request_id`` is a ``RowId``."""

    outputs: Sequence[RowOutput]


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


Event = (
    StepStats
    | Occupancy
    | RecentSteps
    | Traffic
    | Room
    | EngineReady
    | EngineLost
    | BatchOutputs
    | BatchOutlooks
    | RequestFailed
)
"""All events that can be subscribed to. ``EngineReady`` announces a new engine, which has no requests."""
EventT = TypeVar("EventT", bound=Event)
