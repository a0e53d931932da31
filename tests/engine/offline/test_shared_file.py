"""A large file whose rows come in many jobs, as the chunks that a server claims: each as good as if it were alone."""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.prefix_tree import OrderedFiles, PrefixTree, prefixes_path
from neaptide.engine.request import Request
from tests.engine.harness import batch
from tests.engine.offline.test_prefix_tree import Prompt, prompts, shared_tokens

MAX_NUM_TOKENS = 512
SOME = [[1] * 32 + [9], [2] * 16 + [8], [1] * 32 + [7], [3], [2] * 16 + [6], [1] * 16 + [5]]


def chunk(message: AddBatch, number: int, rows: list[int]) -> AddBatch:
    return msgspec.structs.replace(message, batch_id=f"a.{number}.1", rows=rows, params_index=[0] * len(rows))


def new_tokens(rows: list[Prompt]) -> int:
    """Without what each of them shares with the one before it."""
    shared = sum(shared_tokens(one, other) for one, other in itertools.pairwise(rows))
    return sum(map(len, rows)) - shared


@given(prompts, st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_new_tokens_of_some_rows_are_those_of_the_tree_with_these_only(rows: list[Prompt], kinds: list[int]) -> None:
    with TemporaryDirectory() as directory:
        tree = PrefixTree.of(OrderedFiles().open(batch(Path(directory), "a", rows).path).tokens)
    lengths = np.array([len(rows[row]) for row in tree.rows.tolist()], np.int64)
    places = np.flatnonzero([kinds[row] == 0 for row in tree.rows.tolist()])
    expected = tree.restricted(tree.rows[places]).new_tokens(lengths[places])
    assert tree.new_tokens_at(places, lengths[places]).tolist() == expected.tolist()


@given(prompts, st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_every_job_goes_along_the_files_tree_and_knows_what_its_rows_share(
    rows: list[Prompt], job_of: list[int]
) -> None:
    """Rows of one file in three jobs, whatever they share across them."""
    with TemporaryDirectory() as directory:
        message = batch(Path(directory), "a", rows)
        order = OrderedFiles().open(message.path).tree.rows.tolist()
        pool = OfflinePool(by_prefix=True)
        for number in range(3):
            own = [row for row in range(len(rows)) if job_of[row] == number]
            pool.add_batch(chunk(message, number, own), 0.0, MAX_NUM_TOKENS)
        started: list[Request] = []
        for number in range(3):
            left = [row for row in order if job_of[row] == number and rows[row]]
            new_left = sum(one.num_new_tokens_left for one in pool.jobs[f"a.{number}.1"].sources) if left else 0
            assert new_left == new_tokens([rows[row] for row in left])
            for row in left:
                request = next(pool.jobs[f"a.{number}.1"].waiting([]))
                assert request.request_id == f"a.{number}.1:{row}"
                pool.take(request)
                started.append(request)
                pool.check_integrity(started)
        assert len(pool) == 0


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stems of the trees that are read, one after another."""
    found: list[str] = []
    load = PrefixTree.load

    def noted(stem: str, num_rows: int) -> PrefixTree:
        found.append(Path(stem).name)
        return load(stem, num_rows)

    monkeypatch.setattr(PrefixTree, "load", noted)
    return found


def test_a_file_is_read_once_for_all_jobs_that_have_rows_of_it(tmp_path: Path, loads: list[str]) -> None:
    pool, message = OfflinePool(by_prefix=True), batch(tmp_path, "a", SOME)
    pool.add_batch(chunk(message, 0, [0, 2]), 0.0, MAX_NUM_TOKENS)
    pool.add_batch(chunk(message, 1, [1, 4]), 0.0, MAX_NUM_TOKENS)
    # Also where all that came before has been handed out and runs.
    running = [pool.pop() for _ in range(4)]
    pool.add_batch(chunk(message, 2, [3, 5]), 0.0, MAX_NUM_TOKENS)
    assert loads == ["a"]
    for request in [*running, pool.pop(), pool.pop()]:
        pool.ended(request)
    assert not pool.jobs
    pool.add_batch(chunk(message, 3, [3]), 0.0, MAX_NUM_TOKENS)
    assert loads == ["a", "a"]


def test_another_file_in_the_same_place_is_read_anew(tmp_path: Path, loads: list[str]) -> None:
    pool, message = OfflinePool(by_prefix=True), batch(tmp_path, "a", SOME)
    pool.add_batch(chunk(message, 0, [0, 2]), 0.0, MAX_NUM_TOKENS)
    prefixes_path(message.path).unlink()
    pool.add_batch(chunk(message, 1, [1, 4]), 0.0, MAX_NUM_TOKENS)
    assert loads == ["a", "a"]
    assert [pool.pop().prefix_nodes[0].depth_tokens for _ in range(2)] == [16, 16]
