"""The arithmetic of ``benchmarks.agreement``, without a server and without the other tool."""

import json
from pathlib import Path

import pytest

from benchmarks.agreement import (
    OURS,
    THEIRS,
    Medians,
    ToolError,
    agree,
    medians_of_aiperf,
    medians_of_ours,
    ratios_of,
    trace_text,
)
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.workloads.online_sets import online_requests


def test_our_reader_gets_the_arrivals_and_lengths_that_were_written(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(trace_text(2.0, 30.0, 3))
    arrivals_s = poisson_arrivals(2.0, 30.0, 3)
    requests = online_requests(str(trace), 0)
    # The first of a trace opens it.
    assert [r.arrival_s for r in requests] == pytest.approx([at - arrivals_s[0] for at in arrivals_s], abs=1.1e-3)
    assert {(r.input_tokens, r.output_tokens) for r in requests} == {(128, 32)}


def test_the_same_figures_are_taken_from_both() -> None:
    figures = {"requests": 5, "failed": 1, "ttft_ms": {"p50": 40.5, "p99": 60.0}, "tpot_ms": {"p50": 20.0}}
    figures |= {"ttft_from_sending_ms": {"p50": 40.0}, "late_ms": {"p50": 0.5}}
    assert medians_of_ours({"servers": {"a": figures}}) == Medians(40.0, 20.0, 4, 0.5)
    theirs = {
        "time_to_first_token": {"unit": "ms", "avg": 41.0, "p50": 40.0},
        "inter_token_latency": {"unit": "ms", "avg": 21.0, "p50": 20.0},
        "request_count": {"unit": "requests", "avg": 4.0},
    }
    assert medians_of_aiperf(theirs) == Medians(40.0, 20.0, 4)
    theirs["inter_token_latency"]["unit"] = "us"
    with pytest.raises(ToolError, match="us"):
        medians_of_aiperf(theirs)


def test_ratios_are_of_the_medians_over_the_turns() -> None:
    turns = [
        {OURS: Medians(a, 20.0, 9), THEIRS: Medians(40.0, b, 9)} for a, b in ((38.0, 20.0), (42.0, 21.0), (90.0, 25.0))
    ]
    ratios = ratios_of(turns)
    assert ratios == {"ttft": 1.05, "tpot": round(20 / 21, 4)}
    assert agree(ratios)
    assert not agree({"ttft": 1.051, "tpot": 1.0})
    assert json.dumps(ratios)
