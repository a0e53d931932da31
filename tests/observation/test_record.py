"""Records: what is written can be read, and restarts lose nothing but what they must."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.observation.exposition import Scrape
from neaptide.observation.record import (
    Header,
    RecordError,
    RecordWriter,
    ServerRecord,
    decode_record,
    is_record,
    read_record,
)
from neaptide.observation.traffic import arrivals_by_interval

HEADER = Header(server="http://a", started=5.0, every_s=1.0, labels={"model_name": "m"})


def written(*polls: tuple[float, dict[str, float] | str]) -> bytes:
    file = io.BytesIO()
    writer = RecordWriter(file, HEADER)
    for at_s, values in polls:
        if isinstance(values, str):
            writer.fail(at_s, values)
        else:
            writer.add(at_s, Scrape(values, {}))
    return file.getvalue()


def read(tmp_path: Path, content: bytes) -> ServerRecord:
    path = tmp_path / "record.jsonl"
    path.write_bytes(content)
    return read_record(path)


def test_rises_and_gauges_of_each_interval_come_back(tmp_path: Path) -> None:
    first = {"num_requests_running": 2.0, "prompt_tokens_total": 10.0}
    second = {"num_requests_running": 1.0, "prompt_tokens_total": 10.0}
    third = {"num_requests_running": 1.0, "prompt_tokens_total": 25.0}
    found = read(tmp_path, written((0.0, first), (1.0, second), (2.5, third)))
    assert found.header == HEADER
    assert [(each.start_s, each.end_s) for each in found.intervals] == [(0.0, 1.0), (1.0, 2.5)]
    assert [each.rises for each in found.intervals] == [{}, {"prompt_tokens_total": 15.0}]
    assert found.intervals[0].before == {"num_requests_running": 2.0}
    assert found.intervals[0].after == {"num_requests_running": 1.0}


def test_a_series_that_did_not_change_takes_no_room() -> None:
    polls = [(float(k), {"prompt_tokens_total": 10.0}) for k in range(3)]
    assert written(*polls).splitlines()[2:] == [b'{"at_s":1.0}', b'{"at_s":2.0}']


def test_a_failed_poll_makes_a_longer_interval(tmp_path: Path) -> None:
    content = written((0.0, {"prompt_tokens_total": 1.0}), (1.0, "refused"), (2.0, {"prompt_tokens_total": 4.0}))
    found = read(tmp_path, content)
    assert found.failures == 1
    assert [(each.seconds, each.rises) for each in found.intervals] == [(2.0, {"prompt_tokens_total": 3.0})]


def test_the_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    content = written((0.0, {}), (1.0, {"prompt_tokens_total": 4.0}), (2.0, {"prompt_tokens_total": 5.0}))
    assert len(read(tmp_path, content[:-9]).intervals) == 1


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    lines = written((0.0, {}), (1.0, {}), (2.0, {})).split(b"\n")
    lines[2] = b"{nonsense"
    with pytest.raises(RecordError, match=r"record\.jsonl, line 3"):
        read(tmp_path, b"\n".join(lines))


def test_polls_out_of_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not in order"):
        read(tmp_path, written((0.0, {}), (2.0, {}), (1.0, {})))


def test_another_file_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    assert not is_record(path)
    with pytest.raises(RecordError, match="is no record"):
        read_record(path)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_arrivals_are_exact_whatever_ends_and_restarts(steps: list[tuple[int, int, bool]]) -> None:
    """Each step: arrivals, ends, and whether the server restarts before them and loses what it had."""
    running = ended = arrived = restarts = 0
    polls: list[tuple[float, dict[str, float] | str]] = [(0.0, values(0, 0, 0))]
    for at_s, (arrivals, ends, restarted) in enumerate(steps, 1):
        if restarted:
            running, ended, restarts = 0, 0, restarts + 1
        arrived += arrivals
        done = min(ends, running + arrivals)
        running, ended = running + arrivals - done, ended + done
        polls.append((float(at_s), values(running, ended, restarts)))
    record = decode_record(written(*polls), "record")
    assert sum(each.restarted for each in record.intervals) == restarts
    assert arrivals_by_interval(record.intervals) == ([arrivals for arrivals, _, _ in steps], 0)


def values(running: int, ended: int, restarts: int) -> dict[str, float]:
    return {
        "num_requests_running": float(running),
        "request_prompt_tokens_count": float(ended),
        "request_prompt_tokens_created": 100.0 + restarts,
    }


def test_a_counter_that_falls_means_a_restart_where_no_time_is_told() -> None:
    polls = [(0.0, {"prompt_tokens_total": 9.0}), (1.0, {"prompt_tokens_total": 4.0})]
    (interval,) = decode_record(written(*polls), "record").intervals
    assert (interval.restarted, interval.rises) == (True, {"prompt_tokens_total": 4.0})


def test_requests_that_leave_without_an_end_count_as_aborted() -> None:
    polls = [(0.0, values(3, 5, 0)), (1.0, values(1, 6, 0))]
    assert arrivals_by_interval(decode_record(written(*polls), "record").intervals) == ([0], 1)
