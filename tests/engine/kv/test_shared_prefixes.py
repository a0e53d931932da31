"""Prefixes that running requests share: what the scheduler counts is what the kernel's work list reads."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.config import CacheConfig, SharedReads
from neaptide.engine.kv.shared_prefixes import MAX_LEVELS, SharedPrefixes
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.steps.step import Step
from neaptide.engine.table import RequestTable
from neaptide.kernels.paged_attention import work_list
from neaptide.kernels.paged_attention.tables import StepTables
from tests.engine.harness import Harness, batch, online
from tests.engine.histories import SMALL_POOL, History

SIZE = 4
KERNEL = SharedReads(decodes_per_read=3, min_tokens=2 * SIZE)
SHARING = CacheConfig(block_size=SIZE, shared_reads=KERNEL)


def saved_by_kernel(plan: StepPlan, rows: np.ndarray, contexts: np.ndarray) -> int:
    """KV tokens of these decodes that the kernel's work list does not read."""
    if not len(rows):
        return 0
    tables = StepTables.of(plan.table.blocks.ids[rows].astype(np.int64))
    ones = np.ones(len(rows), np.int64)
    work = work_list.build_work_list(ones, contexts + 1, tables, SIZE, group=1, max_rows=KERNEL.decodes_per_read)
    return int((contexts + 1).sum() - (work.items[:, 4] - work.items[:, 3]).sum())


class Reads(EngineObserver):
    """Notes what every plan counts, and what the kernel saves in its decodes."""

    def __init__(self) -> None:
        self.counted: list[int] = []
        self.saved: list[int] = []
        self.are_all: list[bool] = []
        """Whether every running request decodes in the step, and none starts with it."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan = step.plan
        are_decodes = (plan.num_tokens == 1) & (plan.num_computed > 0)
        self.counted.append(plan.shape.shared_prefix_tokens)
        self.saved.append(saved_by_kernel(plan, plan.rows[are_decodes], plan.num_computed[are_decodes]))
        starts = any(isinstance(action, Admit) for action in draft.actions)
        self.are_all.append(int(are_decodes.sum()) == scheduler.queues.num_running and not starts)


def watched(**fields: object) -> tuple[Harness, Reads]:
    harness, reads = Harness(**{"cache": SHARING, "overlap_depth": 0} | fields), Reads()  # type: ignore[arg-type]
    harness.core.subscribe(reads)
    return harness, reads


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of these tests shares runs as short as the scheduler's."""
    monkeypatch.setattr(work_list, "MIN_SHARED_TOKENS", KERNEL.min_tokens)


@pytest.mark.parametrize(("policy", "depth"), [("neaptide", 0), ("neaptide", 1), ("fcfs", 0), ("priority", 1)])
def test_a_step_counts_the_reads_that_the_kernel_saves(policy: str, depth: int, tmp_path: Path) -> None:
    fields = SMALL_POOL | {"policy": policy, "overlap_depth": depth, "num_blocks": 64, "max_num_seqs": 12}
    harness, reads = watched(**fields)
    History(7, tmp_path).play(harness, 200)
    for counted, saved, are_all in zip(reads.counted, reads.saved, reads.are_all, strict=True):
        assert counted == saved if are_all else counted <= saved
    assert sum(count > 0 and are_all for count, are_all in zip(reads.counted, reads.are_all, strict=True)) > 10


def test_decodes_of_one_document_read_it_once_for_every_tile(tmp_path: Path) -> None:
    """Seven lines on 40 tokens, three decodes per read: the document is read three times in place of seven."""
    harness, reads = watched(num_blocks=64, max_num_seqs=8)
    document = list(range(100, 140))
    harness.core.handle(batch(tmp_path, "job", [[*document, number] for number in range(7)], max_tokens=12))
    harness.run()
    assert max(reads.counted) == 4 * 40


def test_without_such_a_kernel_every_decode_reads_its_own(tmp_path: Path) -> None:
    harness, reads = watched(num_blocks=64, max_num_seqs=8, cache=CacheConfig(block_size=SIZE))
    document = list(range(100, 140))
    harness.core.handle(batch(tmp_path, "job", [[*document, number] for number in range(7)], max_tokens=12))
    harness.run()
    assert max(reads.saved) == 4 * 40
    assert set(reads.counted) == {0}


def test_chats_with_one_system_prompt_share_its_reads() -> None:
    harness, reads = watched(num_blocks=64)
    system = list(range(100, 120))
    for number in range(3):
        harness.core.handle(online(f"chat{number}", [*system, number, number], max_tokens=8))
        harness.step()
    harness.run()
    assert max(reads.counted) == 2 * 20


class Table:
    """Prefixes over a table whose requests have blocks of one token."""

    def __init__(self, num_slots: int = 8, min_tokens: int = 2) -> None:
        self.table = RequestTable(num_slots, 64, block_size=1)
        self.prefixes = SharedPrefixes(self.table, SharedReads(decodes_per_read=3, min_tokens=min_tokens))

    def admit(self, slot: int, blocks: str) -> None:
        """Admits a request whose blocks have the letters' codes; equal ones before the first other are a hit."""
        ids = [ord(letter) for letter in blocks]
        held = {int(block) for row in range(8) for block in self.table.blocks.blocks(row)}
        refs = [int(block in held) for block in range(256)]
        num_held = self.prefixes.num_held(ids, refs)
        self.table.blocks.append(slot, ids)
        self.prefixes.join(slot, num_held)

    def leave(self, slot: int, num_blocks: int = 0) -> None:
        self.prefixes.leave(slot, num_blocks)
        self.table.blocks.cut(slot, num_blocks)

    def saved(self, *slots: int) -> int:
        return self.prefixes.saved_tokens(self.prefixes.readers(np.array(slots)))


def test_nested_prefixes_are_read_once_each() -> None:
    table = Table()
    for slot, blocks in enumerate(["abcdXY", "abcdef", "abcdeg", "abQ", "abR"]):
        table.admit(slot, blocks)
    # ab: five readers in two reads; cd: three readers in one; e has one token, which is too short.
    assert table.saved(0, 1, 2, 3, 4) == 3 * 2 + 2 * 2
    assert table.saved(1, 2) == 4
    assert table.saved(0, 3) == 2
    assert table.saved(3) == 0


def test_a_longer_prefix_brings_the_tokens_of_one_that_is_too_short() -> None:
    table = Table(min_tokens=3)
    for slot, blocks in enumerate(["abcdX", "abcdY", "abZ"]):
        table.admit(slot, blocks)
    assert table.saved(0, 1, 2) == 4  # ab is too short for three, abcd is long enough for two


def test_a_prefix_found_later_splits_a_longer_one() -> None:
    table = Table()
    for slot, blocks in enumerate(["abcdefX", "abcdefY", "abcZ"]):
        table.admit(slot, blocks)
    assert table.saved(0, 1) == 6
    assert table.saved(0, 1, 2) == 2 * 3 + 3


def test_a_prefix_ends_with_its_second_to_last_reader() -> None:
    table = Table()
    for slot, blocks in enumerate(["abcX", "abcY", "abcZ"]):
        table.admit(slot, blocks)
    table.leave(0)
    assert (table.saved(1, 2), len(table.prefixes)) == (3, 1)
    table.leave(1, num_blocks=1)  # it keeps one block of three
    assert (table.saved(1, 2), len(table.prefixes)) == (0, 0)
    table.admit(0, "abcQ")
    assert table.saved(0, 2) == 3


def test_more_levels_than_a_kernel_has_are_not_counted() -> None:
    table = Table(num_slots=8)
    longest = "ABCDEFGHIJKL"
    for slot, num_blocks in enumerate([12, 12, 10, 8, 6, 4, 2]):
        table.admit(slot, longest[:num_blocks] + chr(ord("p") + slot))
    assert len(table.prefixes) == MAX_LEVELS
    assert table.saved(5, 6) == 2
