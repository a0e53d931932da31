"""Which lines are opened in vLLM, and when."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from neaptide.engine.messages import AddBatch, DeadlineStatus
from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.sharing.tenant_account import QUANTUM_TOKENS
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.engine.request import Request
from neaptide_vllm.batches.line_pool import LinePool


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """Forty prompts of 100 tokens; even ones share their first half, odd ones another."""
    with TokenFileWriter(tmp_path / "job") as tokens:
        for row in range(40):
            tokens.append([1 + row % 2] * 50 + [10 + row] * 50)
    write_prefixes(tmp_path / "job")
    return tmp_path / "job"


def batch(stem: Path, name: str, rows: list[int], *, deadline_s: float = 1e6, share: str = "") -> AddBatch:
    return AddBatch(
        batch_id=name,
        path=str(stem),
        rows=rows,
        params_table=[SamplingParams(max_tokens=10)],
        params_index=[0] * len(rows),
        stream_rows=[],
        deadline_s=deadline_s,
        share=share,
    )


def opened(pool: LinePool) -> list[str]:
    """Opens what there is room for."""
    found = []
    while (request := pool.open_next()) is not None:
        found.append(request.request_id)
    return found


def test_lines_that_share_a_prefix_are_open_together(stem: Path) -> None:
    pool = LinePool(6, 1_000_000)
    pool.add(batch(stem, "a", [0, 1, 2, 3, 4, 5]))
    rows = [int(one.partition(":")[2]) for one in opened(pool)]
    assert [row % 2 for row in rows] == [0, 0, 0, 1, 1, 1]


def test_no_more_lines_are_open_than_there_are_seats(stem: Path) -> None:
    pool = LinePool(3, 1_000_000)
    pool.add(batch(stem, "a", list(range(10))))
    assert len(opened(pool)) == pool.num_open == 3
    assert pool.num_waiting == 7


def test_no_more_tokens_are_open_than_there_is_memory(stem: Path) -> None:
    """Each line holds 100 tokens and expects ten."""
    pool = LinePool(40, 350)
    pool.add(batch(stem, "a", list(range(10))))
    assert len(opened(pool)) == 3


def test_an_ended_line_gives_its_memory_back(stem: Path) -> None:
    pool = LinePool(40, 350)
    pool.add(batch(stem, "a", list(range(10))))
    request = pool.open_next()
    opened(pool)
    assert request is not None
    pool.end(request, 10)
    assert len(opened(pool)) == 1


def test_a_line_larger_than_all_memory_runs_alone(stem: Path) -> None:
    pool = LinePool(40, 50)
    pool.add(batch(stem, "a", [0, 1]))
    assert opened(pool) == ["a:0"]


def test_an_ended_line_makes_room_for_the_next(stem: Path) -> None:
    pool = LinePool(1, 1_000_000)
    pool.add(batch(stem, "a", [0, 2]))
    request = pool.open_next()
    assert request is not None
    assert pool.open_next() is None
    pool.end(request, 10)
    assert opened(pool) == ["a:2"]


def test_keys_take_turns_whatever_their_batches_hold(tmp_path: Path) -> None:
    """Lines of a whole turn each alternate, however many batches of the first key came before."""
    with TokenFileWriter(tmp_path / "job") as tokens:
        for row in range(10):
            tokens.append([row] * QUANTUM_TOKENS)
    write_prefixes(tmp_path / "job")
    pool = LinePool(100, 1_000_000)
    for number in range(5):
        pool.add(batch(tmp_path / "job", f"large{number}", list(range(10)), share="one"))
    pool.add(batch(tmp_path / "job", "small", list(range(10)), share="two"))
    assert [one.startswith("small") for one in opened(pool)[:20]] == [False, True] * 10


def test_a_key_of_weight_three_gets_three_lines_for_each_of_another(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "job") as tokens:
        for row in range(12):
            tokens.append([row] * QUANTUM_TOKENS)
    write_prefixes(tmp_path / "job")
    pool = LinePool(16, 1_000_000, {"one": 3.0})
    for share in ("one", "two"):
        pool.add(batch(tmp_path / "job", share, list(range(12)), share=share))
    found = opened(pool)
    assert [sum(line.startswith(share) for line in found) for share in ("one", "two")] == [12, 4]


def test_a_cancelled_batch_leaves_and_names_its_open_lines(stem: Path) -> None:
    pool = LinePool(2, 1_000_000)
    pool.add(batch(stem, "a", [0, 2, 4]))
    pool.add(batch(stem, "b", [0]))
    opened(pool)
    assert sorted(pool.cancel("a")) == ["a:0", "a:2"]
    assert opened(pool) == ["b:0"]


def test_a_dropped_line_is_open_no_more(stem: Path) -> None:
    pool = LinePool(2, 1_000_000)
    pool.add(batch(stem, "a", [0, 2, 4]))
    opened(pool)
    assert pool.drop(["a:0", "a:4", "x:1"]) == ["a:0"]
    assert opened(pool) == ["a:4"]


def test_nothing_is_opened_while_offline_work_is_paused(stem: Path) -> None:
    pool = LinePool(2, 1_000_000)
    pool.add(batch(stem, "a", [0]))
    pool.begin(1.0, is_paused=True)
    assert opened(pool) == []
    pool.begin(2.0, is_paused=False)
    assert opened(pool) == ["a:0"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 12)),
            st.tuples(st.just("open"), st.integers(1, 4)),
            st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 10)),
            st.tuples(st.just("drop"), st.integers(0, 9)),
            st.tuples(st.just("cancel"), st.sampled_from("abc")),
            st.tuples(st.just("pause"), st.booleans()),
        ),
        max_size=40,
    )
)
def test_every_line_is_opened_once_and_none_is_lost(stem: Path, actions: list[tuple[Any, ...]]) -> None:
    """Whatever comes in between; and slots and memory are never exceeded."""
    pool = LinePool(5, 450)
    names = dict.fromkeys("abc", 0)
    added: dict[str, int] = {}
    is_open: list[Request] = []
    seen: set[str] = set()
    num_gone = 0

    def take(most: int) -> None:
        for _ in range(most):
            if (request := pool.open_next()) is None:
                return
            assert request.request_id not in seen
            seen.add(request.request_id)
            is_open.append(request)
            assert len(is_open) <= 4, "a fifth line of 110 tokens would exceed the memory"

    for now_s, (action, *given_) in enumerate(actions):
        match action:
            case "add":
                name, count = given_
                batch_id = f"{name}{names[name]}"
                first = added.get(batch_id, 0)
                rows = list(range(first, min(40, first + count)))
                added[batch_id] = first + len(rows)
                pool.add(batch(stem, batch_id, rows, share=name))
            case "open":
                take(*given_)
            case "end" if is_open:
                request = is_open.pop(given_[0] % len(is_open))
                pool.end(request, given_[1])
                num_gone += 1
            case "drop" if is_open:
                request = is_open.pop(given_[0] % len(is_open))
                assert pool.drop([request.request_id]) == [request.request_id]
                num_gone += 1
            case "cancel":
                batch_id = f"{given_[0]}{names[given_[0]]}"
                left = {request.request_id for request in is_open if request.request_id.startswith(f"{batch_id}:")}
                assert set(pool.cancel(batch_id)) == left
                num_gone += added.get(batch_id, 0) - sum(one.startswith(f"{batch_id}:") for one in seen - left)
                is_open = [request for request in is_open if request.request_id not in left]
                names[given_[0]] += 1  # A cancelled batch does not come back.
            case "pause":
                pool.begin(float(now_s), *given_)
        assert pool.num_open == len(is_open)
        assert pool.num_open + pool.num_waiting + num_gone == sum(added.values())
    pool.begin(float(len(actions)), is_paused=False)
    while pool.num_open or pool.num_waiting:
        take(5)
        pool.end(is_open.pop(), 1)


def run_for(pool: LinePool, seconds: int, lines_per_s: int) -> dict[str, DeadlineStatus]:
    """Ends so many lines a second; the last reported statuses."""
    statuses: dict[str, DeadlineStatus] = {}
    for second in range(seconds):
        pool.begin(float(second), is_paused=False)
        for _ in range(lines_per_s):
            if (request := pool.open_next()) is not None:
                pool.end(request, 10)
        if (found := pool.report()) is not None:
            statuses = {one.batch_id: one.outlook for one in found}
    return statuses


def test_a_batch_that_no_rate_seen_would_end_in_time_is_called_infeasible(stem: Path) -> None:
    pool = LinePool(8, 1_000_000)
    pool.add(batch(stem, "late", list(range(40)), deadline_s=10.0))
    pool.add(batch(stem, "calm", list(range(40)), deadline_s=1e6))
    assert run_for(pool, 8, 1) == {"late": DeadlineStatus.INFEASIBLE, "calm": DeadlineStatus.ON_TIME}
