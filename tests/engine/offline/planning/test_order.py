"""The sorted order of a pool, made at once and kept up."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.offline.planning import order
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.prefix_tree import PrefixTree
from tests.engine.offline.planning.files import Prompt, pool, random_tokens, shared

PROMPT = st.lists(st.integers(0, 2), max_size=40).map(lambda tokens: [1] * (len(tokens) // 2) + tokens)
JOBS = st.lists(st.lists(PROMPT, max_size=6), max_size=3)
SALTS = st.lists(st.sampled_from(["a", "b"]), min_size=3, max_size=3)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few dozen tokens take several windows."""
    monkeypatch.setattr(order, "MAX_WINDOW_TOKENS", 16)


def expected(prompts: list[tuple[str, Prompt]]) -> tuple[list[int], list[int]]:
    rows = sorted(range(len(prompts)), key=lambda row: prompts[row])
    same = [shared(prompts[a][1], prompts[b][1]) if prompts[a][0] == prompts[b][0] else 0 for a, b in pairwise(rows)]
    return rows, [0, *same] if rows else []


def found(of: PromptOrder) -> tuple[list[int], list[int]]:
    return of.rows.tolist(), of.shared_tokens.tolist()


@given(JOBS, SALTS)
def test_prompts_are_sorted_by_salt_and_tokens(jobs: list[list[Prompt]], salts: list[str]) -> None:
    with TemporaryDirectory() as directory:
        prompts = pool(Path(directory), jobs, salts[: len(jobs)])
        flat = [(salts[k], prompt) for k, rows in enumerate(jobs) for prompt in rows]
        assert found(PromptOrder.of(prompts)) == expected(flat)


@given(JOBS, st.sets(st.integers(0, 17)))
def test_what_is_added_stands_as_if_sorted_at_once(jobs: list[list[Prompt]], later: set[int]) -> None:
    with TemporaryDirectory() as directory:
        prompts = pool(Path(directory), jobs)
        rows = np.arange(len(prompts))
        is_later = np.isin(rows, list(later))
        kept_up = PromptOrder.of(prompts, rows[~is_later]).added(prompts, rows[is_later])
        keys = [prompts.sort_key(row) for row in kept_up.rows.tolist()]
        assert keys == sorted(map(prompts.sort_key, rows.tolist()))
        assert kept_up.shared_tokens.tolist() == PromptOrder.of(prompts).shared_tokens.tolist()


@given(JOBS, st.sets(st.integers(0, 17)))
def test_without_the_ended_it_is_as_if_they_had_not_been(jobs: list[list[Prompt]], ended: set[int]) -> None:
    with TemporaryDirectory() as directory:
        prompts = pool(Path(directory), jobs)
        rows = np.arange(len(prompts))
        is_left = ~np.isin(rows, list(ended))
        assert found(PromptOrder.of(prompts).without(rows[~is_left])) == found(PromptOrder.of(prompts, rows[is_left]))


def test_memory_goes_by_the_window_not_by_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WINDOW_BYTES", 4 * 3 * 20)
    widths: list[int] = []
    prompts = pool(tmp_path, [[[1] * 64 + [row] for row in range(3)]])
    windows = prompts.windows
    monkeypatch.setattr(prompts, "windows", lambda rows, start, num: (widths.append(num), windows(rows, start, num))[1])
    monkeypatch.setattr(order, "MAX_WINDOW_TOKENS", 4096)
    assert PromptOrder.of(prompts).shared_tokens.tolist() == [0, 64, 64]
    assert widths == [16, 20, 20, 20]  # grows to what the bytes allow


def test_prompts_that_share_nothing_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = pool(tmp_path, [[[row] + [7] * 40 for row in range(5)]])
    calls: list[int] = []
    windows = prompts.windows
    monkeypatch.setattr(prompts, "windows", lambda rows, *rest: (calls.append(len(rows)), windows(rows, *rest))[1])
    PromptOrder.of(prompts)
    assert calls == [5]


def test_2_500_prompts_each_a_prefix_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    text, ends = random_tokens(rng, 2500), rng.permutation(2500)
    prompts = pool(tmp_path, [[text[: end + 1] for end in ends.tolist()]])
    sorted_ = PromptOrder.of(prompts)
    assert prompts.lengths[sorted_.rows].tolist() == list(range(1, 2501))
    assert sorted_.shared_tokens.tolist() == list(range(2500))
    tree = PrefixTree.of_order(sorted_, unit_tokens=1)
    assert sorted(tree.depth_tokens.tolist()) == list(range(1, 2500))


def test_duplicates_share_all_of_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    prompts = pool(tmp_path, [[[5] * 32] * 2000])
    tree = PrefixTree.of_order(PromptOrder.of(prompts))
    assert (tree.rows.tolist(), tree.depth_tokens.tolist(), tree.num_wanted.tolist()) == (
        list(range(2000)),
        [32],
        [2000],
    )


@pytest.mark.parametrize("jobs", [[], [[]], [[[]]], [[[3, 4]]]])
def test_pools_of_nothing_and_of_one(tmp_path: Path, jobs: list[list[Prompt]]) -> None:
    prompts = pool(tmp_path, jobs)
    sorted_ = PromptOrder.of(prompts)
    count = sum(map(len, jobs))
    assert found(sorted_) == (list(range(count)), [0] * count)
    assert found(sorted_.without(np.arange(count))) == ([], [])
    assert found(sorted_.added(prompts, np.zeros(0, np.int64))) == found(sorted_)
    assert len(PrefixTree.of_order(sorted_).parent) == 0


@pytest.mark.full
def test_400_000_prompts_within_4_gb(tmp_path: Path) -> None:
    import resource

    rng = np.random.default_rng(0)
    heads = [random_tokens(rng, 150) for _ in range(50_000)]
    rows = (np.concatenate((heads[row % 50_000], random_tokens(rng, 100))) for row in range(400_000))
    prompts = pool(tmp_path, [list(rows)])
    tree = PrefixTree.of_order(PromptOrder.of(prompts))
    assert len(tree.parent) == 50_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 << 30
