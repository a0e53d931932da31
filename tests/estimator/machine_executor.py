"""An executor with known step times, for micro-runs on a virtual clock."""

from collections.abc import Callable, Mapping

from neaptide.engine.clock import VirtualClock
from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.executors.simulated.hash_executor import SimExecutor, SimHandle

COST = StepCost(
    fixed_s=3e-3, gemm_curve_s=(0.0, 1e-4), pair_s=2e-8, kv_token_s=4e-7, decode_request_s=5e-5, prefill_request_s=2e-4
)
SAME_EVERYWHERE = dict.fromkeys(Regime, COST)
DIFFERENT = {
    Regime.PREFILL: COST,
    Regime.DECODE: StepCost(fixed_s=2e-3, gemm_curve_s=(0.0, 8e-5), pair_s=0.0, kv_token_s=3e-7, decode_request_s=5e-5),
    Regime.MIXED: StepCost(
        fixed_s=4e-3,
        gemm_curve_s=(0.0, 1.2e-4),
        pair_s=3e-8,
        kv_token_s=5e-7,
        decode_request_s=6e-5,
        prefill_request_s=3e-4,
    ),
}


class SlowMachine:
    """Takes what ``costs`` say, times the slowness of the moment; steps without work take no time."""

    def __init__(self, slow: Callable[[], float], costs: Mapping[Regime, StepCost]) -> None:
        self._model = RooflineModel(costs)
        self._slow = slow

    def predict(self, shape: BatchShape) -> Prediction:
        seconds = self._slow() * self._model.predict(shape).seconds
        return Prediction(seconds if shape.num_tokens else 0.0, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        raise AssertionError("the executor's own model does not learn")


class MachineExecutor(SimExecutor):
    """Implements ``ProfiledExecutor``; counts the steps that have work in them."""

    device_name = "a machine"
    dtype_name = "float32"
    num_threads = 1
    kv_bytes_per_token = 1024
    build = ""

    def __init__(
        self,
        clock: VirtualClock,
        num_blocks: int = 2048,
        slow: Callable[[], float] = lambda: 1.0,
        costs: Mapping[Regime, StepCost] = SAME_EVERYWHERE,
    ) -> None:
        super().__init__(num_blocks, SlowMachine(slow, costs), clock, vocab_size=100)
        self.clock = clock
        self.steps = 0

    def submit(self, plan: StepPlan) -> SimHandle:
        self.steps += bool(len(plan))
        return super().submit(plan)
