"""What the API process and the child that simulates tell each other (msgpack in frames)."""

import msgspec


class ShadowTask(msgspec.Struct, frozen=True, tag=True):
    """Serve the last minutes again under other policies."""

    pieces: list[bytes]
    """Of the recorded traffic; the last one says what the engine has."""
    policies: tuple[str, ...]
    warm_s: float
    """Simulated before the window, and not counted."""
    window_s: float
    since_s: float
    """What was before is another engine's."""


class ShadowFigures(msgspec.Struct, frozen=True):
    """Of one window; under the served policy, or under another."""

    met: int
    """Online requests that met both targets."""
    offline_tokens_per_s: float | None
    """None: it is not known."""


class ShadowAnswer(msgspec.Struct, frozen=True):
    cpu_s: float
    """That it took."""
    start_s: float = 0.0
    end_s: float = 0.0
    """Of the window, on ``CLOCK_MONOTONIC``."""
    requests: int = 0
    """Online ones that are judged."""
    real: ShadowFigures | None = None
    """None: too little was recorded."""
    shadows: dict[str, ShadowFigures] = {}
    """By policy."""
    fault: str = ""
    """Why there is no answer, in a word: a bug of ours."""


class WhatIfTask(msgspec.Struct, frozen=True, tag=True):
    """Serve the peak of what was recorded with something changed."""

    pieces: list[bytes]
    """As in ``ShadowTask``."""
    traffic: float
    """So many times the online requests."""
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    """None: as the server has them."""
    profile: str | None
    """None: this device."""
    attainment: float
    """For which replicas are counted."""


class WhatIfAnswer(msgspec.Struct, frozen=True):
    recorded_s: float = 0.0
    requests: int = 0
    """Of the peak."""
    attainment: dict[str, float] = {}
    offline_tokens_per_s: float | None = None
    replicas: int | None = None
    refusal: str = ""
    """Why there is no answer."""


encoder = msgspec.msgpack.Encoder()
task_decoder: msgspec.msgpack.Decoder[ShadowTask | WhatIfTask] = msgspec.msgpack.Decoder(ShadowTask | WhatIfTask)
answer_decoder = msgspec.msgpack.Decoder(ShadowAnswer)
what_if_decoder = msgspec.msgpack.Decoder(WhatIfAnswer)
