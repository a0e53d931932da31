"""Chunks that a server leaves to others."""

from neaptide.cluster.batches.passed_by import MAX_BATCHES, MAX_CHUNKS, PassedBy
from neaptide.cluster.lease_order import ChunkKey

HELD = [ChunkKey("held", 7)]


def test_some_chunks_of_a_batch_are_passed_by_one_by_one_and_many_of_it_all() -> None:
    passed_by = PassedBy()
    for number in range(MAX_CHUNKS):
        passed_by.add(ChunkKey("few", number % 2))
        passed_by.add(ChunkKey("many", number))
    chunks, batches = passed_by.excluded(HELD)
    assert sorted(chunks) == [ChunkKey("few", 0), ChunkKey("few", 1), *HELD]
    assert batches == ["many"]


def test_no_more_than_so_many_batches_are_remembered() -> None:
    passed_by = PassedBy()
    for number in range(MAX_BATCHES + 1):
        passed_by.add(ChunkKey(f"batch {number}", 0))
    chunks, _ = passed_by.excluded([])
    assert len(chunks) == MAX_BATCHES
    assert ChunkKey("batch 0", 0) not in chunks
