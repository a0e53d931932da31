import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    SetOffline,
    SetShareWeights,
    ToEngine,
)
from neaptide.engine.offline.sharing import tenant_account
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.record.block_numbers import BlockNumbers
from neaptide.engine.record.step_log import IdleLine, StepLine, WeightsLine, create_log, read_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.executors.simulated.hash_executor import SimExecutor
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.scenario import GiveUp
from neaptide.simulation.simulator import simulate
from tests.engine.harness import batch, online
from tests.engine.policies import SORTED
from tests.golden.renew import GOLDEN_LOG
from tests.simulation.scenes import mixed

DEPTHS = [0, 1]


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_decides_in_a_replay_as_it_did(policy: str, depth: int, tmp_path: Path) -> None:
    """Its own cost model learns from noisy steps, rows have shared prefixes, the pool is too small."""
    scenario = mixed(num_online=12, num_rows=20, policy=policy, step_noise=0.1, cost_model=None, overlap_depth=depth)
    run = simulate(scenario, step_log=tmp_path / "log")
    assert run.num_unfinished == 0
    assert run.result.valid
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)


def test_steps_that_were_given_up_replay(tmp_path: Path) -> None:
    scenario = mixed(ttft_slo_s=0.006, tpot_slo_s=0.001, step_noise=0.1, cost_model=None)
    run = simulate(replace(scenario, give_up=GiveUp(Layers(20, 0.0001))), step_log=tmp_path / "log")
    assert run.num_aborted > 0
    lines = [line for line in read_log(tmp_path / "log") if isinstance(line, StepLine)]
    assert sum(line.given_up for line in lines) == run.num_aborted
    assert replay(tmp_path / "log") == Replay(len(lines), None)
    text = (tmp_path / "log").read_text()
    (tmp_path / "whole").write_text(text.replace('"given_up":true,', "").replace(',"given_up":true', ""))
    assert replay(tmp_path / "whole").difference is not None


def test_the_golden_log_replays() -> None:
    assert replay(GOLDEN_LOG).difference is None


@pytest.mark.parametrize("headroom", ["fixed@20", "mu-sigma", "quantile", "conformal", "two-speed@50", "near"])
def test_the_header_says_which_headroom_to_keep(headroom: str, tmp_path: Path) -> None:
    simulate(mixed(headroom=headroom), step_log=tmp_path / "log")
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize(
    ("recorded", "altered", "said"),
    [
        ('"chunks":[[0,', '"chunks":[[1,', "computes"),
        ('"policy":"neaptide"', '"policy":"fcfs"', "step"),
        ('"offline_max_kv_ratio":0.9', '"offline_max_kv_ratio":0.5', "step"),
    ],
)
def test_the_first_difference_is_named(recorded: str, altered: str, said: str, tmp_path: Path) -> None:
    text = GOLDEN_LOG.read_text()
    assert recorded in text
    (tmp_path / "log").write_text(text.replace(recorded, altered, 1))
    result = replay(tmp_path / "log")
    assert result.difference is not None
    assert said in result.difference


def test_a_replay_reports_each_step_with_its_outputs() -> None:
    seen: list[int] = []
    ended: list[str] = []

    def on_step(line: StepLine, outputs: object) -> None:
        seen.append(line.step)
        ended.extend(o.request_id for o in outputs.outputs if o.finish_reason is not None)  # type: ignore[attr-defined]

    result = replay(GOLDEN_LOG, on_step=on_step)
    assert len(seen) == result.steps
    assert len([request_id for request_id in ended if request_id.startswith("online-")]) == 24


class Recorded:
    """An engine with the hashing executor, fed by hand on a clock that moves a little between any two readings."""

    def __init__(self, log: Path, headroom: str = "fixed", **scheduler: object) -> None:
        values: dict[str, object] = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 4096} | scheduler
        config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(**values))  # type: ignore[arg-type]
        self.cost_model = build_cost_model({"kind": "online"})
        recipe = {"cost_model": {"kind": "online"}, "headroom": headroom}
        self.clock = RestlessClock()
        self.executor = SimExecutor(24, ConstantCostModel(0.01), self.clock, vocab_size=1000)
        self.recorder = StepRecorder(create_log(log), config, 24, recipe)
        self.core = EngineCore(
            config,
            self.executor,
            self.cost_model,
            build_headroom(headroom, 24),
            self.clock,
            observers=[self.recorder],
        )
        self.texts: dict[str, list[int]] = {}

    def step(self, *messages: ToEngine) -> None:
        for message in messages:
            self.core.handle(message)
        for output in self.core.step().outputs:
            self.texts.setdefault(output.request_id, []).extend(output.new_token_ids)

    def run(self) -> None:
        while self.core.has_work:
            self.step()


class RestlessClock(VirtualClock):
    def now(self) -> float:
        self.sleep_until(super().now() + 1e-6)
        return super().now()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_conversation_finds_its_own_answer_in_the_cache(depth: int, tmp_path: Path) -> None:
    """The second prompt holds the first answer: the log knows no token of it, and still the replay finds its blocks."""
    engine = Recorded(tmp_path / "log", overlap_depth=depth)
    prompt = list(range(10, 17))
    engine.step(online("a", prompt, max_tokens=12))
    engine.run()
    engine.step(online("b", prompt + engine.texts["a"] + [5, 6], max_tokens=3))
    engine.run()
    engine.recorder.close()
    admitted = [pair for line in read_log(tmp_path / "log") if isinstance(line, StepLine) for pair in line.admit]
    assert admitted == [(0, 0), (1, 16)]
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_batch_in_two_files_an_abort_and_a_pause_replay(depth: int, tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", overlap_depth=depth)
    first = batch(tmp_path, "job", [[9] * 8, [9] * 8 + [7], [8] * 5])
    second = batch(tmp_path, "more", [[]] * 3 + [[9] * 9, [6]])
    engine.step(first, online("a", [7] * 9, max_tokens=9))
    again = AddBatch("job", second.path, [3, 4], second.params_table, [0, 0], [], 1e9)
    engine.step(again, SetOffline(True))
    for _ in range(3):
        engine.step()
    engine.step(AbortRequest(["a", "job:1"]), SetOffline(False))
    engine.step(CancelBatch("job"), batch(tmp_path, "last", [[5] * 6]))
    engine.run()
    engine.recorder.close()
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize("depth", DEPTHS)
def test_steps_with_late_masks_replay(depth: int, tmp_path: Path) -> None:
    """Rows that have no mask put out the same tokens later."""
    texts = []
    for every in (0, 3):
        engine = Recorded(tmp_path / "log", overlap_depth=depth)
        submit, turn = engine.executor.submit, random.Random(1)

        def submit_late(plan: StepPlan, submit: Any = submit, turn: Any = turn, every: int = every) -> Any:
            handle = submit(plan)
            sampling = [plan.request_ids[index] for index in np.flatnonzero(plan.sample).tolist()]
            handle.result.late = {name: 0.015 for name in sampling if every and not turn.randrange(every)}
            handle.result.mask_s = 0.002 * bool(handle.result.late)
            return handle

        engine.executor.submit = submit_late  # type: ignore[method-assign]
        engine.step(batch(tmp_path, "job", [[9] * 16, [9] * 8 + [7], [8] * 5]), online("a", [7] * 9, max_tokens=9))
        engine.run()
        engine.core.check_integrity()
        engine.recorder.close()
        texts.append(engine.texts)
    assert texts[1] == texts[0]
    lines = [line for line in read_log(tmp_path / "log") if isinstance(line, StepLine)]
    assert sum(bool(line.late) for line in lines) > 5
    assert replay(tmp_path / "log").difference is None
    text = (tmp_path / "log").read_text()
    (tmp_path / "other").write_text(text.replace('"late":{', '"late":{},"x":{', 1))
    assert replay(tmp_path / "other").difference is not None


def in_messages(directory: Path, name: str, texts: list[list[list[int]]]) -> list[AddBatch]:
    """A job whose rows come in several messages, each with a token file of its own."""
    messages, first = [], 0
    for index, prompts in enumerate(texts):
        part = batch(directory, f"{name}-{index}", [[]] * first + prompts)
        rows = list(range(first, first + len(prompts)))
        messages.append(AddBatch(name, part.path, rows, part.params_table, [0] * len(rows), [], 1e9))
        first += len(prompts)
    return messages


@pytest.mark.parametrize("policy", [SORTED])
def test_jobs_in_several_messages_replay_under_a_policy_that_sorts_rows(policy: str, tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", policy=policy, max_num_seqs=2, max_num_batched_tokens=2048)
    rng = random.Random(3)
    texts = [[[rng.randrange(6, 12)] * rng.randrange(1, 20) for _ in range(6)] for _ in range(6)]
    first, second = in_messages(tmp_path, "job", texts[:3]), in_messages(tmp_path, "other", texts[3:])
    for messages in zip(first, second, strict=True):
        engine.step(*messages)
        for _ in range(5):
            engine.step()
    engine.run()
    engine.recorder.close()
    assert len(engine.texts) == 36
    assert replay(tmp_path / "log").difference is None
    assert engine.recorder.num_open == 0


@pytest.mark.parametrize("policy", [SORTED])
def test_a_job_of_that_kind_that_is_cancelled_and_comes_again_replays(policy: str, tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", policy=policy, max_num_seqs=2, max_num_batched_tokens=2048)
    before = in_messages(tmp_path, "job", [[[8] * 8, [6] * 9, []], [[7] * 5, [9] * 5]])
    engine.step(*before)
    (tmp_path / "again").mkdir()
    after = in_messages(tmp_path / "again", "job", [[[9] * 4, [6] * 9], [[7] * 5, [8] * 6, [5] * 2]])
    engine.step(CancelBatch("job"), after[0])
    engine.step(after[1])
    engine.run()
    engine.recorder.close()
    assert replay(tmp_path / "log").difference is None
    assert engine.recorder.num_open == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_job_that_was_cancelled_and_comes_again_under_its_name_replays(depth: int, tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", overlap_depth=depth)
    engine.step(batch(tmp_path, "job", [[9] * 8, [8] * 9], max_tokens=9))
    engine.step()
    engine.step(CancelBatch("job"), batch(tmp_path, "job", [[7] * 13, [6] * 5], max_tokens=3))
    engine.run()
    engine.recorder.close()
    result = replay(tmp_path / "log")
    assert result.difference is None
    assert result.steps > 4


@pytest.mark.parametrize("salts", list(permutations([b"A", b"B", b""])))
def test_equal_text_under_every_salt_replays(salts: tuple[bytes, ...], tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log")
    for index, (salt, length) in enumerate([(salts[0], 3), *((salt, 14) for salt in salts + salts)]):
        engine.step(online(f"r{index}", list(range(6, 6 + length)), salt=salt))
        engine.run()
    engine.recorder.close()
    admitted = [tokens for line in read_log(tmp_path / "log") if isinstance(line, StepLine) for _, tokens in line.admit]
    assert admitted == [0, 0, 0, 0, 12, 12, 12]
    assert replay(tmp_path / "log").difference is None


def test_a_row_that_was_looked_at_and_cancelled_replays(tmp_path: Path) -> None:
    """It finds its prefix in the cache, which counts, and still is never admitted."""
    engine = Recorded(tmp_path / "log", max_num_seqs=1)
    engine.step(online("a", [9] * 13, max_tokens=30), batch(tmp_path, "job", [[9] * 12, [7] * 9]))
    for _ in range(5):
        engine.step()
    engine.step(CancelBatch("job"))
    engine.run()
    engine.recorder.close()
    assert engine.recorder.num_open == 0
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize("depth", DEPTHS)
def test_weights_that_change_replay(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_account, "QUANTUM_TOKENS", 8)
    engine = Recorded(tmp_path / "log", overlap_depth=depth, max_num_seqs=2)
    jobs = [batch(tmp_path, share, [[number] * 8] * 12, max_tokens=2) for number, share in enumerate("ab", 7)]
    engine.step(*(msgspec.structs.replace(job, share=job.batch_id) for job in jobs))
    engine.step(SetShareWeights({"b": 5.0}))
    engine.run()
    engine.recorder.close()
    assert [line.weights for line in read_log(tmp_path / "log") if isinstance(line, WeightsLine)] == [{"b": 5.0}]
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_long_pause_is_a_line_a_second_and_replays(depth: int, tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", headroom="conformal", overlap_depth=depth)
    engine.step(online("a", [7] * 9), batch(tmp_path, "job", [[9] * 8, [8] * 9], max_tokens=20))
    engine.step(SetOffline(True))
    for _ in range(7000):  # more than a horizon
        engine.clock.sleep_until(engine.clock.now() + 0.005)
        engine.step()
    engine.step(SetOffline(False))
    engine.run()
    engine.recorder.close()
    assert 30 <= sum(isinstance(line, IdleLine) for line in read_log(tmp_path / "log")) <= 40
    assert replay(tmp_path / "log").difference is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("seed", "least_swept"),
    [
        (0, 1 << 15),
        pytest.param(1, 1 << 15, marks=pytest.mark.full),
        pytest.param(2, 1 << 15, marks=pytest.mark.full),
        (3, 8),
    ],
)
def test_random_messages_on_a_small_pool_replay(
    seed: int, least_swept: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the recorder forgets what no request can find as soon as it may."""
    monkeypatch.setattr(BlockNumbers, "LEAST_SWEPT", least_swept)
    rng = random.Random(seed)
    engine = Recorded(tmp_path / "log", overlap_depth=depth)
    for index in range(120):
        messages: list[ToEngine] = []
        if rng.random() < 0.5:
            prompt = [rng.randrange(3)] * rng.choice([0, 4, 9, 16]) + [rng.randrange(6, 50)] * rng.randrange(1, 24)
            params = SamplingParams(max_tokens=rng.choice([0, 1, 5, 17]), prompt_logprobs=rng.choice([None, None, 0]))
            tier, slo_s = rng.choice(list(Tier)[:3]), rng.choice([0.01, 0.2])
            messages.append(AddRequest(f"r{index}", prompt, params, tier, engine.clock.now(), slo_s, 0.02))
        if index % 40 == 0:
            messages.append(batch(tmp_path, f"job{index}", [[rng.randrange(6, 9)] * rng.randrange(0, 40)] * 9))
        if rng.random() < 0.1:
            messages.append(AbortRequest([f"r{rng.randrange(index + 1)}"]))
        engine.step(*messages)
    engine.run()
    engine.recorder.close()
    result = replay(tmp_path / "log")
    assert result.difference is None
    assert result.steps > 100
    assert engine.recorder.num_open == 0


def test_steps_that_the_cost_model_saw_before_are_shown_to_it_again(tmp_path: Path) -> None:
    """Without them the replayed model believes something else, and decides something else."""
    engine = Recorded(tmp_path / "log")
    for tokens in range(1, 40):
        shape = BatchShape()
        shape.add(tokens, 0)
        engine.cost_model.observe(shape, 0.01 * tokens)
        engine.recorder.warmed_up(shape, 0.01 * tokens)
    engine.step(online("a", [7] * 9, max_tokens=30, tpot_slo_s=0.02), batch(tmp_path, "job", [[9] * 30, [8] * 30]))
    engine.run()
    engine.recorder.close()
    assert replay(tmp_path / "log").difference is None
    forgetful = [line for line in (tmp_path / "log").read_text().splitlines(True) if '"is":"observe"' not in line]
    (tmp_path / "forgetful").write_text("".join(forgetful))
    assert replay(tmp_path / "forgetful").difference is not None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("least_swept", [1 << 15, 8])
def test_a_cache_with_host_memory_replays(
    least_swept: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockNumbers, "LEAST_SWEPT", least_swept)
    scenario = mixed(num_online=12, step_noise=0.1, cost_model=None, overlap_depth=depth, host_cache_bytes=4 * 16)
    run = simulate(scenario, step_log=tmp_path / "log")
    assert run.result.preemptions.swapped_blocks > 100
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)
