"""Messages between the API process and the simulating child process (msgpack in frames)."""

import msgspec


class ShadowTask(msgspec.Struct, frozen=True, tag=True):
    """Task: replay the last minutes under other policies."""

    pieces: list[bytes]
    """Pieces of the recorded traffic; the last one has the present requests."""
    policies: tuple[str, ...]
    warm_s: float
    """Time before the window that is simulated but not counted."""
    window_s: float
    since_s: float
    """Start of the current engine; earlier traffic is ignored."""


class ShadowFigures(msgspec.Struct, frozen=True):
    """Results of one window under one policy."""

    met: int
    """Number of online requests that met both targets."""
    offline_tokens_per_s: float | None
    """Rate of offline work; None if unknown."""


class ShadowAnswer(msgspec.Struct, frozen=True):
    cpu_s: float
    """Processor time of the simulation."""
    start_s: float = 0.0
    end_s: float = 0.0
    """Bounds of the window, on ``CLOCK_MONOTONIC``."""
    requests: int = 0
    """Number of online requests that are judged."""
    real: ShadowFigures | None = None
    """Results under the served policy; None if too little was recorded."""
    shadows: dict[str, ShadowFigures] = {}
    """Results by simulated policy."""
    fault: str = ""
    """Error that prevented an answer, in a word: a bug of ours."""


class WhatIfTask(msgspec.Struct, frozen=True, tag=True):
    """Task: replay the busiest part of the recorded traffic with changes."""

    pieces: list[bytes]
    """Pieces of the recorded traffic, as in ``ShadowTask``."""
    traffic: float
    """Factor on the number of online requests."""
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    """Targets; None for those of the server."""
    profile: str | None
    """Device profile; None for this device."""
    attainment: float
    """Attainment for which replicas are counted."""


class SimulatedFigures(msgspec.Struct, frozen=True):
    """The busiest part of the recorded traffic on one replica."""

    requests: int = 0
    """Number of online requests."""
    attainment: dict[str, float] = {}
    offline_tokens_per_s: float | None = None


class WhatIfAnswer(msgspec.Struct, frozen=True):
    recorded_s: float = 0.0
    changed: SimulatedFigures = SimulatedFigures()
    today: SimulatedFigures = SimulatedFigures()
    """Without the change."""
    replicas: int | None = None
    refusal: str = ""
    """Reason for which there is no answer."""


encoder = msgspec.msgpack.Encoder()
task_decoder: msgspec.msgpack.Decoder[ShadowTask | WhatIfTask] = msgspec.msgpack.Decoder(ShadowTask | WhatIfTask)
answer_decoder = msgspec.msgpack.Decoder(ShadowAnswer)
what_if_decoder = msgspec.msgpack.Decoder(WhatIfAnswer)
