"""Traffic record: enough to replay the last minutes under another policy, on a virtual clock.

The step log replays decisions exactly and must be complete from its start. This record consists of pieces, of which
the last ones are enough. They contain every request when it ends, with its real length, and the engine's state. They
contain no text and no token ids; equal blocks of tokens have equal names.
"""

from typing import Any

import msgspec

from neaptide.engine.config import SchedulerConfig, SharedReads
from neaptide.engine.params import FinishReason, Tier

NAME_BYTES = 8
"""Bytes of a block's name, which is the beginning of its hash. Among a billion blocks, two are equal with a chance of 1
in 40."""


class ServedRequest(msgspec.Struct, array_like=True, gc=False):
    """A request or a batch line, as it ended or as it is. Times are on ``CLOCK_MONOTONIC``."""

    request_id: str
    tier: Tier
    arrival_s: float
    deadline_s: float
    """Deadline of its batch."""
    ttft_slo_s: float
    tpot_slo_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    scheduled_s: float
    """When it was first scheduled; 0 if never."""
    first_token_s: float
    """0 if it has no output."""
    ended_s: float
    reason: FinishReason | None
    """None if it has not ended."""
    blocks: bytes
    """Names of the full blocks of prompt and answer, as far as they were hashed."""


class WaitingRows(msgspec.Struct, array_like=True, gc=False):
    """Lines of one token file that have not started."""

    batch_id: str
    stem: str
    """Path stem of the token file."""
    salt: bytes
    arrival_s: float
    deadline_s: float
    rows: bytes
    """Line numbers, int32."""
    max_tokens: bytes
    """``max_tokens`` of each line, int32."""


class Present(msgspec.Struct, array_like=True, gc=False):
    """Requests and state of the engine at one moment."""

    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    requests: list[ServedRequest]
    """Requests that have not ended."""
    waiting: list[WaitingRows]
    shared_reads: SharedReads | None = None


ERROR_UNIT = 0.05
"""Resolution of prediction errors, as a relative difference between measured and predicted time."""
MAX_ERROR = 100
"""Largest error, in units of ``ERROR_UNIT``: a factor of 148 either way."""


class TrafficPiece(msgspec.Struct, array_like=True, gc=False):
    """What happened since the piece before."""

    now_s: float
    ended: list[ServedRequest]
    offline_tokens: int
    """Logical tokens of offline work since the engine's start: finished prompt tokens, computed or cached, and sampled
    tokens."""
    is_paused: bool
    """Whether the operator paused offline work at some time since the piece before."""
    num_steps: int
    host_s: float
    """Total time between the end of a step and the start of the next."""
    errors: dict[int, int]
    """Number of steps by prediction error, which is log(measured / predicted) in rounded units of ``ERROR_UNIT``.
    Predictions use the last sent recipe. Steps before the first recipe are not counted."""
    measured_s: float
    """Total measured time of those steps."""
    predicted_s: float
    """Total predicted time of those steps."""
    costs: dict[str, Any] | None = None
    """Current recipe of the step times; None if the piece before still holds."""
    present: Present | None = None


traffic_encoder = msgspec.msgpack.Encoder()
traffic_decoder = msgspec.msgpack.Decoder(TrafficPiece)
