"""Blocks in host memory: which are kept, which make way, and what a request finds of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.config import CacheConfig
from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv.host_tier import HostTier
from neaptide.engine.kv.prefix_index import block_hash, root_hash
from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import FinishReason
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.device import FakeDevice, on_device, text_of
from tests.engine.harness import Harness, batch, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.scheduler.test_drafts import watched

A, B, C = b"a", b"b", b"c"


class SwapPrices(ConstantCostModel):
    """Every step takes 10 ms, and so much more for every block that is swapped and every prompt token."""

    def __init__(self, swap_s: float, token_s: float = 1e-4) -> None:
        super().__init__(0.01)
        self._swap_s = swap_s
        self._token_s = token_s

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.01 + self._swap_s * shape.swapped_blocks + self._token_s * shape.prefill_tokens, 0.0)


def with_host(num_host_blocks: int, swap_s: float = 1e-5, **fields: object) -> tuple[Harness, FakeDevice]:
    cache = CacheConfig(block_size=4, num_host_blocks=num_host_blocks)
    return on_device(cache=cache, cost_model=SwapPrices(swap_s), **fields)


# ---- the tier alone ----


def test_a_block_keeps_its_slot_and_the_least_recently_used_makes_way() -> None:
    tier = HostTier(2)
    assert (tier.take_in(A), tier.take_in(B)) == (0, 1)
    assert tier.take_in(A) is None  # it is here
    assert tier.take_in(C) == 1
    assert [block in tier for block in (A, B, C)] == [True, False, True]


def test_reading_a_block_makes_it_the_most_recently_used() -> None:
    tier = HostTier(2)
    tier.take_in(A)
    tier.take_in(B)
    assert tier.read(A) == 0
    assert tier.take_in(C) == 1
    assert B not in tier


def test_a_pinned_block_makes_way_for_none() -> None:
    tier = HostTier(1)
    tier.take_in(A)
    tier.pin([A])
    assert tier.take_in(B) is None
    tier.unpin([0])
    assert tier.take_in(B) == 0


def test_the_slot_of_a_pinned_block_that_is_discarded_is_free_when_no_step_reads_it() -> None:
    tier = HostTier(1)
    tier.take_in(A)
    tier.pin([A])
    tier.pin([A])
    tier.discard(A)
    tier.unpin([0])
    assert tier.take_in(B) is None
    tier.unpin([0])
    assert tier.take_in(B) == 0


def test_a_run_ends_at_the_first_block_that_is_not_here() -> None:
    tier = HostTier(4)
    tier.take_in(A)
    tier.take_in(C)
    assert [tier.longest_run(hashes) for hashes in ([A, B, C], [A, C], [B], [])] == [1, 2, 0, 0]


def test_slots_of_copies_that_failed_are_free_again() -> None:
    tier = HostTier(2)
    tier.take_in(A)
    tier.take_in(B)
    tier.discard_slots([1])
    assert (A in tier, B in tier) == (True, False)
    assert tier.take_in(C) == 1


@given(st.lists(st.tuples(st.sampled_from(["take", "read", "discard", "pin", "unpin"]), st.integers(0, 9))))
def test_a_slot_never_holds_another_block_than_was_copied_there(events: list[tuple[str, int]]) -> None:
    tier, contents = HostTier(4), dict[int, bytes]()
    pinned: list[int] = []
    for event, number in events:
        block = bytes([number])
        if event == "take":
            if (slot := tier.take_in(block)) is not None:
                assert slot not in pinned
                contents[slot] = block
        elif event == "read" and block in tier:
            assert contents[tier.read(block)] == block
        elif event == "discard":
            tier.discard(block)
        elif event == "pin" and block in tier:
            tier.pin([block])
            pinned.append(tier.read(block))
        elif event == "unpin" and pinned:
            tier.unpin([pinned.pop(0)])
        tier.check_integrity()


# ---- conversations ----


def test_conversations_that_never_go_on_are_not_copied_for_long(tmp_path: Path) -> None:
    harness, device = with_host(200, swap_s=1e-4, num_blocks=6, max_num_seqs=1, overlap_depth=0)
    saved = []
    for number in range(40):
        harness.core.handle(online(f"c{number}", list(range(100 * number, 100 * number + 21)), max_tokens=2))
        harness.run()
        saved.append(device.num_saved)
    # A copy costs a quarter of computing: worth it while more than a third of the blocks come back.
    assert saved[-1] == saved[-10] == pytest.approx(128, abs=6)


# ---- under the engine ----


def pushed_out(directory: Path, **fields: object) -> tuple[Harness, FakeDevice]:
    """A row of 5 blocks is pushed out by a chat that needs all 6 blocks, and comes back after it."""
    harness, device = with_host(8, num_blocks=6, max_num_seqs=2, overlap_depth=0, **fields)
    harness.core.handle(batch(directory, "job", [list(range(10, 26))], max_tokens=6))
    for _ in range(3):
        harness.step()
    harness.core.handle(online("chat", list(range(100, 121)), max_tokens=3))
    return harness, device


def test_a_preempted_row_finds_its_blocks_in_host_memory(tmp_path: Path) -> None:
    harness, device = pushed_out(tmp_path)
    steps = harness.run()
    # 16 tokens of prompt and 2 of output were computed: 4 full blocks are saved and loaded, the rest is computed again.
    # Then the chat's five blocks are saved: it may go on.
    assert (device.num_saved, device.num_loaded) == (4 + 5, 4)
    assert [step["job:0"] for step in steps if step.get("job:0", 0) > 1] == [3]
    assert harness.tokens["job:0"] == text_of(list(range(10, 26)), 6)
    assert device.wrong_reads == []


@pytest.mark.parametrize("swap_s", [1e-3, 2.4e-4])
def test_blocks_that_cost_more_to_copy_there_and_back_than_to_compute_are_not_copied(
    swap_s: float, tmp_path: Path
) -> None:
    harness, device = pushed_out(tmp_path, swap_s=swap_s)
    harness.run()
    assert (device.num_saved, device.num_loaded) == (0, 0)
    assert harness.tokens["job:0"] == text_of(list(range(10, 26)), 6)


def test_blocks_that_no_request_is_known_to_want_are_not_copied(tmp_path: Path) -> None:
    harness, device = with_host(8, num_blocks=6, max_num_seqs=2, overlap_depth=0)
    harness.core.handle(batch(tmp_path, "job", [list(range(10, 26))], max_tokens=2))
    harness.run()
    harness.core.handle(online("chat", list(range(100, 121)), max_tokens=2))
    harness.run()
    assert device.num_saved == 0


def test_a_conversation_that_goes_on_finds_its_blocks_in_host_memory(tmp_path: Path) -> None:
    harness, device = with_host(8, num_blocks=6, max_num_seqs=2, overlap_depth=0)
    first = list(range(10, 18))
    harness.core.handle(online("a", first, max_tokens=5))
    harness.run()
    harness.core.handle(online("b", list(range(100, 121)), max_tokens=2))
    harness.run()
    harness.core.handle(online("c", [*first, *harness.tokens["a"], 7], max_tokens=2))
    harness.run()
    (end,) = harness.ends["c"]
    assert end.num_cached_tokens == 12
    assert device.num_loaded == 3
    assert device.wrong_reads == []


def test_a_step_is_charged_for_the_blocks_that_it_swaps(tmp_path: Path) -> None:
    harness, _ = pushed_out(tmp_path)
    swapped = []
    while harness.core.has_work:
        harness.step()
        if harness.watch.last is not None:
            plan = harness.watch.last.plan
            assert plan.shape.swapped_blocks == len(plan.saves) + len(plan.loads)
            swapped.append(plan.shape.swapped_blocks)
    assert sum(swapped) == 9 + 4


def test_a_draft_counts_the_blocks_that_it_will_swap(tmp_path: Path) -> None:
    harness, _ = pushed_out(tmp_path)
    expected, done = [], []

    def on_draft(draft: Draft) -> None:
        expected.append(draft.budget.shape.swapped_blocks)

    def on_step(draft: Draft, step: Step | None) -> None:
        done.append(step.plan.shape.swapped_blocks if step is not None else 0)

    watched(harness, on_draft, on_step)
    harness.run()
    assert expected == done
    assert sum(done) == 9 + 4


def test_a_chunk_leaves_room_for_the_blocks_that_come_with_it() -> None:
    budget = StepBudget(SwapPrices(swap_s=1e-3, token_s=1e-4), 2048)
    limit_s = 0.01 + 0.0101
    assert (budget.largest_chunk(500, 64, limit_s), budget.largest_chunk(500, 64, limit_s, 4)) == (101, 61)


def test_a_part_of_a_step_loads_again_and_does_not_save() -> None:
    plan = StepPlan.of_parts(1, [])
    plan.saves, plan.loads = [(1, 2)], [(3, 4)]
    part = plan.part(plan.rows)
    assert (part.saves, part.loads) == ([], [(3, 4)])


@pytest.mark.parametrize("policy", ["neaptide"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [3, 64])
def test_random_histories_read_nothing_but_their_own_text(
    policy: str, depth: int, num_host_blocks: int, tmp_path: Path
) -> None:
    harness, device = with_host(num_host_blocks, policy=policy, **SMALL_POOL | {"overlap_depth": depth})
    history = History(2, tmp_path)
    history.play(harness, 120)
    assert device.wrong_reads == device.wrong_inputs == []
    assert device.num_loaded > 10
    for request_id, tokens in harness.tokens.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))


@pytest.mark.parametrize(
    ("seed", "depth", "is_deaf"), [(25, 0, True), (0, 1, False), (4, 1, True), (11, 1, True), (22, 1, True)]
)
def test_steps_that_raise_leave_no_wrong_copies(seed: int, depth: int, is_deaf: bool, tmp_path: Path) -> None:
    """Every other request raises at some time. Steps that are taken apart may read what they should not, and that is
    dropped: what clients see is right."""
    harness, device = with_host(16, **SMALL_POOL | {"overlap_depth": depth})
    history = History(seed, tmp_path)
    device.is_deaf = is_deaf
    for number in range(0, 120, 2):
        device.raises[f"r{number}"] = 1 + number % 20
    history.play(harness, 120)
    assert device.num_loaded > 5
    for request_id, tokens in harness.tokens.items():
        assert tokens == text_of(history.prompts[request_id], len(tokens))


def test_what_a_request_with_bad_numbers_left_is_not_kept_in_host_memory(tmp_path: Path) -> None:
    harness, device = with_host(8, num_blocks=6, max_num_seqs=2, overlap_depth=0)
    prompt = list(range(10, 18))
    device.not_a_number["bad"] = 9
    harness.core.handle(online("bad", prompt, max_tokens=5))
    harness.run()
    first = block_hash(root_hash(b""), prompt[:4])
    assert harness.ends["bad"][0].finish_reason is FinishReason.ERROR
    assert not harness.core.kv.is_indexed(first)
    harness.core.handle(online("b", list(range(100, 121)), max_tokens=2))
    harness.run()
    assert device.num_saved == 0


def test_an_aborted_request_frees_the_tier_of_nothing_that_others_want(tmp_path: Path) -> None:
    harness, device = pushed_out(tmp_path)
    harness.step()
    harness.core.handle(AbortRequest(["chat"]))
    harness.run()
    assert harness.tokens["job:0"] == text_of(list(range(10, 26)), 6)
    assert device.wrong_reads == []
