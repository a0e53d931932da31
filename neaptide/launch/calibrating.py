"""Composition root of a calibration: starts a model's executor as a server would, and measures its step times."""

from collections.abc import Callable, Mapping

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.estimator.calibration.calibrate import Calibration, CalibrationPace
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.report import CalibrationReport, report
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.subject import Subject
from neaptide.executors.registry import start_executor
from neaptide.launch.serve import embedded_model_path
from neaptide.launch.threads import default_num_threads
from neaptide.models.checkpoint import load_model_facts, resolve_model
from neaptide.server.engine_client.interpreter import wait_as_in_an_engine
from neaptide.server.settings import EMBEDDED_MODEL


def calibrate_model(
    model: str,
    pace: CalibrationPace,
    *,
    device: str = "auto",
    dtype: str = "auto",
    num_threads: int = 0,
    executor: str = ExecutorConfig().kind,
    arguments: Mapping[str, str] | None = None,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[CalibrationReport, Subject]:
    """Loads the model as a server would, and calibrates it.

    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: the model cannot be loaded, or the time is too short.
    """
    wait_as_in_an_engine()
    path = embedded_model_path() if model == EMBEDDED_MODEL else resolve_model(model)
    clock, positions = MonotonicClock(), load_model_facts(path).served_context_tokens
    config = EngineConfig(
        executor=ExecutorConfig(
            kind=executor,
            model_path=str(path),
            device=device,
            dtype=dtype,
            num_threads=num_threads or default_num_threads(path),
            arguments=dict(arguments or {}),
        ),
        cache=CacheConfig(block_size=0),
        scheduler=SchedulerConfig(max_model_len=min(SchedulerConfig().max_model_len, positions)),
    )
    started = start_executor(config, clock)
    profiled = started.profiled
    if profiled is None:
        raise ValueError(f"executor = {executor!r} has no step times to measure")
    try:
        profiled.touch_blocks(profiled.num_blocks)
        shared_reads = started.capabilities.shared_reads
        limits = CalibrationLimits.of(config.scheduler, profiled.num_blocks * started.block_size, shared_reads)
        runner = MicroRunner(profiled, clock, started.block_size)
        measurements = Calibration(runner, clock, limits, pace, seed, progress).measure()
        if not measurements.samples(held_out=False):
            raise ValueError(f"{pace.budget_s:g} s are too short for a calibration: no step for fitting was measured")
        name = path.resolve().name
        return report(measurements), Subject.of(profiled, name, started.block_size, shared_reads=shared_reads)
    finally:
        profiled.close()
