"""Block pool, prefix index and manager: exact block ids and exact eviction order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.kv.block_pool import BlockPool
from neaptide.engine.kv.draft import PrefixHit
from neaptide.engine.kv.manager import KVCacheManager, KVOccupancy
from neaptide.engine.kv.prefix_index import block_hash, extend_block_hashes, root_hash
from neaptide.engine.kv.prefix_nodes import own_node
from neaptide.engine.messages import AbortRequest
from neaptide.engine.params import FinishReason, RequestClass, SamplingParams, Tier
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.table import RequestTable
from tests.engine.harness import Harness, online

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def make_request(request_id: str, prompt: list[int], salt: bytes = b"", tier: Tier = Tier.DEFAULT) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=8), tier, 0.0, 1.0, 0.1, salt)


def make_cache(num_blocks: int) -> KVCacheManager:
    """Blocks of 4 tokens, seats for four requests."""
    return KVCacheManager(num_blocks, RequestTable(num_slots=4, max_tokens=32, block_size=4))


def run_prompt(kv: KVCacheManager, request: Request) -> int:
    """Admits, computes the whole prompt, publishes; returns the cached tokens."""
    hit = kv.draft().match_prefix(request)
    request.assign_slot(kv.table, 1)
    kv.admit(request, hit)
    kv.grow(request, request.num_tokens - hit.num_tokens)
    kv.table.computed[request.slot] = request.num_tokens
    kv.publish(request, request.num_tokens)
    return hit.num_tokens


def test_blocks_are_given_out_from_the_lowest_id() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3, ONLINE) == [0, 1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 3)


def test_allocating_more_than_available_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1, ONLINE)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 available"):
        pool.allocate(2, ONLINE)
    assert pool.num_free == 1


def test_released_chain_is_evicted_tail_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3, OFFLINE)
    for block in blocks:
        pool.publish([(block, bytes([block]))])
    pool.release(blocks, OFFLINE)
    assert pool.num_cached == 3
    assert [pool.allocate(1, OFFLINE)[0] for _ in range(3)] == [2, 1, 0]


def test_least_recently_released_chain_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2, OFFLINE), pool.allocate(2, OFFLINE)
    for block in old + new:
        pool.publish([(block, bytes([block]))])
    pool.release(old, OFFLINE)
    pool.release(new, OFFLINE)
    pool.acquire(old, OFFLINE)
    pool.release(old, OFFLINE)
    assert pool.allocate(4, OFFLINE) == [3, 2, 1, 0]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached = pool.allocate(1, OFFLINE)
    pool.publish([(cached[0], b"h")])
    pool.release(cached, OFFLINE)
    assert pool.allocate(2, OFFLINE) == [1, 2]
    assert pool.index.get(b"h") == 0


def test_evicted_block_leaves_the_index() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1, OFFLINE)
    pool.publish([(block[0], b"h")])
    pool.release(block, OFFLINE)
    pool.allocate(1, ONLINE)
    assert pool.index.get(b"h") is None


def test_a_block_with_an_online_reader_counts_as_online() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2, OFFLINE)
    pool.acquire(blocks[:1], ONLINE)
    assert (pool.num_online, pool.num_offline) == (1, 1)
    pool.release(blocks[:1], ONLINE)
    assert (pool.num_online, pool.num_offline) == (0, 2)


def test_second_copy_of_a_prefix_is_not_indexed_and_is_freed_at_release() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1, ONLINE), pool.allocate(1, ONLINE)
    pool.publish([(first[0], b"h")])
    pool.publish([(second[0], b"h")])
    pool.release(second, ONLINE)
    assert pool.index.get(b"h") == 0
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_a_block_keeps_the_hash_that_it_was_published_with() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1, ONLINE)
    pool.publish([(block, b"first")])
    pool.publish([(block, b"second")])
    assert (pool.hash_of(block), pool.index.get(b"first"), pool.index.get(b"second")) == (b"first", block, None)


def test_block_hash_depends_on_salt_parent_and_tokens() -> None:
    hashes = {block_hash(root_hash(salt), tokens) for salt in (b"", b"a") for tokens in ([1, 2], [2, 1])}
    assert len(hashes) == 4
    assert block_hash(block_hash(root_hash(b""), [1, 2]), [1, 2]) not in hashes


@given(tokens=st.lists(st.integers(0, 9), max_size=40), block_size=st.integers(1, 8), cut=st.integers(0, 40))
def test_hashes_extended_in_pieces_equal_hashes_of_the_whole(tokens: list[int], block_size: int, cut: int) -> None:
    whole: list[bytes] = []
    extend_block_hashes(whole, tokens, block_size, b"s")
    pieces: list[bytes] = []
    extend_block_hashes(pieces, tokens[:cut], block_size, b"s")
    extend_block_hashes(pieces, tokens, block_size, b"s")
    assert pieces == whole
    assert len(whole) == len(tokens) // block_size


def test_second_request_reuses_whole_blocks_of_a_shared_prefix() -> None:
    kv = make_cache(8)
    first, second = make_request("a", [1] * 10 + [2]), make_request("b", [1] * 10 + [3])
    assert run_prompt(kv, first) == 0
    assert run_prompt(kv, second) == 8
    assert second.block_ids[:2] == first.block_ids[:2] == [0, 1]
    assert second.block_ids[2] != first.block_ids[2]
    kv.check_integrity([first, second])


def test_a_full_hit_still_leaves_one_token_to_compute() -> None:
    kv = make_cache(8)
    run_prompt(kv, make_request("a", [1] * 8))
    assert kv.draft().match_prefix(make_request("b", [1] * 8)).num_tokens == 4


def test_salts_do_not_share() -> None:
    kv = make_cache(8)
    run_prompt(kv, make_request("a", [1] * 9, salt=b"x"))
    assert kv.draft().match_prefix(make_request("b", [1] * 9, salt=b"y")).num_tokens == 0


def test_prompt_logprobs_take_no_hit() -> None:
    kv = make_cache(8)
    run_prompt(kv, make_request("a", [1] * 9))
    request = make_request("b", [1] * 9)
    request.params = SamplingParams(prompt_logprobs=1)
    assert kv.draft().match_prefix(request).num_tokens == 0


def test_cached_prefix_survives_its_request() -> None:
    kv = make_cache(8)
    first = make_request("a", [1] * 9)
    run_prompt(kv, first)
    kv.release(first)
    assert kv.occupancy() == KVOccupancy(free=6, cached=2, online=0, offline=0)
    assert run_prompt(kv, make_request("b", [1] * 9)) == 8


def test_admission_cost_counts_cached_blocks_that_it_takes_out_of_the_available_set() -> None:
    kv = make_cache(8)
    first = make_request("a", [1] * 9)
    run_prompt(kv, first)
    hit = kv.draft().match_prefix(make_request("b", [1] * 9))
    assert kv.draft().admission_cost(hit, 1) == 1  # both hit blocks are held by a: only the tail block is new
    kv.release(first)
    assert kv.draft().admission_cost(hit, 1) == 3


def test_integrity_check_finds_a_leaked_reference() -> None:
    kv = make_cache(4)
    run_prompt(kv, make_request("a", [1] * 5))
    with pytest.raises(AssertionError, match="ref counts differ"):
        kv.check_integrity([])


def test_a_prompts_block_is_found_as_soon_as_its_last_token_is_computed() -> None:
    harness = Harness(max_num_batched_tokens=4)
    prompt = [7] * 4 + [8] * 4
    harness.core.handle(online("a", prompt, max_tokens=9))
    first = block_hash(root_hash(b""), prompt[:4])
    second = block_hash(first, prompt[4:])
    harness.step()
    assert [harness.core.kv.is_indexed(block) for block in (first, second)] == [True, False]
    harness.step()
    assert harness.core.kv.is_indexed(second)


def output_block(harness: Harness) -> bytes:
    """Hash of the first block of request a: three tokens of its prompt and one of its output."""
    return block_hash(root_hash(b""), [7, 7, 7, harness.tokens["a"][0]])


def test_blocks_of_an_output_are_found_once_their_request_has_ended() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 3, max_tokens=3))
    harness.step()
    harness.step()
    assert not harness.core.kv.is_indexed(output_block(harness))
    harness.step()
    assert harness.ends["a"][0].finish_reason is FinishReason.LENGTH
    assert harness.core.kv.is_indexed(output_block(harness))


def test_what_an_aborted_request_has_computed_is_found() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 3, max_tokens=9))
    harness.step()
    harness.step()
    harness.core.handle(AbortRequest(["a"]))
    assert harness.core.kv.is_indexed(output_block(harness))


def test_what_a_step_in_flight_computes_for_an_aborted_request_is_not_found() -> None:
    harness = Harness(overlap_depth=1)
    harness.core.handle(online("a", [7] * 3, max_tokens=9))
    harness.step()
    harness.step()  # which fills the block, and is in flight
    harness.core.handle(AbortRequest(["a"]))
    assert not harness.core.kv.is_indexed(output_block(harness))


def test_blocks_of_an_ended_request_that_hold_something_else_by_now_are_not_disowned() -> None:
    kv = make_cache(num_blocks=2)
    old, new = make_request("old", [7] * 5), make_request("new", [8] * 5)
    run_prompt(kv, old)
    left = [(old.block_ids[0], old.block_hashes[0])]
    kv.release(old)
    old.free_slot(RequestStatus.FINISHED)
    run_prompt(kv, new)  # takes both blocks, the cached one as well
    assert left[0][0] in new.block_ids
    assert kv.disown([(new.block_ids[0], old.block_hashes[0])]) == []
    assert kv.is_indexed(new.block_hashes[0])


def test_blocks_that_are_published_as_their_request_makes_way_go_in_the_same_order_in_a_draft() -> None:
    kv = KVCacheManager(8, RequestTable(num_slots=4, max_tokens=32, block_size=4), evicts_by_reuse=True)
    other, row = make_request("other", [9] * 4), make_request("row", [7] * 4, tier=Tier.BATCH)
    row.prefix_nodes = (own_node(),)
    for request in (row, other):
        request.assign_slot(kv.table, 1)
        kv.admit(request, PrefixHit([], 0))
        kv.grow(request, 4)
        kv.table.computed[request.slot] = kv.table.committed[request.slot] = 4
    draft = kv.draft()
    draft.release(row)
    draft.release(other)
    expected = list(draft.pool.next_evicted(8))
    for request in (row, other):
        kv.publish_committed(request)
        kv.release(request)
    assert list(kv.draft().pool.next_evicted(8)) == expected
    # Its own segment is still wanted: the row's block goes last, though it was released first.
    assert expected == [1, 0]
