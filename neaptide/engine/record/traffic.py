"""What was served, in short: enough to serve the last minutes again under another policy, on a virtual clock.

The step log replays decisions exactly and has to be whole from its start. This record is made of pieces of which the
last ones are enough: every request when it ends, as long as it really was, and what the engine is like meanwhile. There
is no text and no token id in it; blocks of tokens that are equal have equal names.
"""

from typing import Any

import msgspec

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.params import FinishReason, Tier

NAME_BYTES = 8
"""Of the name of a block, the beginning of its hash: among a billion blocks two are equal once in forty tries."""


class ServedRequest(msgspec.Struct, array_like=True, gc=False):
    """A request, or a row of a batch, on ``CLOCK_MONOTONIC``; as it ended, or as it is."""

    request_id: str
    tier: Tier
    arrival_s: float
    deadline_s: float
    """Of its batch."""
    ttft_slo_s: float
    tpot_slo_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    scheduled_s: float
    """0 if it never took part in a step."""
    first_token_s: float
    """0 if it has none."""
    ended_s: float
    reason: FinishReason | None
    """None: it has not ended."""
    blocks: bytes
    """Names of the full blocks of prompt and answer, as far as they were cached."""


class WaitingRows(msgspec.Struct, array_like=True, gc=False):
    """Rows of one token file that have not started."""

    batch_id: str
    stem: str
    """Of the token file."""
    salt: bytes
    arrival_s: float
    deadline_s: float
    rows: bytes
    """int32, and so ..."""
    max_tokens: bytes
    """... the limit of each."""


class Present(msgspec.Struct, array_like=True, gc=False):
    """What the engine has at a moment."""

    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    requests: list[ServedRequest]
    """Without an end."""
    waiting: list[WaitingRows]


ERROR_UNIT = 0.05
"""A step that took so much longer than predicted, relative, is told from one that did not."""
MAX_ERROR = 100
"""Units: a factor of 148, either way."""


class TrafficPiece(msgspec.Struct, array_like=True, gc=False):
    """What happened since the piece before."""

    now_s: float
    ended: list[ServedRequest]
    offline_tokens: int
    """Logical tokens of offline work since the engine's start: prompt tokens that are done, computed or found in the
    cache, and sampled ones."""
    is_paused: bool
    """The operator has paused offline work, at some time since the piece before."""
    num_steps: int
    host_s: float
    """Between the end of a step and the start of the next, in all."""
    errors: dict[int, int]
    """log(measured / predicted) in units of ``ERROR_UNIT``, rounded -> steps that were off by it, predicted by the step
    times that were told last. Steps before the first are not counted."""
    measured_s: float
    """Those steps, in all ..."""
    predicted_s: float
    """... and as predicted."""
    costs: dict[str, Any] | None = None
    """Recipe of the step times as they are now; None: as in the piece before."""
    present: Present | None = None


traffic_encoder = msgspec.msgpack.Encoder()
traffic_decoder = msgspec.msgpack.Decoder(TrafficPiece)
