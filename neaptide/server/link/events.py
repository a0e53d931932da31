"""What an ``EngineClient`` tells its subscribers, besides the engine's own messages."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from neaptide.engine.messages import BatchOutlook, EngineReady, Occupancy, RequestOutput, Room, StepStats, Traffic
from neaptide.engine.row_id import RowId
from neaptide.server.link.deaths import Evidence


class BatchOutputs(NamedTuple):
    """Outputs of batch rows: the ``request_id`` of each is that of a ``RowId``."""

    outputs: Sequence[RequestOutput]


class BatchOutlooks(NamedTuple):
    """Outlooks of all batches that the engine has; of none when it has gone."""

    outlooks: Sequence[BatchOutlook]


class RequestFailed(NamedTuple):
    """The engine failed a request."""

    code: str


class EngineLost(NamedTuple):
    """The engine is gone, and with it all that it was given."""

    suspects: Sequence[RowId]
    """Batch rows in the step that it did not survive; empty if it ended in peace."""
    evidence: Evidence
    """What its end says against them."""


Event = StepStats | Occupancy | Traffic | Room | EngineReady | EngineLost | BatchOutputs | BatchOutlooks | RequestFailed
"""All that can be subscribed to. ``EngineReady`` says that there is a new engine, which knows no request."""
EventT = TypeVar("EventT", bound=Event)
