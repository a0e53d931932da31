"""Online traces with offline sets on which policies are compared, some with moving loads."""

from dataclasses import dataclass, replace

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import delayed
from neaptide.simulation.scenario import Scenario

PROFILE = "h100-80g-llama-3.1-8b"
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
STEP_NOISE = 0.05
CLIENT_LIMIT_TOKENS = 1024
"""``max_tokens`` of every request."""
OFFLINE_REQUESTS = 4000
"""Submitted at once; more follow before they run out."""


@dataclass(slots=True, frozen=True)
class Load:
    """An online trace with an offline set."""

    trace: str
    window_s: tuple[float, float]
    """Window in trace time."""
    speed: float
    offline: str
    context_tokens: int = 16_384
    warm_up_s: float = 30.0
    """Offline work runs for this long before the first online request, which opens the window: until about as many rows
    end as begin. A policy that still fills the cache computes prompts, and looks fast."""
    mixed_with: tuple["Load", ...] = ()
    """Their online requests come as well."""
    name: str = ""
    """The trace's unless given."""

    @property
    def title(self) -> str:
        return self.name or self.trace


CONV = Load("azure_conv_2023", (600.0, 840.0), 1.2, "sharegpt_lengths")
LOADS = (
    CONV,
    Load("azure_code_2023", (1133.0, 1353.0), 1.1, "loogle-qa-short"),
    Load("mooncake_conversation", (600.0, 680.0), 0.4, "sharegpt_lengths", 32_768),
    Load("servegen_r1_resampled", (600.0, 920.0), 1.6, "sharegpt_lengths"),
)
"""Chats, bursts of code completions with few tokens of output, long contexts, answers of a reasoning model; 200 s each.
In a minute what stands in the cache when the window opens may be worth 20%."""
MOVING = (
    Load("echo-day@0.02", (14_400.0, 50_400.0), 180.0, "sharegpt_lengths", name="day curve"),
    Load("echo-day@2", (46_700.0, 46_900.0), 1.0, "sharegpt_lengths", name="burst"),
    replace(
        CONV,
        window_s=(600.0, 720.0),
        speed=0.6,
        context_tokens=32_768,
        mixed_with=(
            replace(LOADS[1], window_s=(1133.0, 1253.0), speed=0.6),
            replace(LOADS[2], window_s=(600.0, 648.0), speed=0.24),
        ),
        name="mixed lengths",
    ),
)
"""From the trough to the peak of a made day, ten hours in 200 s; 100 s of the peak, then 100 s at twice of it; chats,
code completions and long contexts at once, 200 s."""


def scenario_of(load: Load) -> Scenario:
    """Both kinds of work, under our policy."""
    online = [
        request
        for each in (load, *load.mixed_with)
        for request in online_requests(each.trace, window_s=each.window_s, speed=each.speed)
    ]
    trace = sorted(online, key=lambda request: request.arrival_s)
    return Scenario(
        profile=load_profile(PROFILE),
        online=delayed(trace, load.warm_up_s),
        offline=[load_offline(load.offline, seed=0, limit=OFFLINE_REQUESTS)],
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        step_noise=STEP_NOISE,
        max_model_len=load.context_tokens,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        # Enough for all that can still attain: no answer takes longer in time.
        drain_s=TTFT_SLO_S + CLIENT_LIMIT_TOKENS * TPOT_SLO_S,
    )
