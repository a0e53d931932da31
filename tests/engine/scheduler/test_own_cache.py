"""A policy with a KV cache of its own: when it is made, and what it is asked for."""

import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.extensions import ExtensionError
from neaptide.engine.kv.draft import KVDraft
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.engine.scheduler.baselines.vllm_v1 import VllmV1Fcfs
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.table import RequestTable
from tests.engine.harness import Harness, online

NOTED: list[tuple[str, str]] = []
"""Class of what was told, and the text."""


class NotingDraft(KVDraft):
    def note(self, text: str) -> None:
        NOTED.append(("draft", text))


class NotingCache(KVCacheManager):
    def draft(self) -> KVDraft:
        return NotingDraft(self._pool, self.block_size, self.enable_prefix_cache)

    def note(self, text: str) -> None:
        NOTED.append(("cache", text))

    def take_slot_copies(self) -> SlotCopies:
        return SlotCopies(saves=[SlotRun(0, 0, 0, 3)], restores=[SlotRun(0, 1, 0, 2)])


def noting_cache(config: CacheConfig, num_blocks: int, table: RequestTable) -> KVCacheManager | None:
    return NotingCache(num_blocks, table) if config.slot_copies else None


class Noting(VllmV1Fcfs):
    own_cache = staticmethod(noting_cache)

    def pack(self, draft: Draft) -> float:
        for text in ("before", "behind"):
            draft.on_cache(lambda kv, text=text: kv.note(text))
        return super().pack(draft)


POLICY = f"{__name__}:Noting"


def test_a_policy_has_the_engines_cache_where_it_makes_none() -> None:
    assert type(Harness(policy=POLICY).core.kv) is KVCacheManager
    assert type(Harness(policy="fcfs", cache=CacheConfig(block_size=4, slot_copies=True)).core.kv) is KVCacheManager


def test_its_own_cache_is_told_in_order_first_as_a_draft_and_its_copies_are_in_the_plan() -> None:
    NOTED.clear()
    harness = Harness(policy=POLICY, cache=CacheConfig(block_size=4, slot_copies=True))
    assert type(harness.core.kv) is NotingCache
    harness.core.handle(online("a", [6, 7, 8]))
    assert harness.step() == {"a": 3}
    assert NOTED[:4] == [("draft", "before"), ("draft", "behind"), ("cache", "before"), ("cache", "behind")]
    assert harness.watch.last is not None
    plan = harness.watch.last.plan
    assert plan.slot_copies == SlotCopies(saves=[SlotRun(0, 0, 0, 3)], restores=[SlotRun(0, 1, 0, 2)])
    assert plan.shape.copied_aside_blocks == 2


def failing_cache(config: CacheConfig, num_blocks: int, table: RequestTable) -> KVCacheManager | None:
    raise KeyError("missing")


class Failing(VllmV1Fcfs):
    own_cache = staticmethod(failing_cache)


def test_one_that_cannot_be_made_says_where() -> None:
    with pytest.raises(ExtensionError, match=r"Failing' cannot be set up: KeyError: 'missing' \(.*test_own_cache.py"):
        Harness(policy=f"{__name__}:Failing")
