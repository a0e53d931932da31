"""A batch beside its chats, simulated whole."""

import msgspec

from neaptide.engine.messages import EngineReady
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.stats import step_stats
from neaptide.engine.steps.step import Step
from neaptide.estimator.density import marginal_costs
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.recipes import roofline_recipe
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.server.quotes.periods import Period, PeriodRecorder
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.jobs.setting import JobWatch
from neaptide_lab.experiments.quotes.batches import LIMIT_TOKENS
from neaptide_lab.experiments.rivals.loads import STEP_NOISE, TPOT_SLO_S, TTFT_SLO_S

BEFORE_S = 20.0
"""Chats before the batch comes."""


class ReplayedBatch(msgspec.Struct, frozen=True):
    took_s: float | None
    """From its submission to its last line; None if it had not ended when the chats did."""
    attained: float
    """Share of the chats that met both targets."""
    record: Period
    """What the server's record has of it: the time before the batch, beside it and after it."""


class _Record(EngineObserver):
    """Records the traffic as a server does."""

    def __init__(self, block_size: int) -> None:
        self.recorder = PeriodRecorder(block_size)
        self.recorder.tick(0.0, is_up=True, is_paused=False)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        self.recorder.on_step(step_stats(step, result, scheduler))


def replayed(profile: DeviceProfile, chats: list[TraceRequest], batch: OfflineSet) -> ReplayedBatch:
    """The batch, submitted at its time, beside these chats."""
    scenario = scenario_with(profile, chats, batch)
    jobs, record = JobWatch(), _Record(scenario.block_size)
    run = simulate(scenario, observers=[jobs, record])
    ended = jobs.jobs()
    is_done = bool(ended) and ended[-1].num_rows == len(batch.requests)
    took_s = ended[-1].last_end_s - batch.submitted_s if is_done else None
    assert record.recorder.current is not None
    return ReplayedBatch(took_s, run.result.attained, record.recorder.current)


def scenario_with(profile: DeviceProfile, chats: list[TraceRequest], batch: OfflineSet) -> Scenario:
    return Scenario(
        profile=profile,
        online=chats,
        offline=[batch],
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        step_noise=STEP_NOISE,
        max_model_len=16_384,
        max_output_tokens=LIMIT_TOKENS,
        refill=False,
        with_bounds=False,
    )


def ready_of(profile: DeviceProfile) -> EngineReady:
    """What an engine with this device tells a server about its costs."""
    scenario = scenario_with(profile, [], OfflineSet("", [], synthetic=True))
    scheduler, cost = scenario.engine_config().scheduler, marginal_costs(scenario.device.costs["mixed"])
    return EngineReady(
        model_path=profile.model,
        device=profile.device,
        dtype=profile.dtype,
        vocab_size=0,
        max_model_len=scenario.max_model_len,
        block_size=scenario.block_size,
        num_blocks=scenario.num_blocks,
        eos_token_ids=[],
        token_s=cost.token_s,
        kv_token_s=cost.kv_token_s,
        pair_s=cost.pair_s,
        costs=roofline_recipe(scenario.device, scenario.overlap_kappa, learns=False),
        max_step_tokens=scenario.max_num_batched_tokens,
        max_num_seqs=scenario.max_num_seqs,
        offline_kv_tokens=int(scheduler.offline_max_kv_ratio * scenario.num_blocks) * scenario.block_size,
    )
