"""The cache of prefixes that orders are checked with."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.simulation.pools.prefix_cache import Eviction, cached_tokens, sharing, windowed_density
from tests.engine.offline.planning.files import Prompt, shared
from tests.engine.offline.planning.pools import OUTPUTS, PROMPTS, grouped, made


def found(prompts: list[Prompt], order: list[int], capacity: int, eviction: Eviction) -> list[int]:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, [1] * len(prompts))
    rows = np.array(order, np.int64)
    return cached_tokens(pool.tree, pool.work.prompt_tokens, rows, capacity, eviction, 16).tolist()


@pytest.mark.parametrize("eviction", Eviction)
@given(prompts=PROMPTS, data=st.data())
@settings(max_examples=30)
def test_a_cache_without_limit_finds_all_that_is_shared(
    eviction: Eviction, prompts: list[Prompt], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(prompts))))
    units = [
        max((shared(prompts[row], prompts[other]) // 16 * 16 for other in order[:place]), default=0)
        for place, row in enumerate(order)
    ]
    assert found(prompts, order, 100_000, eviction) == units


@given(PROMPTS, st.integers(1, 30), st.data())
@settings(max_examples=30)
def test_no_eviction_finds_more_than_belady(prompts: list[Prompt], capacity_units: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(prompts))))
    hits = {each: sum(found(prompts, order, 16 * capacity_units, each)) for each in Eviction}
    assert max(hits.values()) == hits[Eviction.PLANNED]


def test_evictions_by_hand() -> None:
    # Prefixes a, b, c of 32 tokens, two thirds of which fit: a b c a b a c. Three prompts want a, two b, two c.
    prompts = grouped((3, 32, 0), (2, 32, 0), (2, 32, 0))
    order = [0, 3, 5, 1, 4, 2, 6]
    assert found(prompts, order, 64, Eviction.LRU) == [0, 0, 0, 0, 0, 32, 0]
    assert found(prompts, order, 64, Eviction.REUSE) == [0, 0, 0, 32, 0, 32, 32]
    assert found(prompts, order, 64, Eviction.PLANNED) == [0, 0, 0, 32, 32, 32, 0]


def test_the_end_of_a_chain_goes_first_a_block_at_a_time() -> None:
    # 64 shared tokens and 16 of another prompt in 64 of cache: the last block makes way.
    prompts = grouped((2, 64, 0), (1, 0, 16))
    assert found(prompts, [0, 2, 1], 64, Eviction.LRU) == [0, 0, 48]


def test_what_a_prompt_has_for_itself_takes_room_too() -> None:
    prompts = grouped((2, 32, 0), (1, 0, 64))
    assert found(prompts, [0, 2, 1], 96, Eviction.LRU)[2] == 32
    assert found(prompts, [0, 2, 1], 64, Eviction.LRU)[2] == 0
    assert found(prompts, [0, 2, 1], 64, Eviction.PLANNED)[2] == 32


def test_sharing_and_density_of_nothing() -> None:
    none, nothing = np.zeros(0, np.int64), np.zeros(0)
    assert (sharing(none, none), windowed_density(nothing, nothing, 10)) == (0.0, [])


def test_windows_are_of_equal_work() -> None:
    compute_s, memory_s = np.array([3.0, 1.0, 1.0, 1.0]), np.array([1.0, 3.0, 1.0, 1.0])
    assert windowed_density(compute_s, memory_s, 3) == [3.0, 1 / 3, 1.0]


@given(PROMPTS, OUTPUTS)
def test_hits_are_whole_blocks_within_the_prompt(prompts: list[Prompt], outputs: list[int]) -> None:
    hits = found(prompts, list(range(len(prompts))), 16 * sum(outputs[:3]), Eviction.REUSE)
    assert all(hit % 16 == 0 and hit <= len(prompt) for hit, prompt in zip(hits, prompts, strict=True))
