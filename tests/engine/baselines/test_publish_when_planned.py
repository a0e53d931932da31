"""Policies that share a prefix inside one step, as vLLM v1 does: which computes what, and what happens to readers of
blocks that then are not computed. Blocks have 4 tokens."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from neaptide.engine.interfaces import StepHandle
from neaptide.engine.kv.draft import KVDraft
from neaptide.engine.kv.manager import KVOccupancy
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, Tier
from neaptide.engine.scheduler.policies import POLICIES, find_policy
from neaptide.engine.steps.plan import ScheduledRequest, StepPlan
from neaptide.executors.simulated.hash_executor import SimExecutor, SimHandle, simulated_token
from neaptide.simulation.replay import replay
from tests.engine.harness import Harness, online
from tests.engine.policies import PUBLISHES_LATE
from tests.simulation.test_replay import Recorded

BLOCK_SIZE = 4
SHARING = sorted(name for name, policy in POLICIES.items() if policy.publishes_when_planned)
WRONG_TOKEN = 1
"""Made from KV that is not the request's own text; the simulated executor makes none below 6."""
NAN = -1


class WitnessExecutor:
    """The simulated executor with a KV cache that knows of every slot which text it stands for.

    raises: due parts of these requests raise: by id, the tokens from which on.
    not_a_number: requests that write NaN, and report it.
    """

    def __init__(self, inner: SimExecutor) -> None:
        self._inner = inner
        self._texts: dict[str, list[int]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self.raises: dict[str, int] = {}
        self.not_a_number: set[str] = set()
        self.num_wrong = 0
        """Parts that were computed on KV of something else."""

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def submit(self, plan: StepPlan) -> StepHandle:
        for new in plan.new_requests:
            self._texts[new.request_id] = list(new.prompt_token_ids)
        handle = self._inner.submit(plan)
        for part in plan.scheduled:
            least = self.raises.get(part.request_id)
            if least is not None and part.num_computed_tokens + len(part.token_ids) >= least:
                raise RuntimeError("poisoned")
        for part in plan.scheduled:
            self._write(part)
        for index, part in enumerate(plan.scheduled):
            self._read(index, part, handle)
        return handle

    def close(self) -> None:
        self._inner.close()

    def _chain(self, part: ScheduledRequest) -> list[int]:
        """What the slots of the request must hold after this step."""
        text, start = self._texts[part.request_id], part.num_computed_tokens
        text[start : start + len(part.token_ids)] = part.token_ids
        crc, chain = 0, []
        for token in text[: start + len(part.token_ids)]:
            crc = crc32(token.to_bytes(4, "little"), crc)
            chain.append(crc)
        return chain

    def _write(self, part: ScheduledRequest) -> None:
        chain = self._chain(part)
        for position in range(part.num_computed_tokens, len(chain)):
            value = NAN if part.request_id in self.not_a_number else chain[position]
            self._slots[part.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = value

    def _read(self, index: int, part: ScheduledRequest, handle: SimHandle) -> None:
        chain = self._chain(part)
        found = [self._slots.get((part.block_ids[p // BLOCK_SIZE], p % BLOCK_SIZE)) for p in range(len(chain))]
        if NAN in found:
            handle.result.errors[part.request_id] = NUMERICAL_ERROR
        elif found != chain:
            self.num_wrong += 1
            handle.result.token_ids[index] = WRONG_TOKEN


def witnessed(policy: str, **fields: Any) -> tuple[Harness, WitnessExecutor]:
    harness = Harness(policy=policy, **fields)
    executor = WitnessExecutor(harness.executor)
    harness.core._executor._executor = executor
    return harness, executor


def assert_text(harness: Harness, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
    """It ended without error, and with the text that it has alone."""
    (end,) = harness.ends[request_id]
    assert end.error is None
    crc = crc32(array("i", prompt).tobytes())
    assert harness.tokens[request_id] == [simulated_token(crc, i, 1000, 6) for i in range(max_tokens)]


def test_the_policies_of_vllm_v1_and_ours_share_inside_a_step() -> None:
    assert SHARING == ["fcfs", "neaptide", "priority"]


CHAIN = {"a": [7] * 8, "b": [7] * 8 + [9] * 4, "c": [7] * 8 + [9] * 4 + [5]}
"""Each is a prefix of the next, in whole blocks."""


@pytest.mark.parametrize("policy", SHARING)
def test_later_requests_of_a_step_read_what_earlier_ones_compute(policy: str) -> None:
    harness, executor = witnessed(policy)
    for index, (name, prompt) in enumerate(CHAIN.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    assert harness.step() == {"a": 8, "b": 4, "c": 1}
    harness.run()
    assert [harness.ends[name][0].num_cached_tokens for name in CHAIN] == [0, 8, 12]
    for name, prompt in CHAIN.items():
        assert_text(harness, name, prompt)
    assert executor.num_wrong == 0


@pytest.mark.parametrize("policy", [PUBLISHES_LATE])
def test_other_policies_share_what_earlier_steps_computed(policy: str) -> None:
    harness, _ = witnessed(policy)
    for index, (name, prompt) in enumerate(CHAIN.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    assert harness.step() == {"a": 8, "b": 12, "c": 13}


def test_fcfs_shares_the_chunk_that_the_step_computes() -> None:
    harness, _ = witnessed("fcfs", max_num_batched_tokens=10)
    harness.core.handle(online("a", [7] * 14, max_tokens=2))
    harness.core.handle(online("b", [7] * 14 + [9] * 4, max_tokens=1, arrival_s=0.001))
    assert harness.run() == [
        {"a": 10},
        {"a": 4, "b": 6},  # the first 12 tokens of b: two blocks of the step before, and the one that a fills now
        {"a": 1},
    ]


def test_sequences_of_a_step_share_generated_blocks() -> None:
    harness, _ = witnessed("fcfs")
    harness.core.handle(online("a", [7] * 6, max_tokens=4))
    harness.step()
    harness.step()
    conversation = [7] * 6 + harness.tokens["a"]
    assert len(conversation) == 8
    harness.core.handle(online("b", [*conversation, 9], max_tokens=1, arrival_s=0.001))
    assert harness.step() == {"a": 1, "b": 1}  # token 8 of a fills its second block in this very step


@pytest.mark.parametrize("method", ["grow", "publish"])
def test_nothing_is_shared_of_a_step_whose_planning_failed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, executor = witnessed("fcfs")
    original: Callable[..., Any] = getattr(KVDraft, method)

    def poisoned(kv: KVDraft, request: Any, *rest: Any) -> Any:
        if request.request_id == "poison":
            raise RuntimeError("poisoned")
        return original(kv, request, *rest)

    monkeypatch.setattr(KVDraft, method, poisoned)
    prompts = CHAIN | {"poison": [7] * 8 + [3] * 9}
    for index, (name, prompt) in enumerate(prompts.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    assert harness.step() == {}
    assert harness.ends["poison"][0].error == INTERNAL_ERROR
    # Not even those that came before the culprit have started: the next step is planned from what was.
    assert [request.request_id for request in harness.core.scheduler.queues.waiting_online] == list(CHAIN)
    assert harness.core.kv.occupancy() == KVOccupancy(free=64, cached=0, online=0, offline=0)
    assert len(harness.core.kv._pool.index) == 0
    assert harness.step() == {"a": 8, "b": 4, "c": 1}
    harness.run()
    assert [harness.ends[name][0].num_cached_tokens for name in CHAIN] == [0, 8, 12]
    for name, prompt in CHAIN.items():
        assert_text(harness, name, prompt)
    assert executor.num_wrong == 0


@pytest.mark.parametrize("policy", SHARING)
def test_readers_of_a_request_that_raises_in_their_step_are_computed_again(policy: str) -> None:
    harness, executor = witnessed(policy)
    prompts = CHAIN | {"other": [6] * 9, "again": [6] * 9}
    executor.raises["a"] = 0
    for index, (name, prompt) in enumerate(prompts.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    assert harness.step() == {"a": 8, "b": 4, "c": 1, "other": 9, "again": 1}
    assert executor.num_wrong == 2  # b and c
    assert harness.ends["a"][0].error == INTERNAL_ERROR
    # b and c keep none of a's blocks, and c none of b's; "again" has read what "other" did compute.
    assert harness.step() == {"b": 12, "c": 13, "other": 1, "again": 1}
    harness.run()
    assert executor.num_wrong == 2
    for name in ("b", "c", "other", "again"):
        assert_text(harness, name, prompts[name])
    assert [harness.ends[name][0].num_cached_tokens for name in ("b", "c", "again")] == [0, 0, 8]


def test_readers_keep_the_part_of_their_hit_that_was_computed_before() -> None:
    harness, executor = witnessed("fcfs")
    harness.core.handle(online("warm", [7] * 4, max_tokens=1))
    harness.run()
    executor.raises["a"] = 0
    harness.core.handle(online("a", [7] * 12, arrival_s=0.1))
    harness.core.handle(online("b", [7] * 12 + [9], arrival_s=0.2))
    assert harness.step() == {"a": 8, "b": 1}
    assert harness.step() == {"b": 9}
    harness.run()
    assert_text(harness, "b", [7] * 12 + [9])
    assert harness.ends["b"][0].num_cached_tokens == 4


def test_a_step_with_readers_of_a_failed_request_replays(tmp_path: Path) -> None:
    engine = Recorded(tmp_path / "log", policy="fcfs")
    executor = WitnessExecutor(engine.executor)
    engine.core._executor._executor = executor
    executor.raises["a"] = 0
    engine.step(*(online(name, prompt, arrival_s=0.001 * i) for i, (name, prompt) in enumerate(CHAIN.items())))
    engine.run()
    engine.recorder.close()
    assert executor.num_wrong == 2
    assert replay(tmp_path / "log").difference is None


def test_nan_of_one_request_does_not_reach_the_readers_of_its_step() -> None:
    harness, executor = witnessed("fcfs")
    executor.not_a_number.add("a")
    for index, (name, prompt) in enumerate(CHAIN.items()):
        harness.core.handle(online(name, prompt, arrival_s=0.001 * index))
    harness.run()
    assert harness.ends["a"][0].error == NUMERICAL_ERROR
    for name in ("b", "c"):
        assert_text(harness, name, CHAIN[name])


@pytest.mark.parametrize("policy", [*SHARING, PUBLISHES_LATE])
def test_faults_at_random_spoil_nobody_elses_text(policy: str) -> None:
    """Four neighbours share a prefix, the pool is small, a fifth of the requests raise at some token."""
    rng = random.Random(5)
    harness, executor = witnessed(policy, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=48)
    prompts: dict[str, list[int]] = {}
    for index in range(150):
        name = f"r{index}"
        prompts[name] = [100 + index // 4] * rng.choice([4, 9, 16]) + [rng.randrange(6, 50)] * rng.randrange(1, 12)
        if rng.random() < 0.2:
            executor.raises[name] = rng.randrange(len(prompts[name]) + 4)
        tier = Tier.FLEX if rng.random() < 0.5 else Tier.DEFAULT
        harness.core.handle(online(name, prompts[name], tier=tier, arrival_s=harness.clock.now(), ttft_slo_s=9.0))
        if rng.random() < 0.5:
            harness.step()
    harness.run()
    assert (executor.num_wrong > 0) == find_policy(policy).publishes_when_planned
    for name, prompt in prompts.items():
        if name in executor.raises:
            assert harness.ends[name][0].error == INTERNAL_ERROR
        else:
            assert_text(harness, name, prompt)
