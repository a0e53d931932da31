"""The measures, on numbers small enough to compute by hand."""

import math
from typing import Any

import pytest

from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord, attainment
from neaptide.loadgen.percentiles import percentile, percentiles


def record(*token_times_s: float, error: str | None = None) -> ChatRecord:
    return ChatRecord(sent_s=1.0, token_times_s=list(token_times_s), num_output_tokens=len(token_times_s), error=error)


def test_ttft_and_tpot() -> None:
    r = record(1.5, 1.7, 2.5)
    assert r.ttft_s == 0.5
    assert r.tpot_s == pytest.approx(0.5)


def test_tokens_without_text_count_for_tpot() -> None:
    r = record(1.5, 2.5)
    r.num_output_tokens = 5
    assert r.tpot_s == pytest.approx(0.25)


def test_one_token_has_no_tpot_to_miss() -> None:
    assert record(1.5).tpot_s is None
    assert record(1.5).met(0.5, 0.0)


def test_failed_and_unfinished_requests_have_missed() -> None:
    records = [record(1.1, 1.2), record(1.1, 1.2, error="gone"), record(), record(1.1, 9.0)]
    assert attainment(records, 0.5, 0.2) == 0.25


def test_percentiles_interpolate_and_leave_out_what_is_missing() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([4, 1, 3, 2], 1.0) == 4
    assert percentiles([*range(101), None]) == (50, 90, 99)
    assert percentiles([0.0, 1.0]) == (0.5, 0.9, 0.99)
    assert math.isnan(percentiles([]).p50)
    assert math.isnan(percentile([], 0.5))


def test_chunks_of_both_endpoints() -> None:
    r = ChatRecord(sent_s=0.0)
    r.add_chunk({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, 1.0)
    r.add_chunk({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, 2.0)
    r.add_chunk({"choices": [{"text": "b", "finish_reason": "length"}]}, 3.0)
    r.add_chunk({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}, 4.0)
    assert (r.text, r.token_times_s, r.finish_reason, r.num_output_tokens) == ("ab", [2.0, 3.0], "length", 2)
    r.add_chunk({"error": {"message": "lost"}}, 5.0)
    assert r.error == "lost"


def test_reasoning_and_calls_of_tools_are_tokens_that_came() -> None:
    """To the end of thinking nothing of the answer comes, and the server counts those tokens."""
    r = ChatRecord(sent_s=0.0)
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": ""}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "So"},
        {"reasoning": "so", "content": None},
        {"content": "Yes"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ""}}], "reasoning_content": None},
    ]
    for at_s, delta in enumerate(deltas):
        r.add_chunk({"choices": [{"delta": delta, "finish_reason": None}]}, float(at_s))
    assert (r.ttft_s, r.token_times_s, r.text) == (1.0, [1.0, 2.0, 3.0, 4.0, 5.0], "Yes")


def test_poisson_arrivals_repeat_and_have_the_rate() -> None:
    arrivals = poisson_arrivals(2.0, 1000.0, seed=1)
    assert arrivals == poisson_arrivals(2.0, 1000.0, seed=1)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(2000, rel=0.1)


def test_samples_sum_over_series() -> None:
    samples = Samples('# TYPE x counter\nx_total{a="1",b="1"} 2\nx_total{a="1",b="2"} 3\nx_total{a="2",b="1"} 5\n')
    assert samples.sum("x_total", a="1") == 5
    assert samples.sum("x_total") == 10
    assert samples.sum("y_total") == 0


def test_only_the_series_that_are_asked_for_are_parsed() -> None:
    samples = Samples("# TYPE a counter\na_total 2\nb{broken 5\nab 3\n", only=("a_", "ab"))
    assert (samples.sum("a_total"), samples.sum("ab"), samples.has("b")) == (2, 3, False)
