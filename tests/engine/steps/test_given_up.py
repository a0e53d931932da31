"""Steps without online work that are given up when some comes: nothing of them counts, and nothing is lost."""

import random
from pathlib import Path

import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, flex, online
from tests.engine.histories import SMALL_POOL, History

ALONE: dict[str, object] = {"abortable_steps": True, "overlap_depth": 0, "ttft_slo_s": 0.006, "tpot_slo_s": 0.001}
"""Nobody who comes can wait for a step of 10 ms."""


class GivenUp:
    """Of a step that took its time."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class Interrupted:
    """Implements ``Executor``: a device on which somebody comes while every other step runs, or those that are named.
    A step that is given up has been told to the device and has written nothing."""

    def __init__(self, device: FakeDevice, steps: set[int] | None = None, seed: int = 0) -> None:
        self._device, self._steps, self._random = device, steps, random.Random(seed)
        self.num_aborted = self.num_copying = 0
        self.shares: dict[int, float] = {}
        """By step, what may be given up of it."""

    @property
    def num_blocks(self) -> int:
        return self._device.num_blocks

    def submit(self, plan: StepPlan) -> object:
        self.shares[plan.step] = plan.abortable_share
        if (plan.saves or plan.loads) and not plan.table.online[plan.rows].any():
            assert not plan.abortable_share
            self.num_copying += 1
        somebody_comes = self._random.random() < 0.5 if self._steps is None else plan.step in self._steps
        if not plan.abortable_share or not somebody_comes:
            return self._device.submit(plan)
        told = StepPlan.of_parts(plan.step, [], plan.new_requests, plan.finished_ids)
        told.zero_blocks = plan.zero_blocks
        self._device.submit(told)
        self.num_aborted += 1
        result = StepResult.of(plan)
        result.is_aborted = True
        return GivenUp(result)

    def close(self) -> None:
        self._device.close()


def interrupted(steps: set[int] | None = None, seed: int = 0, **fields: object) -> tuple[Harness, Interrupted]:
    harness, device = on_device(**(ALONE | fields))
    executor = Interrupted(device, steps, seed)
    harness.core._executor._executor = executor  # type: ignore[assignment]
    return harness, executor


def test_its_rows_compute_the_same_again_and_what_it_took_is_told() -> None:
    harness, executor = interrupted({1})
    harness.core.handle(flex("row", [7] * 9, max_tokens=3))
    told = [harness.core.step()]
    harness.core.handle(online("chat", [8] * 5, max_tokens=1))
    while harness.core.has_work:
        told.append(harness.core.step())
        harness.core.check_integrity()
    stats = [step.stats[0] for step in told]
    assert [each.is_aborted for each in stats] == [True, False, False, False, False]
    assert [each.admitted_prompt_tokens for each in stats] == [0, 5, 9, 0, 0]
    assert [each.offline_prefill_tokens for each in stats] == [0, 0, 9, 0, 0]
    tokens = {
        name: [t for step in told for o in step.outputs if o.request_id == name for t in o.new_token_ids]
        for name in ("row", "chat")
    }
    assert tokens == {"row": text_of([7] * 9, 3), "chat": text_of([8] * 5, 1)}
    assert executor.num_aborted == 1
    assert harness.core.kv.occupancy().offline == 0


def test_two_in_a_row_are_not_given_up() -> None:
    harness, executor = interrupted({1, 2, 3, 4})
    harness.core.handle(flex("row", [7] * 9, max_tokens=4))
    harness.run()
    assert harness.tokens["row"] == text_of([7] * 9, 4)
    assert executor.num_aborted == 2
    assert [bool(executor.shares[step]) for step in (1, 2, 3, 4)] == [True, False, True, False]


@pytest.mark.parametrize("chats", [("a",), ("a", "b", "c")])
def test_nothing_is_given_up_beside_a_chat_or_a_piece_of_its_prompt_or_while_one_waits(chats: tuple[str, ...]) -> None:
    harness, executor = interrupted(set(), max_num_seqs=2, max_num_batched_tokens=8)
    harness.core.handle(flex("row", [7] * 9, max_tokens=20))
    for name in chats:
        harness.core.handle(online(name, [8] * 20, max_tokens=3))
    steps = harness.run()
    last = max(number for number, tokens in enumerate(steps, 1) if tokens.keys() & set(chats))
    assert not any(executor.shares[step] for step in range(1, last + 1))
    assert all(executor.shares[step] for step in range(last + 1, len(steps) + 1))


@pytest.mark.parametrize("fields", [{"abortable_steps": False}, {"policy": "priority"}, {"left_out": ("give-up",)}])
def test_by_default_and_under_other_policies_no_step_is_given_up(fields: dict[str, object]) -> None:
    harness, executor = interrupted(set(), **fields)
    harness.core.handle(flex("row", [7] * 9, max_tokens=3))
    harness.run()
    assert set(executor.shares.values()) == {0.0}


@pytest.mark.parametrize(
    ("ttft_slo_s", "share"),
    [(0.005, 1.0), (0.011, 0.7), (0.025, 0.0)],  # 0, 3 and 10 ms: half of it, less 5 ms on the way to the client
)
def test_who_can_wait_for_what_is_left_does(ttft_slo_s: float, share: float) -> None:
    harness, executor = interrupted(set(), ttft_slo_s=ttft_slo_s)
    harness.core.handle(flex("row", [7] * 9, max_tokens=1))
    harness.run()
    assert executor.shares[1] == pytest.approx(share)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_every_text_is_right_whatever_is_given_up(seed: int, tmp_path: Path) -> None:
    """With shared prefixes, preemptions, aborts and cancels, on a cache that is too small."""
    fields = SMALL_POOL | {"cost_model": OnlineCostModel(RooflineModel.generic())}
    harness, executor = interrupted(None, seed, **fields)
    history = History(seed, tmp_path)
    history.play(harness, 300)
    assert executor.num_aborted > 10
    device = executor._device
    assert (device.wrong_inputs, device.wrong_reads) == ([], [])
    for request_id, tokens in harness.tokens.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))
    assert all(len(ends) == 1 for ends in harness.ends.values())
    occupancy = harness.core.kv.occupancy()
    assert occupancy.online + occupancy.offline == 0


def test_steps_that_copy_blocks_are_not_given_up(tmp_path: Path) -> None:
    cache = CacheConfig(block_size=4, num_host_blocks=16)
    harness, executor = interrupted(None, **(SMALL_POOL | {"cost_model": ConstantCostModel(0.01), "cache": cache}))
    History(1, tmp_path).play(harness, 300)
    assert executor.num_copying > 0
    assert executor.num_aborted > 0
    assert (executor._device.wrong_inputs, executor._device.wrong_reads) == ([], [])
