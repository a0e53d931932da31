"""Executors are chosen by name, and only the one that is started is imported."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from neaptide.engine.clock import MonotonicClock, VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig, SharedReads
from neaptide.executors.contract import Capabilities
from neaptide.executors.registry import UnknownExecutorError, check_executor, start_executor
from neaptide.launch import engine
from neaptide.launch.serve import embedded_model_path
from tests.engine.policies import PLANNED, Planned


def config_of(kind: str, model: Path, num_blocks: int | None = None) -> EngineConfig:
    executor = ExecutorConfig(kind=kind, model_path=str(model), device="cpu", dtype="float32", num_threads=1)
    return EngineConfig(executor=executor, cache=CacheConfig(num_blocks=num_blocks))


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(UnknownExecutorError, match=r"^executor = 'tpu' is not supported; there are: sim, torch, vllm$"):
        start_executor(config_of("tpu", embedded_model_path()), VirtualClock())
    check_executor("sim")


def test_host_memory_is_refused_where_no_block_is_copied_there() -> None:
    with pytest.raises(UnknownExecutorError, match="cannot keep KV blocks in host memory; remove host_cache_gib"):
        check_executor("sim", host_cache_bytes=1)
    for kind in ("torch", "vllm"):
        check_executor(kind, host_cache_bytes=1)


@pytest.mark.parametrize("kind", ["sim", "vllm"])
def test_batch_invariance_is_refused_where_it_is_not_promised(kind: str) -> None:
    with pytest.raises(UnknownExecutorError, match="does not support batch_invariant; the torch executor does"):
        check_executor(kind, batch_invariant=True)
    check_executor("torch", batch_invariant=True)


def test_the_torch_executor_says_what_it_is(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    started = start_executor(config_of("torch", gqa[0], num_blocks=8), MonotonicClock())
    assert (started.device, started.dtype, started.executor.num_blocks) == ("cpu", "float32", 8)
    assert (started.model.vocab_size, started.model.max_position_embeddings) == (128, 256)
    assert started.model.eos_token_ids == (2,)
    assert started.capabilities == (True, False, True, False, SharedReads(decodes_per_read=48 // 3, min_tokens=64))
    assert started.profiled is started.executor


def test_the_simulated_executor_has_no_step_times_to_measure() -> None:
    started = start_executor(config_of("sim", embedded_model_path()), VirtualClock())
    assert (started.device, started.dtype, started.executor.num_blocks) == ("sim", "none", 4096)
    assert started.capabilities == (True, False, False, False, None)
    assert started.profiled is None


@pytest.mark.parametrize("shared_reads", [None, SharedReads(decodes_per_read=24, min_tokens=64)])
def test_the_engine_counts_the_reads_that_its_executor_shares(
    monkeypatch: pytest.MonkeyPatch, shared_reads: SharedReads | None
) -> None:
    config = EngineConfig(executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())))
    able = replace(
        start_executor(config, VirtualClock()), capabilities=Capabilities(True, False, False, False, shared_reads)
    )
    monkeypatch.setattr(engine, "start_executor", lambda *_: able)
    core, ready = engine.build_engine(config, VirtualClock())
    assert core.kv.shared_reads == shared_reads
    assert (ready.token_s, ready.kv_token_s, ready.pair_s) == (1e-4, 1e-7, 1e-8)  # of an unknown machine


def test_an_engine_with_a_simulated_executor_and_the_api_process_load_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from neaptide.engine.clock import VirtualClock
from neaptide.launch.engine import build_engine
from neaptide.launch.serve import model_context
from neaptide.server.settings import Settings
_, config = model_context(Settings(executor="sim"), Path({str(tmp_path)!r}))
build_engine(config, VirtualClock())
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


def test_a_kv_cache_smaller_than_one_request_is_refused(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    with pytest.raises(
        ValueError, match="the KV cache holds 128 tokens, fewer than one request of max_model_len = 8192"
    ):
        engine.build_engine(config_of("torch", gqa[0], num_blocks=8), MonotonicClock())


@pytest.mark.parametrize(("capabilities", "depth"), [((True, True), 1), ((True, False), 0), ((False, True), 0)])
def test_the_engine_plans_ahead_where_the_device_works_beside_the_host(
    monkeypatch: pytest.MonkeyPatch, capabilities: tuple[bool, bool], depth: int
) -> None:
    config = EngineConfig(executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())))
    started = start_executor(config, VirtualClock())
    able = replace(started, capabilities=Capabilities(*capabilities))
    monkeypatch.setattr(engine, "start_executor", lambda *_: able)
    core, _ = engine.build_engine(config, VirtualClock())
    assert core.scheduler.config.overlap_depth == depth


@pytest.mark.parametrize(
    ("policy", "wanted", "capabilities", "gives_up"),
    [
        ("neaptide", True, (True, False, False, True), True),
        ("neaptide", False, (True, False, False, True), False),
        ("neaptide", True, (True, False, False, False), False),
        ("neaptide", True, (True, True, False, True), False),  # planned ahead
        ("priority", True, (True, False, False, True), False),
    ],
)
def test_steps_are_given_up_where_policy_and_executor_can(
    monkeypatch: pytest.MonkeyPatch, policy: str, wanted: bool, capabilities: tuple[bool, ...], gives_up: bool
) -> None:
    config = EngineConfig(
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())),
        scheduler=SchedulerConfig(policy=policy, abortable_steps=wanted),
    )
    able = replace(start_executor(config, VirtualClock()), capabilities=Capabilities(*capabilities))
    monkeypatch.setattr(engine, "start_executor", lambda *_: able)
    core, _ = engine.build_engine(config, VirtualClock())
    assert core.scheduler.config.abortable_steps == gives_up


@pytest.mark.parametrize(
    ("policy", "offline_plan", "is_asynchronous", "order"),
    [
        ("neaptide", "auto", True, "ends"),
        ("neaptide", "auto", False, ""),
        ("neaptide", "on", False, "ends"),
        ("neaptide", "off", True, ""),
        (PLANNED, "auto", False, "fcfs"),
        (PLANNED, "off", False, ""),
        ("fcfs", "on", True, ""),
    ],
)
def test_the_order_that_is_planned_for_a_server(
    monkeypatch: pytest.MonkeyPatch, policy: str, offline_plan: str, is_asynchronous: bool, order: str
) -> None:
    config = EngineConfig(
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())),
        scheduler=SchedulerConfig(policy=policy),
        offline_plan=offline_plan,
    )
    able = replace(start_executor(config, VirtualClock()), capabilities=Capabilities(True, is_asynchronous))
    monkeypatch.setattr(engine, "start_executor", lambda *_: able)
    _, ready = engine.build_engine(config, VirtualClock())
    assert ready.planned_order == order


def test_an_order_that_cannot_be_used_keeps_the_engine_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "planned_order", "nothing_like_it:order")
    config = EngineConfig(
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())),
        scheduler=SchedulerConfig(policy=PLANNED),
    )
    with pytest.raises(ValueError, match="the order 'nothing_like_it:order' cannot be loaded: no module"):
        engine.build_engine(config, VirtualClock())
