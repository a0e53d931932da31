"""Wire structs between the owner and a front process (msgpack in frames over a socket pair).

The owner is the API process that has the engine, the data directory and all counts. Front processes answer generation
requests. Both always have the same version, because the owner starts the fronts from its own installation.
"""

import msgspec

from neaptide.engine.messages import AbortRequest, AddRequest, EngineReady, StepOutputs
from neaptide.engine.params import RequestClass, Tier
from neaptide.server.engine_client.deaths import Evidence
from neaptide.server.http.auth import AcceptedKey, Principal
from neaptide.server.limits.usage import Excess, KeyLimits, Level, LimitName
from neaptide.server.observe.request_log import RequestRecord
from neaptide.server.observe.timing import RequestTiming


class _FrontMessage(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- front -> owner --------------------------------------------------------------------------------------


class TakeAmounts(_FrontMessage):
    """Asks the owner to count amounts of a key; ``AmountsTaken`` answers. ``ReturnAmounts`` must follow a success."""

    number: int
    """The front's own number of what is taken."""
    tenant: str
    limits: KeyLimits
    amounts: dict[LimitName, int]


class ReturnAmounts(_FrontMessage):
    """Counts a part of what was taken no longer."""

    number: int
    amounts: dict[LimitName, int]


class EnterQueue(_FrontMessage):
    """Asks the owner for admission; ``QueueEntered`` answers. ``LeaveQueue`` must follow, even a refusal."""

    number: int
    request_class: RequestClass
    share: str
    choices: int


class LeaveQueue(_FrontMessage):
    number: int


class KeyUsed(_FrontMessage):
    """The end of an admitted request of a key."""

    principal: Principal
    tokens: int


class KeyRefused(_FrontMessage):
    principal: Principal
    limit: LimitName


class RequestRefused(_FrontMessage):
    """A request that was refused before the engine got it."""

    record: RequestRecord


class RequestBegun(_FrontMessage):
    """A request that is given to the engine; ``RequestEnded`` must follow."""

    number: int
    tier: Tier
    arrival_s: float


class FrontTerms(msgspec.Struct, array_like=True, frozen=True):
    """``RequestTerms`` of a request in a front process."""

    tier: Tier
    n: int
    max_tokens: list[int]
    ttft_slo_s: float
    tpot_slo_s: float


class RequestEnded(_FrontMessage):
    number: int
    record: RequestRecord
    terms: FrontTerms
    timing: RequestTiming


class FrontTally(_FrontMessage):
    """What is only counted, since the tally before."""

    connections: int
    """Number of open connections now."""
    tokens: dict[Tier, tuple[int, int, int]] = {}
    """Prompt, cached and generated tokens."""
    gaps_s: dict[Tier, list[float]] = {}
    """Gaps between two outputs of a choice."""
    started: list[int] = []
    """Numbers of begun requests that have had a token."""
    replies: list[tuple[str, str, int, float]] = []
    """HTTP replies: method, route, status, seconds."""
    ended_connections: list[str] = []
    """Reasons for which connections were ended."""
    used: dict[str, dict[LimitName, int]] = {}
    """Amounts that were used beyond what was taken, by tenant."""


ToOwner = (
    AddRequest
    | AbortRequest
    | TakeAmounts
    | ReturnAmounts
    | EnterQueue
    | LeaveQueue
    | KeyUsed
    | KeyRefused
    | RequestRefused
    | RequestBegun
    | RequestEnded
    | FrontTally
)


# ---- owner -> front --------------------------------------------------------------------------------------


class AcceptKeys(_FrontMessage):
    """The accepted keys; the first message, and later at every change."""

    accepted: list[AcceptedKey]


class EngineEnded(_FrontMessage):
    """The engine has ended; as for ``EngineClient.detach``."""

    suspects: list[str]
    evidence: Evidence


class AmountsTaken(_FrontMessage):
    number: int
    excess: Excess | None
    """Why nothing was taken; None if all was."""
    levels: dict[LimitName, Level]


class QueueEntered(_FrontMessage):
    number: int
    is_admitted: bool


class DrainFront(_FrontMessage):
    """A stop signal: the front takes no new work and ends after its replies. A second one ends it at once."""


ToFront = EngineReady | StepOutputs | EngineEnded | AcceptKeys | AmountsTaken | QueueEntered | DrainFront


front_encoder = msgspec.msgpack.Encoder()
to_owner_decoder: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
to_front_decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
