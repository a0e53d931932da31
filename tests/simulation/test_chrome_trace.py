import json
from collections import defaultdict
from pathlib import Path

import pytest

from neaptide.engine.record.step_log import StepLine, read_log
from neaptide.simulation.chrome_trace import ENGINE, OFFLINE, ONLINE, chrome_events, write_chrome_trace
from tests.golden.renew import GOLDEN_LOG

STEPS = [line for line in read_log(GOLDEN_LOG) if isinstance(line, StepLine)]


def test_the_file_is_json_in_the_trace_event_format(tmp_path: Path) -> None:
    write_chrome_trace(GOLDEN_LOG, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert len(trace["traceEvents"]) > 3 * len(STEPS)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXC"
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)


def test_every_step_is_a_bar_with_its_tokens() -> None:
    bars = [event for event in chrome_events(GOLDEN_LOG) if event["ph"] == "X" and event["pid"] == ENGINE]
    assert [bar["name"] for bar in bars] == [f"step {step.step}" for step in STEPS]
    assert bars[0]["args"]["prompt tokens"] == sum(tokens for _, tokens in STEPS[0].chunks)
    assert [bar["ts"] for bar in bars] == [pytest.approx(1e6 * step.t[0]) for step in STEPS]


def test_a_request_has_one_bar_for_each_time_that_it_held_blocks() -> None:
    bars = [event for event in chrome_events(GOLDEN_LOG) if event["ph"] == "X" and event["pid"] != ENGINE]
    assert len(bars) == sum(len(step.admit) for step in STEPS)
    assert sum(bar["args"]["end"] == "preempted" for bar in bars) == sum(len(step.preempt) for step in STEPS)
    assert {bar["pid"] for bar in bars if bar["name"].startswith("online-")} == {ONLINE}
    assert {bar["pid"] for bar in bars if bar["name"].startswith("offline-")} == {OFFLINE}


def test_bars_of_one_slot_do_not_overlap() -> None:
    slots = defaultdict(list)
    for event in chrome_events(GOLDEN_LOG):
        if event["ph"] == "X":
            slots[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(slots) > 10
    for bars in slots.values():
        for (_, end), (start, _) in zip(sorted(bars), sorted(bars)[1:], strict=False):
            assert start >= end - 1e-3


def test_kv_counters_add_up_to_the_pool() -> None:
    counters = [event["args"] for event in chrome_events(GOLDEN_LOG) if event["name"] == "KV blocks"]
    assert len(counters) == len(STEPS)
    assert all(sum(counter.values()) == 48 and min(counter.values()) >= 0 for counter in counters)
    assert any(counter["online"] for counter in counters)
