"""Cells of the judgement as plain data, and the load that a cell stands for.

A cell is one simulation but for the policy. Nothing here imports more of ``neaptide`` than the simulator's input, so
that the same cells run on the code of an earlier commit.
"""

import itertools
from dataclasses import replace

import msgspec
import numpy as np

from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.made_load import Arrivals, Lengths, PrefixSharing, made_load
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.loadgen.workloads.online_sets import online_requests, poisson_arrivals
from neaptide.loadgen.workloads.traces import TraceRequest, content_base, delayed, salted
from neaptide.simulation.points import parse_points
from neaptide.simulation.scenario import Scenario

PLANNED = "+plan"
"""Suffix of a policy whose offline pool has the plan that a server makes on a GPU."""
OFFLINE_ROWS = 4000
"""Rows of an offline set that are submitted at once; more follow before they run out."""
LIVE_PROFILE = "cpu-111m-2026-11-24"
"""The machine of W5, which is not among the bundled profiles."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Online requests of one source."""

    source: str
    """A recorded trace or a synthetic set of ``online_requests``, a name of ``MADE``, or ``fixed-P-O``.

    The last are Poisson arrivals of prompts of P tokens with answers of O.
    """
    window_s: tuple[float, float]
    """Part of the source, in its own seconds. Of a made source only the length counts."""
    speed: float = 1.0
    """Arrival times are divided by it."""
    rate_rps: float = 0.0
    """Requests per second of a made source, before ``speed``."""
    copies: int = 1
    """The window so many times, one after the other, with other contents."""
    layers: int = 1
    """The same requests so many times at once, with other contents, each a little later than the one before."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One load on one device. Times are in seconds."""

    name: str
    group: str
    """The requirement that it belongs to, for example ``w5``."""
    case: str = ""
    """Cells of one group are summed by it, too."""
    profile: str
    online: tuple[Part, ...]
    offline: str = ""
    """An offline set, or ``fixed-P-O``."""
    replicas: int = 1
    warm_up_s: float = 0.0
    """Offline work alone before the first online request."""
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.05
    context_tokens: int = 131_072
    limit_tokens: int | None = None
    """``max_tokens`` of every request; None: the rest of the context."""
    window_s: tuple[float, float] | None = None
    """The measured window; None: from the first arrival to the last."""
    drain_s: float = 600.0
    noise: float = 0.05
    seed: int = 0
    truth: float = 1.0
    """Factor on the step times that the scheduler's cost model does not know."""
    stall_steps: int = 0
    """One step in this many, by chance, takes ``STALL_FACTOR`` times; 0: none."""
    with_work: bool = False
    """Whether the work done is measured in seconds of the device."""


STALL_FACTOR = 12.0


class WrongModel(msgspec.Struct):
    """Step times of a device that is not what its profile says. Implements ``CostModel``."""

    model: RooflineModel
    factor: float
    stall_steps: int
    random: np.random.Generator

    def predict(self, shape: BatchShape) -> Prediction:
        factor = self.factor
        if self.stall_steps and self.random.random() * self.stall_steps < 1.0:
            factor *= STALL_FACTOR
        return Prediction(self.model.predict(shape).seconds * factor, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """The truth learns nothing."""


class Made(msgspec.Struct, frozen=True):
    """A made source: how requests arrive, and how long they are."""

    inputs: str
    outputs: str
    shape: str = "poisson"
    sharing: tuple[int, int] = (0, 0)
    """Prefixes, and their tokens."""


MADE = {
    "made-code": Made("lognormal:2000:1900", "lognormal:28:45", "gamma"),
    "made-chats": Made("lognormal:1100:1000", "lognormal:220:180"),
    "made-agents": Made("", ""),
    "made-long": Made("lognormal:12000:14000", "lognormal:300:250", sharing=(24, 4096)),
    "made-reasoning": Made("lognormal:500:700", "lognormal:650:500"),
    "made-bursts": Made("lognormal:1100:1000", "lognormal:150:150", "on-off"),
    "made-day": Made("lognormal:1700:1600", "lognormal:250:200", "diurnal"),
}
"""Means and deviations in tokens."""
BURSTS = 12
"""Periods of a made load with bursts; a third of each has requests."""
AGENT_GAP_S = 5.0
"""Mean time between two calls of a made agent."""
AGENT_TURNS, AGENT_TURN_TOKENS, AGENT_OUTPUT_TOKENS, AGENT_FIRST_TOKENS = 12, 450, 110, 1200
"""A made agent's session: its calls, tokens that each adds to the history, of an answer, and of the first prompt."""


def scenario_of(cell: Cell, policy: str) -> tuple[Scenario, SimulatedFleet | None]:
    """The simulation of a cell under a policy: ``NAME``, ``NAME@TOKENS`` or ``NAME@TOKENSxSEATS``, perhaps with
    ``PLANNED`` at its end.

    Raises:
        ValueError: an unknown name.
    """
    profile = profile_of(cell)
    scenario = Scenario(
        profile=profile,
        online=online_of(cell),
        offline=[offline_of(cell.offline)] if cell.offline else [],
        ttft_slo_s=cell.ttft_slo_s,
        tpot_slo_s=cell.tpot_slo_s,
        max_model_len=cell.context_tokens,
        max_output_tokens=cell.limit_tokens,
        window_s=cell.window_s,
        drain_s=cell.drain_s,
        step_noise=cell.noise,
        seed=cell.seed,
        truth=_truth(cell, profile),
        with_bounds=False,
    )
    (point,) = parse_points(policy.removesuffix(PLANNED))
    scenario = point.of(scenario)
    if policy.endswith(PLANNED):
        scenario = scenario.planned_as_served()
    return scenario, SimulatedFleet(replicas=cell.replicas) if cell.replicas > 1 else None


def profile_of(cell: Cell) -> DeviceProfile:
    if cell.profile == LIVE_PROFILE:
        from neaptide_lab.experiments.w5.machine import LIVE_MACHINE

        return LIVE_MACHINE
    return load_profile(cell.profile)


def online_of(cell: Cell) -> list[TraceRequest]:
    requests = [request for part in cell.online for request in _requests(part, cell.seed)]
    return delayed(sorted(requests, key=lambda request: request.arrival_s), cell.warm_up_s)


def offline_of(name: str) -> OfflineSet:
    if name.startswith("fixed-"):
        prompt, output = _fixed(name)
        base = content_base("w5#0")
        rows = [TraceRequest(0.0, ((base + row, prompt),), output) for row in range(OFFLINE_ROWS)]
        return OfflineSet("w5", rows, synthetic=True)
    limit = None if name.startswith(("bros-be", "loogle")) else OFFLINE_ROWS
    return load_offline(name, seed=0, limit=limit)


def _truth(cell: Cell, profile: DeviceProfile) -> CostModel | None:
    if cell.truth == 1.0 and not cell.stall_steps:
        return None
    model = RooflineModel.from_profile(profile)
    return WrongModel(model, cell.truth, cell.stall_steps, np.random.default_rng([cell.seed, 12]))


def _requests(part: Part, seed: int) -> list[TraceRequest]:
    if part.source.startswith("fixed-"):
        return _fixed_requests(part, seed)
    if part.source == "made-agents":
        return _agents(part, seed)
    if part.source in MADE:
        return _made(part, seed)
    requests = online_requests(part.source, seed, window_s=part.window_s, speed=part.speed)
    length_s = (part.window_s[1] - part.window_s[0]) / part.speed
    apart_s = length_s / (len(requests) * part.layers) if requests else 0.0
    moved = [
        delayed(salted(requests, f"{copy} {layer}"), copy * length_s + layer * apart_s)
        for copy, layer in itertools.product(range(part.copies), range(part.layers))
    ]
    return list(itertools.chain(*moved))


def _fixed(name: str) -> tuple[int, int]:
    _, prompt, output = name.split("-")
    return int(prompt), int(output)


def _fixed_requests(part: Part, seed: int) -> list[TraceRequest]:
    prompt, output = _fixed(part.source)
    duration_s = part.window_s[1] - part.window_s[0]
    arrivals_s = poisson_arrivals(np.random.default_rng(seed), np.array([part.rate_rps]), duration_s)
    base = content_base(f"{part.source} {seed}")
    return [
        TraceRequest(arrival_s / part.speed, ((base + number, prompt),), output)
        for number, arrival_s in enumerate(arrivals_s)
    ]


def _made(part: Part, seed: int) -> list[TraceRequest]:
    made, duration_s = MADE[part.source], part.window_s[1] - part.window_s[0]
    cycle_s = duration_s / BURSTS
    arrivals = Arrivals(part.rate_rps, duration_s, made.shape, on_s=cycle_s / 3, off_s=2 * cycle_s / 3)
    lengths = Lengths.parse(made.inputs), Lengths.parse(made.outputs)
    requests = made_load(arrivals, *lengths, seed, PrefixSharing(*made.sharing))
    return [replace(request, arrival_s=request.arrival_s / part.speed) for request in requests]


def _agents(part: Part, seed: int) -> list[TraceRequest]:
    """Sessions whose every call repeats the history. A call comes some seconds after the one before, at any load: a
    higher load is more sessions. The window opens on sessions that go on."""
    duration_s, span_s = part.window_s[1] - part.window_s[0], AGENT_TURNS * AGENT_GAP_S
    rng = np.random.default_rng([content_base(part.source) >> 31, seed])
    ids = itertools.count(content_base(f"{part.source} {seed}"))
    requests = []
    for start_s in poisson_arrivals(rng, np.array([part.rate_rps / AGENT_TURNS]), span_s + duration_s):
        segments, now_s = [(next(ids), AGENT_FIRST_TOKENS)], start_s - span_s
        for _ in range(AGENT_TURNS):
            output = int(rng.integers(AGENT_OUTPUT_TOKENS // 2, 3 * AGENT_OUTPUT_TOKENS // 2))
            if 0.0 <= now_s < duration_s:
                requests.append(TraceRequest(now_s / part.speed, tuple(segments), output))
            segments.append((next(ids), AGENT_TURN_TOKENS))
            now_s += AGENT_GAP_S * float(rng.uniform(0.5, 1.5))
    return requests
