"""The arithmetic of ``lab.benchmarks.agreement``, without a server and without the other tool."""

import json
from pathlib import Path

import numpy as np
import pytest

from lab.benchmarks.agreement import (
    OURS,
    THEIRS,
    Ratio,
    Times,
    ToolError,
    agree,
    is_shown,
    ratios_of,
    times_of_aiperf,
    times_of_ours,
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


def our_line(ttft: float, tpot: float | None = 20.0, error: str | None = None) -> str:
    figures = {"ttft_ms": ttft + 0.5, "ttft_from_sending_ms": ttft, "late_ms": 0.5, "tpot_ms": tpot, "error": error}
    return json.dumps(figures) + "\n"


def their_line(ttft: float, tpot: float = 20.0, unit: str = "ms", error: str | None = None) -> str:
    metrics = {
        "time_to_first_token": {"value": ttft, "unit": unit},
        "inter_token_latency": {"value": tpot, "unit": "ms"},
    }
    return json.dumps({"metadata": {}, "metrics": metrics, "error": error}) + "\n"


def test_the_same_figures_are_taken_from_both() -> None:
    ours = times_of_ours(our_line(40.0) + our_line(9.0, error="gone") + our_line(41.0, 21.0) + our_line(9.0, None))
    theirs = times_of_aiperf(their_line(40.0) + their_line(9.0, error="gone") + their_line(41.0, 21.0))
    assert (ours.ttft, ours.tpot) == (theirs.ttft, theirs.tpot) == ([40.0, 41.0], [20.0, 21.0])
    assert ours.medians() == {"ttft": 40.5, "tpot": 20.5, "late": 0.5}
    assert theirs.medians() == {"ttft": 40.5, "tpot": 20.5}
    without = json.dumps({"metrics": {"request_latency": {"value": 1.0, "unit": "ms"}}, "error": None})
    assert times_of_aiperf(without) == Times([], [])
    with pytest.raises(ToolError, match="time_to_first_token is in us"):
        times_of_aiperf(their_line(40.0, unit="us"))


def test_ratios_are_of_the_medians_over_all_requests() -> None:
    """A turn of more requests counts for more."""
    turns = [
        {OURS: Times([38.0, 42.0], [20.0] * 2), THEIRS: Times([40.0] * 2, [21.0] * 2)},
        {OURS: Times([42.0] * 3, [20.0] * 3), THEIRS: Times([40.0] * 3, [20.0, 25.0, 25.0])},
    ]
    ratios = ratios_of(turns)
    assert {what: one.ratio for what, one in ratios.items()} == {"ttft": 1.05, "tpot": round(20 / 21, 4)}
    assert agree(ratios)
    assert not agree(ratios | {"ttft": Ratio(1.051, 1.0, 1.1)})


def test_the_interval_has_the_ratio_of_what_was_drawn_from_and_narrows_with_requests() -> None:
    rng, widths = np.random.default_rng(5), []
    for count in (80, 1280):
        ours, theirs = (list(60.0 + 30.0 * rng.random(count)) for _ in (OURS, THEIRS))
        ratio = ratios_of([{OURS: Times(ours, [20.0] * count), THEIRS: Times(theirs, [20.0] * count)}])
        assert ratio["ttft"].low < 1.0 < ratio["ttft"].high
        assert ratio["tpot"] == Ratio(1.0, 1.0, 1.0)
        widths.append(ratio["ttft"].high - ratio["ttft"].low)
    assert widths[1] < 0.05 < widths[0]


def test_it_is_shown_only_by_an_interval_that_is_within() -> None:
    assert is_shown({"ttft": Ratio(1.02, 0.99, 1.05), "tpot": Ratio(1.0, 0.95, 1.0)})
    assert not is_shown({"ttft": Ratio(1.02, 0.99, 1.051), "tpot": Ratio(1.0, 1.0, 1.0)})
    assert not is_shown({"ttft": Ratio(1.0, 1.0, 1.0), "tpot": Ratio(0.97, 0.949, 1.0)})
