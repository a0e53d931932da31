"""The experiments on shares and deadlines, with few rows and a few seconds of chats."""

import pytest

from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.jobs import deadlines, shares
from neaptide_lab.experiments.jobs.setting import WARM_UP_S, JobWatch, job, scenario_beside_chats


def test_what_is_furthest_from_its_share_counts_relative_to_it() -> None:
    assert shares.furthest_off({"a": (0.55, 0.5), "b": (0.2, 0.25), "c": (0.25, 0.25)}) == pytest.approx(0.2)


def test_jobs_have_rows_of_their_own_and_come_when_they_are_submitted() -> None:
    first, second = job(1, 5, share="a"), job(2, 3, share="b", submitted_s=WARM_UP_S)
    assert not {r.segments for r in first.requests} & {r.segments for r in second.requests}
    watch = JobWatch()
    simulate(scenario_beside_chats([first, second], 1.0), observers=[watch])
    ends = watch.jobs()
    assert [one.num_rows for one in ends] == [5, 3]
    assert ends[0].last_end_s < WARM_UP_S < ends[1].last_end_s
    # The token that ends an answer is none of it.
    assert ends[1].num_tokens == sum(r.input_tokens + r.output_tokens - 1 for r in second.requests)
    window_s = (WARM_UP_S, 2 * WARM_UP_S)
    assert (watch.tokens_of("a", window_s), watch.tokens_of("b", window_s)) == (0, ends[1].num_tokens)


@pytest.mark.parametrize(("greedy", "took_s", "holds"), [(0.109, 19.9, True), (0.111, 19.9, False), (0.1, 20.1, False)])
def test_shares_and_the_small_job_are_judged(
    greedy: float, took_s: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greedy key may have a tenth more than its tenth, the small job twice its share's time."""
    had = {f"key{k}": (0.1, 0.1) for k in range(9)} | {"key9": (greedy, 0.1)}
    monkeypatch.setattr(shares, "shares_of_keys", lambda *args: (had, 1.0))
    monkeypatch.setattr(shares, "small_job", lambda *args: (took_s, 10.0))
    assert (not shares.run(quick=False).failed) == holds


@pytest.mark.full
def test_every_key_stands_beside_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "QUICK", shares.Size(20.0, 250, 1000, 20))
    result = shares.run(quick=True)
    due = [row.paper for row in result.rows if row.case.startswith("weights 1, 2, 3, key")]
    assert due[-2:] == [pytest.approx(100 * 2 / 13), pytest.approx(100 * 3 / 13)]
    assert sum(row.ours for row in result.rows if row.case.startswith("equal weights, key")) == pytest.approx(100.0)


@pytest.mark.full
def test_a_batch_that_turns_alone_would_miss_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "QUICK", deadlines.Size(20.0, 100, 350))
    result = deadlines.run(quick=True)
    assert result.data["ours_s"] < result.data["due_s"] < result.data["by_turns_s"]
    assert not result.failed
