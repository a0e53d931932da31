"""A load for the adversary as plain data, and the requests and times that it stands for."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario

PROFILES = ("a100-40g-llama-3.1-8b", "a100-80g-llama-3.1-8b", "h100-80g-llama-3.1-8b", "cpu-111m")
MAX_ANSWER_TOKENS = 1024
"""``max_tokens`` of every request, and so the longest answer."""
MAX_CONTEXT_TOKENS = 32_768
"""Most tokens of a request, prompt and answer; also what makes the request table of a simulation cheap."""
CAPS = (512, 1024, 1536)
"""Step tokens of rivals; 2,048 is the default."""
SEATS = (256, 64, 16)
"""The default, and servers of less."""
GROUP_CONTENTS = 1 << 24
"""Content ids of one group of requests."""


@dataclass(slots=True, frozen=True)
class Chats:
    """Online requests that are alike. Lengths are means if ``spread`` is positive."""

    count: int
    """Conversations; each has ``turns`` requests."""
    gap_s: float
    """Mean time between the beginnings of two conversations."""
    prompt_tokens: int
    """Tokens that each turn adds to the prompt, without the prefix."""
    output_tokens: int
    start_s: float = 0.0
    burst: int = 1
    """Conversations that begin at the same instant."""
    is_poisson: bool = False
    """Gaps are exponential; otherwise they are equal."""
    spread: float = 0.0
    """Standard deviation of the logarithm of lengths."""
    prefix_tokens: int = 0
    """Length of the prefix that all conversations share."""
    turns: int = 1
    think_s: float = 0.0
    """Time between the arrivals of two turns. The prompt of a turn begins with the turns before it."""
    cancelled: float = 0.0
    """Fraction of the requests that their clients cancel."""
    cancel_after_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.count * self.turns


@dataclass(slots=True, frozen=True)
class Rows:
    """A batch job. Lengths are means if ``spread`` is positive."""

    count: int
    prompt_tokens: int
    """Without the prefix."""
    output_tokens: int
    submitted_s: float = 0.0
    spread: float = 0.0
    prefix_tokens: int = 0
    prefix_rows: int = 1
    """Consecutive rows that share a prefix."""
    tenant: int = 0
    cancel_at_s: float | None = None

    @property
    def num_requests(self) -> int:
        return self.count


@dataclass(slots=True, frozen=True, kw_only=True)
class Case:
    """A load, the machine that serves it, and the targets. Times are in seconds."""

    profile: str
    ttft_s: float
    tpot_s: float
    duration_s: float
    """End of the arrivals and of the window in which offline work is measured."""
    chats: tuple[Chats, ...] = ()
    rows: tuple[Rows, ...] = ()
    kv_blocks: int | None = None
    """Blocks of KV memory; None takes the profile's."""
    seats: int = SEATS[0]
    """Most requests that run at a time."""
    cap_tokens: int = CAPS[0]
    """Step tokens of the rival that has a constant cap."""
    scale: float = 1.0
    """True step time over the time that the policy's cost model predicts at first."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time."""
    rare_every: int = 0
    """One step in this many is long, at random; 0 for none."""
    rare_factor: float = 1.0
    seed: int = 0

    @property
    def groups(self) -> "tuple[Chats | Rows, ...]":
        return (*self.chats, *self.rows)

    @property
    def num_requests(self) -> int:
        return sum(group.num_requests for group in self.groups)

    @property
    def tenants(self) -> set[int]:
        return {job.tenant for job in self.rows}

    def sibling(self, number: int) -> "Case":
        """The same load with other random numbers; number 0 is the case itself."""
        return replace(self, seed=self.seed + number)

    def alone(self) -> "Case":
        """The chats without offline work."""
        return replace(self, rows=())


def to_json(case: Case) -> bytes:
    return msgspec.json.format(msgspec.json.encode(case), indent=1)


def from_json(text: bytes) -> Case:
    """Raises msgspec.ValidationError if the text is no case."""
    return msgspec.json.decode(text, type=Case)


class WrongCost:
    """Actual step times, which differ from what the profile says. Implements ``CostModel``."""

    def __init__(self, base: CostModel, case: Case) -> None:
        self._base = base
        self._case = case
        self._random = random.Random(f"steps {case.seed}")

    def predict(self, shape: BatchShape) -> Prediction:
        case, seconds = self._case, self._base.predict(shape).seconds * self._case.scale
        if case.noise:
            seconds *= self._random.lognormvariate(-0.5 * case.noise**2, case.noise)
        if case.rare_every and self._random.random() * case.rare_every < 1.0:
            seconds *= case.rare_factor
        return Prediction(seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: the truth does not learn."""


@dataclass(slots=True, frozen=True)
class Load:
    """Kind of load that a case stands for."""

    scenario: Scenario
    cancels: tuple[tuple[float, int], ...]
    """Time and index of the online requests that are cancelled, by time."""
    cancelled_jobs: tuple[tuple[float, int], ...]
    """Time and number of the jobs that are cancelled, by time."""
    tenant_of_job: tuple[str, ...]


def profile_of(case: Case) -> DeviceProfile:
    profile = load_profile(case.profile)
    return profile if case.kv_blocks is None else msgspec.structs.replace(profile, num_blocks=case.kv_blocks)


def load_of(case: Case, policy: str, cap_tokens: int | None = None) -> Load:
    """The scenario of a case for a policy, and the times of the cancels. Requests that do not fit into the memory are
    left out.

    Raises ValueError if no request fits.

    Args:
        cap_tokens: most tokens of a step; None takes the default.
    """
    profile = profile_of(case)
    online: list[tuple[TraceRequest, float]] = []
    for number, chats in enumerate(case.chats):
        online += _requests(chats, number, case)
    most_tokens = min(profile.kv_capacity_tokens, MAX_CONTEXT_TOKENS)
    online = sorted((pair for pair in online if _fits(pair[0], most_tokens)), key=lambda pair: pair[0].arrival_s)
    jobs = sorted(case.rows, key=lambda job: job.submitted_s)
    offline = []
    for number, job in enumerate(jobs):
        lines = [line for line in _lines(job, number, case) if _fits(line, most_tokens)]
        tenant = f"tenant {job.tenant}"
        offline.append(OfflineSet(f"job {number}", lines, True, share=tenant, submitted_s=job.submitted_s))
    if not online and not any(job.requests for job in offline):
        raise ValueError("no request fits into the memory")
    scenario = Scenario(
        profile=profile,
        online=[request for request, _ in online],
        offline=offline,
        policy=policy,
        ttft_slo_s=case.ttft_s,
        tpot_slo_s=case.tpot_s,
        seed=case.seed,
        keep_order=True,
        refill=False,
        max_num_seqs=case.seats,
        max_model_len=MAX_CONTEXT_TOKENS,
        max_output_tokens=MAX_ANSWER_TOKENS,
        truth=WrongCost(RooflineModel.from_profile(profile), case),
        with_bounds=False,
    )
    if cap_tokens is not None:
        scenario = replace(scenario, max_num_batched_tokens=cap_tokens)
    cancels = [(cancel_s, index) for index, (_, cancel_s) in enumerate(online) if cancel_s < math.inf]
    cancelled_jobs = [(job.cancel_at_s, number) for number, job in enumerate(jobs) if job.cancel_at_s is not None]
    tenants = tuple(one.share for one in offline)
    return Load(scenario, tuple(sorted(cancels)), tuple(sorted(cancelled_jobs)), tenants)


def _requests(chats: Chats, number: int, case: Case) -> Iterator[tuple[TraceRequest, float]]:
    """The requests, and when each is cancelled."""
    draw = random.Random(f"chats {number} {case.seed}")
    first_id = (2 * number + 1) * GROUP_CONTENTS
    start_s, burst = chats.start_s, max(chats.burst, 1)
    for index in range(chats.count):
        if index and index % burst == 0:
            start_s += chats.gap_s * burst * (draw.expovariate(1.0) if chats.is_poisson else 1.0)
        segments = [(first_id, chats.prefix_tokens)] if chats.prefix_tokens else []
        for turn in range(chats.turns):
            arrival_s = start_s + turn * chats.think_s
            prompt_tokens = _drawn(chats.prompt_tokens, chats.spread, draw)
            output_tokens = _drawn(chats.output_tokens, chats.spread, draw)
            content = first_id + 1 + 2 * (index * chats.turns + turn)
            segments.append((content, prompt_tokens))
            is_cancelled = draw.random() < chats.cancelled
            if arrival_s < case.duration_s:
                cancel_s = arrival_s + chats.cancel_after_s if is_cancelled else math.inf
                answer_tokens = min(output_tokens, MAX_ANSWER_TOKENS)
                yield TraceRequest(arrival_s, tuple(segments), answer_tokens), cancel_s
            segments.append((content + 1, output_tokens))


def _lines(job: Rows, number: int, case: Case) -> Iterator[TraceRequest]:
    draw = random.Random(f"rows {number} {case.seed}")
    first_id = (2 * number + 2) * GROUP_CONTENTS
    for index in range(job.count):
        prefix = ((first_id + index // max(job.prefix_rows, 1), job.prefix_tokens),) if job.prefix_tokens else ()
        prompt_tokens = _drawn(job.prompt_tokens, job.spread, draw)
        output_tokens = _drawn(job.output_tokens, job.spread, draw)
        own = (first_id + GROUP_CONTENTS // 2 + index, prompt_tokens)
        yield TraceRequest(0.0, (*prefix, own), min(output_tokens, MAX_ANSWER_TOKENS))


def _fits(request: TraceRequest, most_tokens: int) -> bool:
    return request.input_tokens + request.output_tokens <= most_tokens


def _drawn(mean: int, spread: float, draw: random.Random) -> int:
    if not spread:
        return mean
    return max(round(mean * draw.lognormvariate(-0.5 * spread**2, spread)), 1)
