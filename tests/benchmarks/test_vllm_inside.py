"""The arithmetic of ``benchmarks.vllm_inside``, without servers."""

from pathlib import Path

import pytest

from benchmarks.live.plan import Plan, Targets, Window
from benchmarks.vllm_inside import Sums, rounds_of
from neaptide.loadgen.client.recorder import ChatRecord


def plan(rate_rps: float) -> Plan:
    return Plan(20.0, (2.0, 19.0), Path("model"), seed=3, rate_rps=rate_rps)


def test_every_round_has_arrivals_of_its_own() -> None:
    rounds = rounds_of(plan(2.0), 3)
    assert [one.seed for one in rounds] == [3, 4, 5]
    assert len({tuple(one.arrivals_s()) for one in rounds}) == 3


def test_a_rate_at_which_no_chat_comes_is_refused_before_a_server_starts() -> None:
    """A slow machine would get runs without chats, and figures of 0."""
    with pytest.raises(SystemExit, match="none arrives in the window of seed 3: lengthen --duration-s"):
        rounds_of(plan(0.001), 1)


def test_runs_are_summed_by_chats_and_seconds() -> None:
    quick = ChatRecord(0.0, due_s=0.0, token_times_s=[0.1, 0.2], num_output_tokens=2)
    late = ChatRecord(0.0, due_s=0.0, token_times_s=[9.0, 9.1], num_output_tokens=2)
    sums = Sums()
    sums.add(Window(10.0, offline_tokens_per_s=30.0, records=[quick]), Targets(1.0, 0.2))
    sums.add(Window(30.0, offline_tokens_per_s=10.0, records=[quick, late, late]), Targets(1.0, 0.2))
    assert (sums.in_time, sums.num_chats, sums.offline_tokens_per_s) == (0.5, 4, 15.0)
    assert sums.per_round == [(1.0, 30.0), (pytest.approx(1 / 3), 10.0)]
