"""What an operator may set: ``--additional-config '{"neaptide": {"ttft_ms": 1000, "tpot_ms": 50}}'``."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import DEFAULT_HEADROOM, check_headroom

HOST_S = 1e-3
"""First guess of the time that vLLM's own scheduling adds to a step."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft_ms: float | None = None
    """TTFT target of chats that name none (``vllm_xargs``); None derives it from measured steps."""
    tpot_ms: float | None = None
    """The same for the TPOT target."""
    late_price_s: float = 1.5
    """Seconds of offline work that one chat in time is worth."""
    delivery_ms: float = 5.0
    """Time from a step's end to the client's socket. Deadlines are met this much early."""
    offline_max_kv_ratio: float = 0.9
    """Largest fraction of the KV blocks that offline requests hold."""
    headroom: str = DEFAULT_HEADROOM
    """How blocks and slots are kept for chats; see docs/memory.md."""
    profile: str | None = None
    """Device profile, a name or a file: its step times, corrected by every measured step. None learns them from steps
    alone."""
    log_interval_s: float = 60.0
    """Time between two log lines about what was given to whom."""

    @classmethod
    def of(cls, additional_config: Any) -> "Settings":
        """The settings of ``VllmConfig.additional_config``.

        Raises:
            ValueError: a name is unknown, or a value is not possible.
        """
        known = additional_config if isinstance(additional_config, Mapping) else {}
        try:
            settings = msgspec.convert(known.get("neaptide", {}), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"--additional-config: neaptide: {error}") from error
        positive = {
            "ttft_ms": settings.ttft_ms,
            "tpot_ms": settings.tpot_ms,
            "late_price_s": settings.late_price_s,
            "log_interval_s": settings.log_interval_s,
        }
        for name, value in positive.items():
            if value is not None and not value > 0.0:
                raise ValueError(f"--additional-config: neaptide: {name} is {value:g}, which must be above 0")
        if not 0.0 < settings.offline_max_kv_ratio <= 1.0:
            raise ValueError("--additional-config: neaptide: offline_max_kv_ratio must be above 0 and at most 1")
        if not settings.delivery_ms >= 0.0:
            raise ValueError("--additional-config: neaptide: delivery_ms must not be negative")
        check_headroom(settings.headroom)
        settings.profiled()
        return settings

    def profiled(self) -> RooflineModel | None:
        """The profile's step times with a guess of vLLM's own for each step, which no calibration measures; None
        without a profile.

        Raises:
            ValueError: there is no such profile.
        """
        if self.profile is None:
            return None
        try:
            model = RooflineModel.from_profile(load_profile(self.profile))
        except (OSError, ValueError) as error:
            raise ValueError(f"--additional-config: neaptide: profile: {error}") from error
        # Only a term that is there can be corrected: without it, every other would grow for vLLM's own time.
        costs = {name: replace(cost, fixed_s=cost.fixed_s + HOST_S) for name, cost in model.costs.items()}
        return RooflineModel(costs, model.overlap_kappa, model.tile_tokens, model.overlaps_copies)
