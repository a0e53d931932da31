"""Echo's set-up (section 7.1), which the experiments beside its figures share: model, device, targets, online load.

The online trace is slowed until online work alone meets its targets; then each policy gets the same load.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

PROFILE = "a100-40g-llama-3.1-8b"
QUESTIONS = "loogle-qa-short"
"""Offline set of the experiments that take one."""
SPEEDS = (1.0, 0.7, 0.5, 0.35, 0.25)
"""The first at which online work alone meets its targets is used for all."""
ATTAINMENT = 0.9
"""Fraction of requests that must meet both targets, online work alone."""
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
STEP_NOISE = 0.05
CONTEXT_TOKENS = 32_768
CLIENT_LIMIT_TOKENS = 1024
BASE, OURS = "priority-v0", "neaptide"
ECHO_LADDER = (BASE, "bs+e", "bs+e+s", "echo")
"""Echo's BS, BS+E, BS+E+S and Echo."""
HEADROOM = {"echo": "mu-sigma"}
"""Forecasts of those policies that publish one of their own; the others take the default."""


@dataclass(slots=True, frozen=True)
class Window:
    """Window of a trace, in its own seconds."""

    trace: str
    start_s: float
    end_s: float


RECORDED, RECORDED_QUICK = Window("azure_conv_2023", 600.0, 720.0), Window("azure_conv_2023", 600.0, 630.0)
BURST, BURST_QUICK = Window("echo-day@0.8", 46_740.0, 47_160.0), Window("echo-day@0.8", 46_780.0, 46_840.0)
"""Made after the paper's figure 2: from 46,800 s, 13:00, five minutes at twice the day's peak."""


@dataclass(slots=True, frozen=True)
class OnlineLoad:
    window: Window
    speed: float
    """Speed of the trace; below 1 it is slowed."""
    alone: Scenario
    """Without offline work, under the base."""

    @classmethod
    def of(cls, window: Window, logger: logging.Logger) -> "OnlineLoad":
        for speed in SPEEDS:
            span_s = (window.start_s, window.end_s)
            alone = Scenario(
                profile=load_profile(PROFILE),
                online=online_requests(window.trace, seed=0, window_s=span_s, speed=speed),
                policy=BASE,
                ttft_slo_s=TTFT_SLO_S,
                tpot_slo_s=TPOT_SLO_S,
                max_model_len=CONTEXT_TOKENS,
                max_output_tokens=CLIENT_LIMIT_TOKENS,
                step_noise=STEP_NOISE,
            )
            logger.info("online alone at %g times the trace's speed", speed)
            if all(attained(simulate(replace(alone, policy=policy)).result) >= ATTAINMENT for policy in (BASE, OURS)):
                break
        return cls(window, speed, alone)

    def beside(self, policy: str, offline: str) -> Scenario:
        """The same with an offline set, all of which is there from the begin."""
        headroom = HEADROOM.get(policy, self.alone.headroom)
        return replace(self.alone, policy=policy, offline=[load_offline(offline, seed=0)], headroom=headroom)

    def settings(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "profile": PROFILE,
            "online": self.window.trace,
            "window_s": [self.window.start_s, self.window.end_s],
            "speed": self.speed,
            "ttft_slo_s": TTFT_SLO_S,
            "tpot_slo_s": TPOT_SLO_S,
            "step_noise": STEP_NOISE,
            "context_tokens": CONTEXT_TOKENS,
            "max_tokens": CLIENT_LIMIT_TOKENS,
            "seats": self.alone.max_num_seqs,
            "step_tokens": self.alone.max_num_batched_tokens,
            "headroom": {"default": self.alone.headroom, **HEADROOM},
        }

    def notes(self) -> list[str]:
        window, speeds = self.window, ", ".join(f"{speed:g}" for speed in SPEEDS)
        return [
            f"{window.trace}, {window.start_s:g} to {window.end_s:g} s of it at {self.speed:g} times its speed: the "
            f"fastest of {speeds} at which online work alone has both targets in {ATTAINMENT:.0%}. The paper's trace "
            "is another one.",
            f"{PROFILE}, TTFT {TTFT_SLO_S:g} s, TPOT {1e3 * TPOT_SLO_S:.0f} ms, steps with {STEP_NOISE:.0%} noise, "
            f"{self.alone.max_num_seqs} seats, {self.alone.max_num_batched_tokens} tokens a step, context "
            f"{CONTEXT_TOKENS}, max_tokens {CLIENT_LIMIT_TOKENS}; echo's forecast is mean and two deviations, that of "
            f"others the {self.alone.headroom} one.",
        ]


def attained(result: SimResult) -> float:
    """Share of the online requests with both targets."""
    return result.attained
