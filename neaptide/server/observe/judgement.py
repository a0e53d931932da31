"""Whether the choices of a request met their latency targets."""

from typing import NamedTuple

from neaptide.server.observe.timing import ChoiceTiming


class JudgedChoice(NamedTuple):
    """One choice against its targets. Latencies are in seconds, None if unknown."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_met: bool
    tpot_met: bool


def judge(
    choice: ChoiceTiming, arrival_s: float, ttft_slo_s: float, tpot_slo_s: float, *, failed: bool
) -> JudgedChoice:
    """A choice that failed, or had no token, has missed; one token alone meets the TPOT target."""
    ttft_s = None if choice.first_s is None else choice.first_s - arrival_s
    tpot_s = choice.tpot_s
    return JudgedChoice(
        ttft_s,
        tpot_s,
        ttft_met=ttft_s is not None and ttft_s <= ttft_slo_s and not failed,
        tpot_met=(tpot_s is None or tpot_s <= tpot_slo_s) and not failed,
    )
