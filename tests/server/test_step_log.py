"""The server's engine writes a step log on request."""

from pathlib import Path

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.launch.engine import build_engine
from neaptide.launch.serve import embedded_model_path, engine_config
from neaptide.server.settings import Settings
from neaptide.simulation.replay import replay
from tests.engine.harness import batch, online


def write(log: Path, directory: Path) -> int:
    """Runs some work on a simulated engine as the server builds it; returns the number of steps."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_model_len=512, max_num_batched_tokens=64),
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path())),
        step_log_path=str(log),
    )
    core, _ = build_engine(config, VirtualClock())
    core.handle(batch(directory, "job", [[9] * 40 + [k] for k in range(6, 16)]))
    core.handle(online("chat", [8] * 50, max_tokens=9))
    steps = 0
    while core.has_work:
        steps += len(core.step().stats)
    core.close()
    return steps


def test_the_log_of_a_server_engine_replays(tmp_path: Path) -> None:
    steps = write(tmp_path / "log.gz", tmp_path)
    result = replay(tmp_path / "log.gz")
    assert result.difference is None
    assert result.steps == steps


def test_the_log_of_the_engines_last_life_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "log.gz", tmp_path)
    first = (tmp_path / "log.gz").read_bytes()
    write(tmp_path / "log.gz", tmp_path)
    assert (tmp_path / "log.gz.1").read_bytes() == first
    assert replay(tmp_path / "log.gz.1").difference is None


def test_the_setting_reaches_the_engine(tmp_path: Path) -> None:
    settings = Settings(step_log="steps.jsonl")
    assert engine_config(settings, tmp_path, "", 512, tmp_path).step_log_path == "steps.jsonl"
    assert engine_config(Settings(), tmp_path, "", 512, tmp_path).step_log_path is None


def test_the_sizes_of_logs_reach_the_engine(tmp_path: Path) -> None:
    settings = Settings(request_log_max_mb=2, request_log_old_files=3, step_log_max_mb=4)
    config = engine_config(settings, tmp_path, "", 512, tmp_path)
    assert config.request_log_max_bytes == 2_000_000
    assert config.request_log_old_files == 3
    assert config.step_log_max_bytes == 4_000_000


def test_whether_the_pool_is_planned_reaches_the_engine(tmp_path: Path) -> None:
    assert engine_config(Settings(), tmp_path, "", 512, tmp_path).offline_plan == "auto"
    assert engine_config(Settings(offline_plan="on"), tmp_path, "", 512, tmp_path).offline_plan == "on"
