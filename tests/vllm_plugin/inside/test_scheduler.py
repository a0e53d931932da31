"""What the scheduler inside vLLM gives to whom, on a virtual clock."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from lab.benchmarks.vllm_inside.virtual import Setup, VirtualServer, token_at
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import load_profile, save_profile
from neaptide_vllm.scheduling import coserving, factory
from neaptide_vllm.scheduling.coserving import CoServing
from neaptide_vllm.scheduling.factory import make_scheduler
from neaptide_vllm.series import PREFIX
from neaptide_vllm.settings import HOST_S
from neaptide_vllm.stat_logger import can_carry

TARGETS = {"ttft_ms": 200, "tpot_ms": 40}


def step_s(parts: Sequence[tuple[int, int]]) -> float:
    return 0.005 + 5e-4 * sum(num_tokens for num_tokens, _ in parts)


def started(**changed: Any) -> VirtualServer:
    return VirtualServer(Setup(**{"settings": TARGETS, **changed}), step_s)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{index}").randrange(10, 8000) for index in range(num_tokens)]


def flood(server: VirtualServer, count: int, num_tokens: int = 60, max_tokens: int = 60) -> None:
    for index in range(count):
        server.add(f"line{index}", prompt(num_tokens, index), max_tokens, 1)


def warmed_up(**changed: Any) -> VirtualServer:
    """A server that has measured two hundred steps of offline work, and has much of it."""
    server = started(**changed)
    flood(server, 400)
    for _ in range(200):
        server.step()
    return server


def ttft_s(server: VirtualServer, request_id: str) -> float:
    """Steps until the request has its first token."""
    arrival_s = server.now_s
    for _ in range(500):
        _, tokens = server.step()
        for token in tokens:
            if token.request_id == request_id:
                return token.time_s - arrival_s
    raise AssertionError("no token in 500 steps")


def test_a_chat_meets_its_targets_beside_a_flood() -> None:
    server = warmed_up()
    server.add("chat", prompt(100, -1), 20, 0)
    assert ttft_s(server, "chat") <= 0.2
    times_s = [server.now_s]
    while len(times_s) < 20:
        times_s += [token.time_s for token in server.step()[1] if token.request_id == "chat"]
    assert (times_s[-1] - times_s[0]) / 19 <= 0.04


def test_offline_work_goes_on_beside_a_chat() -> None:
    server = warmed_up()
    server.add("chat", prompt(20, -1), 100, 0)
    ttft_s(server, "chat")
    beside = [output.total_num_scheduled_tokens for output, _ in (server.step() for _ in range(50))]
    assert sum(beside) > 200


def test_targets_of_a_request_shorten_the_steps_beside_it() -> None:
    lengths_s = {}
    for tpot_ms in (20, 80):
        server = warmed_up()
        server.add("chat", prompt(20, -1), 100, 0, targets={"tpot_ms": tpot_ms})
        ttft_s(server, "chat")
        begin_s = server.now_s
        for _ in range(40):
            server.step()
        lengths_s[tpot_ms] = (server.now_s - begin_s) / 40
    assert lengths_s[20] <= 0.02 < lengths_s[80]


def test_an_offline_request_leaves_its_place_to_a_chat() -> None:
    server = warmed_up(max_num_seqs=4)
    assert len(server.scheduler.running) >= 3
    for index in range(4):
        server.add(f"chat{index}", prompt(20, -1 - index), 30, 0)
    for _ in range(10):
        server.step()
    assert server.scheduler.given.recent["preempted"] >= 3
    assert [request.priority for request in server.scheduler.running] == [0, 0, 0, 0]


def test_an_offline_request_leaves_its_blocks_to_a_chat() -> None:
    server = warmed_up(num_blocks=30)
    server.add("chat", prompt(300, -1), 30, 0)
    assert ttft_s(server, "chat") < 1.0
    assert server.scheduler.given.recent["preempted"] >= 1


def test_default_targets_come_from_measured_steps() -> None:
    server = warmed_up(settings={})
    config = server.scheduler.planner.config
    assert config.tpot_slo_s == pytest.approx(max(2.4 * step_s([(1, 0)]), 0.02), rel=0.3)
    assert config.ttft_slo_s >= 5 * config.tpot_slo_s


def test_given_targets_stay() -> None:
    config = warmed_up().scheduler.planner.config
    assert (config.ttft_slo_s, config.tpot_slo_s) == (0.2, 0.04)


def test_the_cost_model_learns_the_machine() -> None:
    assert warmed_up().scheduler.cost_model.mape < 0.03


def test_what_is_given_is_counted() -> None:
    server = warmed_up()
    server.add("chat", prompt(100, -1), 2, 0)
    ttft_s(server, "chat")
    server.step()
    recent = server.scheduler.given.recent
    assert recent["first_in_time"] == 1
    assert recent["answers_in_time"] == 1
    assert recent["online_tokens"] == 101
    assert recent["offline_s"] > recent["streams_s"] > 0
    assert recent["offline_tokens"] > 1000


def test_one_log_line_a_minute_says_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(coserving.logger, "info", lambda text, *args: lines.append(text % args))
    server = VirtualServer(Setup(settings=TARGETS), lambda parts: 1.0)
    flood(server, 100, max_tokens=400)
    for _ in range(125):
        server.step()
    assert len(lines) == 2
    assert all(line.startswith("neaptide, last 60 s: of the step time 0% to chats' streams") for line in lines)


def test_a_profile_gives_the_step_times_from_the_start(tmp_path: Path) -> None:
    cost = StepCost(fixed_s=0.005, gemm_curve_s=(5e-4, 1e-3), pair_s=0.0, kv_token_s=0.0)
    profile = msgspec.structs.replace(
        load_profile("cpu-neaptide-tiny"), costs=dict.fromkeys(("prefill", "decode", "mixed"), cost)
    )
    save_profile(profile, tmp_path / "profile.json")
    model = started(settings=TARGETS | {"profile": str(tmp_path / "profile.json")}).scheduler.cost_model
    shape = BatchShape()
    shape.add(100, 0)
    assert model.predict(shape).seconds == pytest.approx(step_s([(100, 0)]) + HOST_S, rel=0.01)


def test_an_answer_of_one_token_counts() -> None:
    server = warmed_up()
    server.add("chat", prompt(20, -1), 1, 0)
    ttft_s(server, "chat")
    recent = server.scheduler.given.recent
    assert recent["first_in_time"] == 1
    assert not recent["answers_in_time"]


@pytest.mark.skipif(not can_carry(), reason="this version of vLLM cannot carry the series")
def test_series_go_out_with_vllms_own_stats() -> None:
    server = warmed_up()
    server.scheduler.log_stats = server.scheduler.kv_cache_manager.log_stats = True
    server.scheduler.kv_cache_manager.prefix_cache_stats = type(
        "Stats", (), {"reset": False, "requests": 0, "queries": 0, "hits": 0}
    )()
    sent = server.scheduler.make_stats().num_kv_fetch_reqs_by_stage
    assert sent[PREFIX + "active"] == 1
    assert sent[PREFIX + "steps"] == 200


def test_when_planning_fails_vllm_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = warmed_up()
    server.add("chat", prompt(100, -1), 5, 0)

    def fail(*args: Any) -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr(server.scheduler.planner, "plan", fail)
    tokens = []
    while server.scheduler.has_requests():
        tokens += server.step()[1]
        server.check_integrity()
    assert [each.token_id for each in tokens if each.request_id == "chat"] == [token_at("chat", k) for k in range(5)]
    assert server.scheduler.given.take(server.scheduler._gauges())[PREFIX + "active"] == 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What vLLM would make its scheduler from."""
    server = started()
    scheduler = server.scheduler
    return {
        "vllm_config": scheduler.vllm_config,
        "kv_cache_config": scheduler.kv_cache_config,
        "structured_output_manager": scheduler.structured_output_manager,
        "block_size": scheduler.block_size,
    }


def test_vllm_finds_the_scheduler_by_the_name_of_the_command_line(made: dict[str, Any]) -> None:
    config = made["vllm_config"].scheduler_config
    config.scheduler_cls = "neaptide_vllm.scheduler"
    assert isinstance(config.get_scheduler_cls()(**made), CoServing)


def test_another_vllm_runs_its_own_scheduler(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(factory, "agreed", lambda: {"v1/request.py:Request.priority": None})
    monkeypatch.setattr(factory.logger, "warning", lambda text, *args: lines.append(text % args))
    scheduler = make_scheduler(**made)
    assert type(scheduler) is Scheduler
    assert len(lines) == 1
    assert "vLLM's own scheduler decides" in lines[0]
    assert "is not as expected" in lines[0]


def test_a_wrong_setting_stops_the_start(made: dict[str, Any]) -> None:
    made["vllm_config"].additional_config = {"neaptide": {"tpot": 1}}
    with pytest.raises(ValueError, match="unknown field `tpot`"):
        make_scheduler(**made)


def late_prompts_that_run(**changed: Any) -> VirtualServer:
    """Two chats with a part of their prompts computed, which are late for certain."""
    server = started(max_num_batched_tokens=64, **changed)
    for number in range(2):
        server.add(f"late{number}", prompt(500, number), 5, 0, targets={"ttft_ms": 60_000})
        server.step()
        server.now_s += 61.0
    computed = [request.num_computed_tokens for request in server.scheduler.running]
    assert len(computed) == 2
    assert max(computed) <= 64
    return server


@pytest.mark.parametrize(("max_num_seqs", "num_blocks"), [(2, 2912), (8, 70)], ids=["slots", "blocks"])
def test_late_prompts_go_on_while_chats_find_no_room(max_num_seqs: int, num_blocks: int) -> None:
    """What is planned for chats that wait would be lost, and those that run would never make room."""
    server = late_prompts_that_run(max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    server.add("chat", prompt(980, 2), 5, 0, targets={"ttft_ms": 60_000})
    for _ in range(10):
        output, _ = server.step()
        assert output.total_num_scheduled_tokens >= 16
        assert "chat" not in output.num_scheduled_tokens
    assert ttft_s(server, "chat") < 60.0
