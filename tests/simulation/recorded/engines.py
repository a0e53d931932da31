"""Simulated engines whose traffic is recorded as a served one's is."""

from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import TellTraffic
from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.traffic_recorder import Costs, TrafficRecorder
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import PlanningCost
from neaptide.estimator.recipes import recipe_as_it_is
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.recorded.recording import TrafficRecording
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import Run, simulate
from tests.simulation.scenes import profile

BASE = content_base("recorded#0")
COST = StepCost(
    fixed_s=1e-2, gemm_curve_s=(3e-4, 6e-4), pair_s=3e-8, kv_token_s=3e-7, decode_request_s=3e-4, prefill_request_s=5e-4
)
DEVICE = msgspec.structs.replace(
    profile(600, 16, PlanningCost(1e-3)), costs=dict.fromkeys(("prefill", "decode", "mixed"), COST)
)


class Slower:
    """A device that is slower than its profile says."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._model = RooflineModel.from_profile(DEVICE)

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._factor * self._model.predict(shape).seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


class Stalling(Slower):
    """A device whose processor others take now and then: one step of 33 lasts ten times as long."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self._random = Random(1)

    def predict(self, shape: BatchShape) -> Prediction:
        seconds = super().predict(shape).seconds
        return Prediction(10.0 * seconds if self._random.random() < 0.03 else seconds, 0.0)


class Recorded(EngineObserver):
    """Records a simulation in pieces, as the loop of a served engine has them."""

    def __init__(self) -> None:
        self._model = OnlineCostModel(RooflineModel.from_profile(DEVICE))
        self._recorder: TrafficRecorder | None = None
        self._pieces: list[bytes] = []
        self._now_s = 0.0

    @property
    def recorder(self) -> TrafficRecorder:
        assert self._recorder is not None
        return self._recorder

    def _costs(self) -> Costs:
        return recipe_as_it_is(self._model), self._model.as_it_is()

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        if self._recorder is None:
            self._recorder = TrafficRecorder(scheduler, DEVICE.num_blocks, self._costs)

    def executed(self, step: Step, result: StepResult) -> None:
        self._model.observe(step.plan.shape, step.timer.execute_s)
        self.recorder.executed(step, result)

    def ended(self, *args: Any) -> None:
        self.recorder.ended(*args)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        self.recorder.committed(step, result, scheduler)
        self._now_s = step.timer.end_s
        self._pieces += [traffic.piece for traffic in self.recorder.take(self._now_s)]

    def pieces(self) -> list[bytes]:
        """Of all that has happened; the last one says what the engine has."""
        self.recorder.message(TellTraffic(), self._now_s)
        return self._pieces + [traffic.piece for traffic in self.recorder.take(self._now_s)]


def load(seconds: float, rate: float = 4.0, seed: int = 3) -> list[TraceRequest]:
    """Chats at random, every fourth on one of three long prefixes."""
    rng = Random(seed)
    found, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        own = (BASE + 100 + len(found), rng.randrange(40, 200))
        prefix = ((BASE + rng.randrange(3), 128),) if rng.random() < 0.25 else ()
        found.append(TraceRequest(at_s, (*prefix, own), rng.randrange(3, 20)))
    return found


def rows(count: int, seed: int = 5) -> OfflineSet:
    rng = Random(seed)
    base = BASE + 100_000
    found = [
        TraceRequest(0.0, ((base + k % 5, 96), (base + 10 + k, rng.randrange(60, 300))), rng.randrange(20, 120))
        for k in range(count)
    ]
    return OfflineSet("recorded", found, synthetic=True)


def scene(policy: str, seconds: float, **fields: object) -> Scenario:
    """More rows than can be done, beside chats, on a device that is a third slower than its profile, and uneven."""
    values: dict[str, object] = {
        "profile": DEVICE,
        "online": load(seconds),
        "offline": [rows(900)],
        "policy": policy,
        "ttft_slo_s": 0.45,
        "tpot_slo_s": 0.15,
        "keep_order": True,
        "refill": False,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "truth": Slower(1.33),
        "step_noise": 0.1,
        "drain_s": 0.0,
        "window_s": (0.0, seconds),
        "with_bounds": False,
    }
    return replace(Scenario(profile=DEVICE), **(values | fields))  # type: ignore[arg-type]


def recorded(policy: str, seconds: float = 90.0, **fields: object) -> tuple[TrafficRecording, Run]:
    watch = Recorded()
    run = simulate(scene(policy, seconds, **fields), observers=[watch])
    return TrafficRecording.decode(watch.pieces()), run
