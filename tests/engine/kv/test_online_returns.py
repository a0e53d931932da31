"""How often cached online blocks are hit again, and what their eviction costs."""

import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.online_returns import FIRST_BLOCKS, MEMORY_BLOCKS, OnlineReturns
from neaptide.engine.params import RequestClass
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, online

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
A, B, C = b"a", b"b", b"c"


class PromptPrices(ConstantCostModel):
    """Every step takes 10 ms and 1 ms per prompt token."""

    def __init__(self) -> None:
        super().__init__(0.01)

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.01 + 1e-3 * shape.prefill_tokens, 0.0)


def test_the_share_of_evicted_blocks_follows_what_is_seen() -> None:
    seen = OnlineReturns(1000)
    assert (seen.share, seen.evicted_share) == (1.0, 1.0)
    blocks = [number.to_bytes(4, "big") for number in range(192)]
    for block in blocks:
        seen.observe_evicted(block)
    assert seen.evicted_share == 64 / 256
    seen.observe_wanted(blocks[:32])
    assert seen.evicted_share == 96 / 256
    seen.observe_wanted(blocks[:32])  # they have come back already
    assert seen.evicted_share == 96 / 256


def test_a_stay_ends_with_a_hit_or_an_eviction() -> None:
    seen = OnlineReturns(1000)
    for number in range(128):
        seen.observe_evicted(number.to_bytes(4, "big"))
    seen.observe_hits(64)
    assert (seen.share, seen.evicted_share) == (128 / 256, 64 / 192)
    seen.observe_wanted([number.to_bytes(4, "big") for number in range(16)])  # they would have been hit
    assert (seen.share, seen.evicted_share) == (144 / 256, 80 / 192)


def test_what_stands_behind_a_block_that_is_not_remembered_does_not_return() -> None:
    seen = OnlineReturns(2)
    for block in (A, B, C):  # A is forgotten
        seen.observe_evicted(block)
    seen.observe_wanted([A, B, C])
    assert seen.share == 64 / 67
    seen.observe_wanted([B, C])
    assert seen.share == 66 / 67


def test_old_stays_count_less() -> None:
    seen = OnlineReturns(1)
    seen.observe_hits(MEMORY_BLOCKS)
    for number in range(MEMORY_BLOCKS // 4):
        seen.observe_evicted(number.to_bytes(4, "big"))
    first = (FIRST_BLOCKS + MEMORY_BLOCKS) / 2
    assert seen.share == first / (first + MEMORY_BLOCKS // 4)


def test_a_pool_counts_hits_of_online_requests_on_online_blocks_only() -> None:
    pool = BlockPool(4, by_reuse=True)
    by_online, by_offline = pool.allocate(2, ONLINE), pool.allocate(1, OFFLINE)
    pool.publish(zip([*by_online, *by_offline], (A, B, C), strict=True))
    pool.release(by_online, ONLINE)
    pool.release(by_offline, OFFLINE)
    pool.acquire(by_offline, ONLINE)  # an offline block
    pool.acquire(by_online[:1], ONLINE)  # counts
    pool.acquire(by_online[:1], ONLINE)  # it has a reader
    pool.acquire(by_online[1:], OFFLINE)  # by an offline request
    pool.allocate(1, OFFLINE)
    assert pool.online_returns.evicted_share == 1.0
    pool.release(by_online[:1], ONLINE)
    pool.release(by_online[:1], ONLINE)
    pool.allocate(1, OFFLINE)  # evicts what online requests read last
    assert pool.online_returns.share == (FIRST_BLOCKS + 1) / (FIRST_BLOCKS + 2)
    assert pool.online_returns.evicted_share == FIRST_BLOCKS / (FIRST_BLOCKS + 1)


def test_a_pool_that_evicts_by_age_counts_nothing() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1, ONLINE)
    pool.publish([(block[0], A)])
    pool.release(block, ONLINE)
    pool.allocate(1, OFFLINE)
    assert pool.online_returns.share == 1.0


def test_evictions_for_new_blocks_cost_what_conversations_will_compute_again() -> None:
    """12 blocks of 4 tokens, of which an ended chat fills 5; a block takes 4 ms in a full step."""
    harness = Harness(num_blocks=12, cost_model=PromptPrices(), max_num_batched_tokens=64)
    harness.core.handle(online("chat", list(range(20)), max_tokens=1))
    harness.run()
    scheduler = harness.core.scheduler
    scheduler.begin(1.0)
    draft = scheduler.draft(1.0)
    costs = [scheduler.online_return_s(draft, num_blocks) for num_blocks in (7, 8, 10, 12)]
    assert costs == pytest.approx([0.0, 0.004, 0.012, 0.020])
    first = scheduler.kv.indexed_hashes()[:1]
    kept = [block for block in range(12) if scheduler.kv._pool.hash_of(block) in first]
    assert scheduler.online_return_s(draft, 12, keep=kept) == pytest.approx(0.016)


def test_a_chat_that_goes_on_after_its_blocks_were_evicted_counts_as_returning() -> None:
    harness = Harness(num_blocks=12, cost_model=PromptPrices(), max_num_batched_tokens=64)
    for name, first in (("chat", 0), ("other", 100)):
        harness.core.handle(online(name, list(range(first, first + 40)), max_tokens=1))
        harness.run()
    assert harness.core.kv.online_return_share == FIRST_BLOCKS / (FIRST_BLOCKS + 8)
    harness.core.handle(online("again", list(range(32)), max_tokens=1))
    harness.run()
    # The tail of a chain is evicted first: two blocks were hit, and six of the eight evicted ones were wanted. The
    # request then evicted six blocks of the other chat.
    assert harness.core.kv.online_return_share == (FIRST_BLOCKS + 2 + 6) / (FIRST_BLOCKS + 8 + 2 + 6)
