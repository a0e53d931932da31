"""Composition root of the engine process: the engine with its executor and its models."""

import os
import time
from pathlib import Path

import msgspec

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import EngineReady
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.planning.plan import find_order
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.process.crash_marker import CrashMarker
from neaptide.engine.process.crash_marker_observer import CrashMarkerObserver
from neaptide.engine.process.request_log import RequestLog
from neaptide.engine.record.step_log import create_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.record.traffic_recorder import TrafficRecorder
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.policies import policy_of
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.start_up import StartUp
from neaptide.estimator.calibration.steps import CalibrationLimits, start_steps
from neaptide.estimator.cost.iteration_time import Regime, StepSample
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.density import marginal_costs
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import DEFAULT_HEADROOM, build_headroom, recipe_as_it_is, recipe_of
from neaptide.estimator.subject import Subject
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.registry import start_executor


def build_engine(config: EngineConfig, clock: Clock) -> tuple[EngineCore, EngineReady]:
    """The engine with its executor and models, warmed up.

    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: it cannot be built. The message says why.
    """
    policy_of(config.scheduler)  # before the weights are loaded
    started = start_executor(config, clock)
    config = _as_started(config, started)
    scheduler = config.scheduler
    executor, model = started.executor, started.model
    if executor.num_blocks * config.cache.block_size < scheduler.max_model_len:
        raise ValueError(
            f"the KV cache holds {executor.num_blocks * config.cache.block_size} tokens, fewer than one request of "
            f"max_model_len = {scheduler.max_model_len}; raise kv_cache_gib or lower max_model_len"
        )
    cost_model, observed = _cost_model(config, started, clock)
    core = EngineCore(
        config,
        executor,
        cost_model,
        build_headroom(DEFAULT_HEADROOM, executor.num_blocks),
        clock,
        frozenset(model.eos_token_ids),
        _observers(config, executor.num_blocks, clock, cost_model, observed),
    )
    marginal = marginal_costs(cost_model.as_it_is().costs[Regime.MIXED])
    longest = BatchShape()
    longest.add(scheduler.max_num_batched_tokens, max(scheduler.max_model_len - scheduler.max_num_batched_tokens, 0))
    ready = EngineReady(
        model_path=config.executor.model_path,
        device=started.device,
        dtype=started.dtype,
        vocab_size=model.vocab_size,
        max_model_len=scheduler.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=executor.num_blocks,
        eos_token_ids=list(model.eos_token_ids),
        longest_step_s=cost_model.predict(longest).seconds,
        planned_order=_planned_order(core.scheduler, config.offline_plan),
        token_s=marginal.token_s,
        kv_token_s=marginal.kv_token_s,
        pair_s=marginal.pair_s,
        tile_tokens=cost_model.base.tile_tokens,
        costs=recipe_as_it_is(cost_model),
        max_step_tokens=core.scheduler.max_step_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        offline_kv_tokens=int(scheduler.offline_max_kv_ratio * executor.num_blocks) * config.cache.block_size,
    )
    return core, ready


def _planned_order(scheduler: Scheduler, offline_plan: str) -> str:
    """Order of the offline pool's plans; empty if the pool is not planned.

    Raises:
        ExtensionError: the policy's order cannot be used.
    """
    if offline_plan == "off":
        return ""
    is_wanted = offline_plan == "on" or scheduler.config.overlap_depth > 0
    order = scheduler.planned_order or (scheduler.server_order if is_wanted else None) or ""
    if order and order != DUAL_SCAN:
        find_order(order)  # the planner's process would say it too late
    return order


def traffic_recorder(core: EngineCore, ready: EngineReady) -> TrafficRecorder:
    """Records the traffic that the engine serves from now on."""
    model = core.scheduler.cost_model
    assert isinstance(model, OnlineCostModel)
    recorder = TrafficRecorder(core.scheduler, ready.num_blocks, lambda: (recipe_as_it_is(model), model.as_it_is()))
    core.subscribe(recorder)
    return recorder


def _as_started(config: EngineConfig, started: StartedExecutor) -> EngineConfig:
    """The configuration with the executor's block size and abilities.

    Schedules asynchronously (overlap_depth=1) where the device runs while the host plans; planning would otherwise keep
    it waiting.
    """
    can = started.capabilities
    depth = int(can.placeholders and can.asynchronous)
    gives_up = can.abortable_steps and not depth and policy_of(config.scheduler).abortable_steps
    return msgspec.structs.replace(
        config,
        cache=msgspec.structs.replace(
            config.cache,
            block_size=started.block_size,
            num_host_blocks=started.num_host_blocks,
            slot_copies=can.slot_copies,
            shared_reads=can.shared_reads,
        ),
        scheduler=msgspec.structs.replace(
            config.scheduler,
            overlap_depth=depth,
            abortable_steps=config.scheduler.abortable_steps and gives_up,
        ),
    )


def _cost_model(
    config: EngineConfig, started: StartedExecutor, clock: Clock
) -> tuple[OnlineCostModel, list[StepSample]]:
    """The cost model and the steps that it observed, from a profile or from micro-runs on a real device. The executor
    is warm afterwards."""
    profile, executor = config.profile, started.profiled
    if executor is None:
        base = RooflineModel() if profile.name is None else RooflineModel.from_profile(load_profile(profile.name))
        return OnlineCostModel(base), []
    block_size = config.cache.block_size
    shared_reads = started.capabilities.shared_reads
    limits = CalibrationLimits.of(config.scheduler, executor.num_blocks * block_size, shared_reads)
    runner = MicroRunner(executor, clock, block_size)
    executor.touch_blocks(runner.blocks_of(start_steps(limits)))
    kept_in = None if profile.kept_in is None else Path(profile.kept_in)
    name = Path(config.executor.model_path).name
    subject = Subject.of(executor, name, block_size, profile.model_fingerprint, shared_reads)
    start_up = StartUp(runner, clock, limits, subject, time.strftime("%Y-%m-%d"), kept_in)
    return start_up.cost_model(profile.name), start_up.observed


def _observers(
    config: EngineConfig, num_blocks: int, clock: Clock, cost_model: OnlineCostModel, observed: list[StepSample]
) -> list[EngineObserver]:
    observers: list[EngineObserver] = []
    if config.request_log_path:
        max_bytes, num_old = config.request_log_max_bytes, config.request_log_old_files
        observers.append(RequestLog(config.request_log_path, clock, max_bytes, num_old))
    if config.crash_marker_fd is not None:
        observers.append(CrashMarkerObserver(CrashMarker(config.crash_marker_fd)))
    if config.step_log_path is not None:
        observers.append(_recorder(config, num_blocks, cost_model, observed))
    return observers


def _recorder(
    config: EngineConfig, num_blocks: int, cost_model: OnlineCostModel, observed: list[StepSample]
) -> StepRecorder:
    assert config.step_log_path is not None
    if os.path.exists(config.step_log_path):
        os.replace(config.step_log_path, f"{config.step_log_path}.1")
    recipe = {"cost_model": recipe_of(cost_model), "headroom": DEFAULT_HEADROOM}
    recorder = StepRecorder(create_log(config.step_log_path, config.step_log_max_bytes), config, num_blocks, recipe)
    for sample in observed:
        recorder.warmed_up(sample.shape, sample.seconds)
    return recorder
