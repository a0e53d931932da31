"""Trace files as people have them: formats found by content, faults told with file, line and column."""

import gzip
import json
import logging
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.loadgen.workloads import trace_rows as trace_rows_module
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.trace_reader import read_trace
from neaptide.loadgen.workloads.trace_rows import trace_rows
from neaptide.loadgen.workloads.traces import load_online, read_csv

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LENGTHS = "arrival_s,input_tokens,output_tokens\n"
MOONCAKE: dict[str, Any] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
AGENT: dict[str, Any] = {"session": 0, "offset_ms": 0, "input_chars": 96, "output_chars": 8, "hash_ids": [1, 2]}


def jsonl(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(directory: Path, content: str | bytes, name: str = "mine.txt") -> Path:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def shape(path: Path) -> list[tuple[float, int, int]]:
    return [(round(r.arrival_s, 6), r.input_tokens, r.output_tokens) for r in load_online(path)]


# ---- formats: the file's name says nothing ----


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,9,1\n", [(0, 374, 44), (1, 9, 1)]),
        (
            AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n",
            [(0, 2162, 5), (0.99007, 2399, 6)],
        ),
        (
            AZURE + "2024-05-10T00:00:00Z,1,5\n2024-05-10T02:00:01+02:00,2,6\n2024-05-10T00:00:02.5,3,7\n",
            [(0, 1, 5), (1, 2, 6), (2.5, 3, 7)],
        ),
        (jsonl(MOONCAKE, MOONCAKE | {"timestamp": 1500, "hash_ids": None}), [(0, 600, 5), (1.5, 600, 5)]),
        (LENGTHS.strip() + ",client\n0.5,10,2,31\n", [(0.5, 10, 2)]),
        (
            jsonl(AGENT, AGENT | {"offset_ms": 700}, AGENT | {"session": 4, "hash_ids": [9, 9, 9]}),
            [(0, 24, 2), (0.7, 24, 2), (10, 24, 2)],
        ),
        (
            jsonl(*({"timestamp": t, "session_id": "a", "input": "x" * 80, "output": "y" * 40} for t in (5.0, 6.5))),
            [(0, 20, 10), (1.5, 20, 10)],
        ),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,100,7\n", [(0.25, 100, 7)]),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,30,2,32,API log\n",
            [(0, 472, 18), (40, 30, 2)],
        ),
    ],
    ids=["azure-2023", "azure-2024", "iso-zones", "mooncake", "servegen", "agents", "agent-texts", "vidur", "burstgpt"],
)
def test_a_format_is_found_by_its_content(tmp_path: Path, content: str, expected: list[tuple[float, int, int]]) -> None:
    assert shape(written(tmp_path, content)) == expected


@pytest.mark.parametrize(
    "content",
    [
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,2,12,5\n20,3,23,6.7\n",
        "input_tokens,output_tokens\n10,2\n20,3\n",
        LENGTHS + "4,10,2\n1,20,3\n",
        jsonl({"request_id": 1, "input_length": 10, "output_length": 2}, {"input_length": 20, "output_length": 3}),
    ],
    ids=["vidur", "plain", "with-arrivals", "servegen-batch"],
)
def test_lengths_are_offline_work_in_the_files_order(tmp_path: Path, content: str) -> None:
    requests = load_offline(written(tmp_path, content), seed=1, keep_order=True).requests
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(10, 2), (20, 3)]


def test_a_batch_job_shares_blocks_of_sixteen(tmp_path: Path) -> None:
    rows = [{"input_length": 20, "hash_ids": [5, 6]}, {"input_length": 18, "hash_ids": [5, 7]}]
    offline = load_offline(written(tmp_path, jsonl(*rows)), seed=1, keep_order=True)
    first, second = (request.segments for request in offline.requests)
    assert (first[0], [n for _, n in first], [n for _, n in second]) == (second[0], [16, 4], [16, 2])


def test_agents_texts_share_the_blocks_that_they_begin_with(tmp_path: Path) -> None:
    texts = ("a" * 128, "a" * 64 + "b" * 64, [{"role": "user", "content": "c"}])
    rows = [{"timestamp": k, "session_id": 1, "input": text, "output": "y"} for k, text in enumerate(texts)]
    one, two, three = (request.segments for request in load_online(written(tmp_path, jsonl(*rows))))
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert three[0][1] == len("user: c\n") // 4


@pytest.mark.parametrize("name", ["mine.csv", "mine.jsonl", "mine", "mine.jsonl.gz"])
def test_the_name_says_nothing_about_the_format(tmp_path: Path, name: str) -> None:
    assert shape(written(tmp_path, LENGTHS + "1,10,2\n", name)) == [(1, 10, 2)]
    assert shape(written(tmp_path, gzip.compress((LENGTHS + "1,10,2\n").encode()), name)) == [(1, 10, 2)]


def test_the_same_bytes_under_another_name_are_the_same_trace(tmp_path: Path) -> None:
    content = "input_tokens,output_tokens\n" + "".join(f"{k},{k}\n" for k in range(1, 40))
    one, two = (written(tmp_path, content, name) for name in ("one.csv", "two.txt"))
    assert load_offline(one, seed=3).requests == load_offline(two, seed=3).requests
    one, two = (written(tmp_path, LENGTHS + "1,10,2\n", name) for name in ("three.csv", "four.csv"))
    assert load_online(one) == load_online(two)


@pytest.mark.parametrize("more", [{"timestamp": 0, "output_length": 5}, {}], ids=["mooncake", "batch-job"])
def test_a_row_without_blocks_shares_nothing_with_those_that_have_some(tmp_path: Path, more: dict[str, Any]) -> None:
    rows = [{"input_length": 16, "hash_ids": [k]} for k in (3, 4, 5)] + [{"input_length": 16}] * 3  # rows 3, 4 and 5
    offline = load_offline(written(tmp_path, jsonl(*(row | more for row in rows))), seed=1, keep_order=True)
    assert len({request.segments for request in offline.requests}) == 6
    offline.check_refill()


def test_lengths_of_a_csv_file_are_offline_work_whatever_its_timestamps_are(tmp_path: Path) -> None:
    path = written(tmp_path, "timestamp,input_length,output_length\n0.0,10,2\n12.5,20,3\n")
    requests = load_offline(path, seed=1, keep_order=True).requests
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(10, 2), (20, 3)]


# ---- faults ----

FAULTS = {
    # named by users
    "negative": (AZURE + "2024-05-10 00:00:00,-100,5\n", "line 2, column ContextTokens: '-100' is negative"),
    "nan": (LENGTHS + "1,nan,5\n", "line 2, column input_tokens: 'nan' is not finite"),
    "infinite": (LENGTHS + "1,10,inf\n", "line 2, column output_tokens: 'inf' is not finite"),
    "json-nan": ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 1, column timestamp: nan is not"),
    "zero": (LENGTHS + "1,10,5\n2,0,5\n", "line 3, column input_tokens: a length must be at least 1, not 0"),
    "zero-output": (jsonl(MOONCAKE | {"output_length": 0}), "has no requests: 1 requests without output"),
    "negative-block": (
        jsonl(MOONCAKE, MOONCAKE | {"hash_ids": [7, -8]}),
        "line 2, column hash_ids: block id -8 is",
    ),
    # more of them
    "date-without-time": (AZURE + "2024-05-10,1,5\n", "line 2, column TIMESTAMP: '2024-05-10' is not a date and time"),
    "two-values": (
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "input_length": 9}\n',
        "line 1, column input_length: occurs twice",
    ),
    "endless-quotation": (
        LENGTHS.strip() + ',model\n0,1,1,"of\ntwo lines"\n1,10,5,"gpt\n2,20,3,gpt\n3,30,3,gpt\n',
        "line 4: not CSV: unexpected end of data",
    ),
    "after-a-quotation": (LENGTHS + '1,"10"0,5\n', "line 2: not CSV: "),
    "two-files-in-one": (LENGTHS + "1,10,5\n" + LENGTHS, "line 3, column arrival_s: 'arrival_s' is not a number"),
    "zero-byte": (
        LENGTHS + "1,10,5\n" * 2000 + "1,1\0,5\n",
        "line 2002, column input_tokens: '1\\x00' is not a number",
    ),
    "other-digits": (LENGTHS + "1,\uff11\uff10,5\n", "line 2, column input_tokens: '\uff11\uff10' is not a number"),
    "blocks-as-text": (
        'timestamp,input_length,output_length,hash_ids\n0,600,5,"[7, 8]"\n',
        "line 2, column hash_ids: '[7, 8]' is not a list of block ids",
    ),
    "endless-number": (
        '{"timestamp": 0, "input_length": 1' + "0" * 400 + ', "output_length": 1}\n',
        "line 1, column input_length: 1000000000000000000000000000000000000000... is not a number",
    ),
    "short-row": (
        LENGTHS + "1,10\n",
        "line 2: 2 columns, but the header, line 1, 'arrival_s,input_tokens,output_tokens', ",
    ),
    "long-row": (LENGTHS + "1,10,5,\n", "line 2: 4 columns, but the header, line 1, 'arrival_s"),
    "a-comment": (f"# mine\n{LENGTHS}1,10,5\n", "line 2: 3 columns, but the header, line 1, '# mine', has 1"),
    "no-header": ("0,10,10\n", "line 1: numbers instead of column names: add a header"),
    "two-arrivals": (
        "arrival_s,arrived_at,input_tokens,output_tokens\n1,2,3,4\n",
        "column arrived_at: is ambiguous with arrival_s",
    ),
    "two-lengths": (
        "arrival_s,input_tokens,output_tokens,prompt_tokens,completion_tokens\n1,2,3,2,3\n",
        "line 2, column prompt_tokens: is ambiguous with input_tokens: remove one of them",
    ),
    "blocks-of-a-later-row": (
        jsonl({"arrival_s": 1, "input_tokens": 5, "output_tokens": 1}, {"arrival_s": 1, "hash_ids": [1]}),
        "line 2, column hash_ids: is not in the first row, which defines the format",
    ),
    "failed-without-prompt": (
        "Timestamp,Request tokens,Response tokens\n3,nan,0\n5,10,2\n",
        "line 2, column Request tokens: 'nan' is not finite",
    ),
    "no-messages": (
        jsonl({"timestamp": 5, "session_id": "a", "input": [], "output": "y"}),
        "line 1, column input: is empty",
    ),
    "decimals-of-minutes": (AZURE + "2024-05-10 00:01.5,1,5\n", "'2024-05-10 00:01.5' is not a date and time"),
    "time-without-date": (AZURE + "23:59:59.5,1,5\n", "line 2, column TIMESTAMP: '23:59:59.5' is not a date and time"),
    "seconds-for-a-date": (AZURE + "1700158546.68,1,5\n", "column TIMESTAMP: '1700158546.68' is not a date and time"),
    "1e400": (LENGTHS + "1,1e400,5\n", "line 2, column input_tokens: '1e400' is not finite"),
    "1e400-json": (
        '{"timestamp": 1e400, "input_length": 1, "output_length": 1}\n',
        "column timestamp: inf is not finite",
    ),
    "thousands": (LENGTHS + '1,"1,000",5\n', "line 2, column input_tokens: '1,000' is not a number"),
    "decimal-comma": (LENGTHS.replace(",", ";") + "1,5;10;5\n", "line 2, column arrival_s: '1,5' is not a number"),
    "empty-row-of-a-sheet": (LENGTHS + "1,10,5\n,,\n", "line 3, column arrival_s: is missing"),
    "two-boms": (LENGTHS + "1,10,5\n\ufeff2,10,5\n", "line 3, column arrival_s: '\\ufeff2' is not a number"),
    "half-a-block": (jsonl(MOONCAKE | {"hash_ids": [7.0, 8]}), "line 1, column hash_ids: 7.0 is not a block id"),
    "large-block": (
        jsonl({"input_length": 20, "hash_ids": [2**30, 8]}),
        "block id 1073741824 is not in 0 to 1073741823",
    ),
    "deep": ('{"timestamp": ' + "[" * 100_000 + "\n", "line 1: not JSON: maximum recursion depth"),
    "wide": (LENGTHS + '1,"' + "9" * 200_000 + '",5\n', "line 2: not CSV: field larger than field limit"),
    "on-many-lines": (json.dumps(MOONCAKE, indent=2), "line 1: not JSON: Expecting property name enclosed in double "),
    "commas-between": (json.dumps(MOONCAKE) + ",\n", "line 1: not JSON: Extra data, character 78"),
    "other-text-far-down": ((LENGTHS + "1,10,5\n" * 3000).encode() + b"2,1\xff,5\n", ", line 3002: not text in UTF-8"),
    "other-text-gzipped": (gzip.compress(LENGTHS.encode() + b"1,\xff,5\n"), ", line 2: not text in UTF-8"),
    "a-web-page": ("<!DOCTYPE html>\n", "has no requests: no rows after its header, '<!DOCTYPE html>'"),
    "empty-cell": (LENGTHS + "1,,5\n", "line 2, column input_tokens: is missing"),
    "no-key": (jsonl(MOONCAKE, {"timestamp": 3, "output_length": 5}), "line 2, column text_input: is missing"),
    "fraction": (LENGTHS + "1,10.5,5\n", "line 2, column input_tokens: '10.5' is not a whole number"),
    "huge": (LENGTHS + "1,99999999999,5\n", "line 2, column input_tokens: '99999999999' is more than 16,777,216"),
    "bool": (jsonl(MOONCAKE | {"input_length": True}), "line 1, column input_length: True is not a number"),
    "no-date": (AZURE + "2024-13-10 00:00:00,1,5\n", "line 2, column TIMESTAMP: '2024-13-10 00:00:00' is not a date"),
    "no-decimals": (AZURE + "2024-10-10 00:00:00.,1,5\n", "line 2, column TIMESTAMP: '2024-10-10 00:00:00.' is not a"),
    "few-blocks": (jsonl(MOONCAKE | {"hash_ids": [7]}), "1 block ids for 600 tokens in blocks of 512: 2 expected"),
    "many-blocks": (jsonl(MOONCAKE | {"hash_ids": [7, 8, 9, 10]}), "column hash_ids: 4 block ids for 600 tokens"),
    "text-blocks": (jsonl(MOONCAKE | {"hash_ids": ["7", 8]}), "line 1, column hash_ids: '7' is not a block id"),
    "no-blocks": (jsonl(MOONCAKE | {"hash_ids": 7}), "line 1, column hash_ids: 7 is not a list of block ids"),
    "negative-stamp": (LENGTHS + "-1,10,5\n", "line 2, column arrival_s: '-1' is negative"),
    "endless-stamp": (LENGTHS + "1e300,10,5\n", "line 2, column arrival_s: '1e300' is too large"),
    "underscores": (LENGTHS + "1,1_0,5\n", "line 2, column input_tokens: '1_0' is not a number"),
    "two-columns-alike": ("arrival_s,Arrival_s,input_tokens,output_tokens\n1,1,1,1\n", "two columns are called"),
    "session-before": (
        jsonl(*({"timestamp": t, "session_id": "a", "input": "x", "output": "y"} for t in (5, 4))),
        "line 2, column timestamp: 4 is before the session's first row, 5",
    ),
    "no-session": (jsonl(AGENT | {"session": [1]}), "line 1, column session: is not a name or a number"),
    "stamps-of-a-csv": (
        "timestamp,input_length,output_length\n0.0,100,20\n12.5,100,20\n",
        "has lengths but no arrival times: give it as offline work, or if its timestamp is in seconds, call that",
    ),
    "a-list": ('[{"timestamp": 0}]\n', "a JSON list; write one object a line instead"),
    "half-a-line": (jsonl(MOONCAKE) + '{"timestamp": 5, "inp', "line 2: not JSON"),
    "no-object": (jsonl(MOONCAKE) + "7\n", "line 2: not a JSON object"),
    "lengths-only": ("input_tokens,output_tokens\n1,1\n", "has lengths but no arrival times: give it as offline work"),
    "unknown": ("a,b\n1,2\n", "unknown format, with the columns a, b; known formats: TIMESTAMP, ContextTokens"),
    "header-only": (AZURE, "has no requests"),
    "blank": (" \n\n", "has no requests"),
    "binary": (b"PAR1\0\0\0", "not a text file"),
    "latin": ("arrival_s,input_tokens,output_tokens,caf\xe9\n".encode("latin-1"), "not text in UTF-8"),
    "utf-16": ((LENGTHS + "1,10,5\n").encode("utf-16"), "not text in UTF-8"),
    "more-after-gzip": (gzip.compress((LENGTHS + "1,10,5\n").encode()) + b"xx", "not a gzip file, or truncated"),
    "cut-off": (gzip.compress((LENGTHS + "1,10,5\n" * 500).encode())[:-20], "not a gzip file, or truncated"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_and_the_place_is_told(tmp_path: Path, fault: str) -> None:
    content, complaint = FAULTS[fault]
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load_online(written(tmp_path, content))
    assert str(raised.value).startswith("mine.txt")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_pipe_or_a_directory_is_refused(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, tmp_path):
        for load in (load_online, online_requests, lambda path: load_offline(path, seed=1)):
            with pytest.raises(
                ValueError, match=f"^{path}: not a regular file; a trace is read more than once, so save"
            ):
                load(path)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + LENGTHS + "1,10,5\n",
        LENGTHS.replace(",", ";") + "1;10;5\n",
        LENGTHS.replace("\n", "\r\n") + "\r\n1,10,5\r\n\r\n",
        " arrival_s , input_tokens , output_tokens \n 1 , 10.0 , 5 \n",
        gzip.compress(("\ufeff" + LENGTHS + "1,10,5\n").encode()),
        LENGTHS.replace("\n", "\r") + "1,10,5\r",
        '"arrival_s","input_tokens","output_tokens"\n"1","10","5"\n',
        LENGTHS.replace(",", "\t") + "1\t10\t5\n",
        LENGTHS + "1e0,1e1,+5\n",
    ],
    ids=[
        "bom",
        "semicolons",
        "crlf-and-blank-lines",
        "spaces-and-floats",
        "gzipped-bom",
        "cr",
        "quoted",
        "tabs",
        "powers",
    ],
)
def test_what_can_be_meant_one_way_only_is_read(tmp_path: Path, content: str | bytes) -> None:
    assert shape(written(tmp_path, content)) == [(1, 10, 5)]


# ---- order, and what is left out ----


def test_an_unsorted_file_is_sorted_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stamps = ("00:00:05", "00:00:01", "00:00:09", "00:00:00")
    path = written(tmp_path, AZURE + "".join(f"2024-05-10 {s},{k + 1},1\n" for k, s in enumerate(stamps)))
    assert shape(path) == [(0, 4, 1), (1, 2, 1), (5, 1, 1), (9, 3, 1)]
    assert caplog.messages == ["mine.txt: 2 of 4 rows come after a later one: sorted by arrival"]


@pytest.mark.parametrize(
    ("stamps", "expected_s", "says"),
    [
        (("2023-10-28 23:59:59", "2023-10-28 00:00:01"), [0, 86398], True),
        (("2023-10-29 02:59:59", "2023-10-29 02:00:01"), [0, 3598], True),
        (("2023-10-29 02:59:59+02:00", "2023-10-29 02:00:01+01:00"), [0, 2], False),
    ],
    ids=["midnight", "clocks-put-back", "clocks-put-back-with-zones"],
)
def test_a_clock_that_goes_backwards_is_said_unless_its_zone_explains_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stamps: tuple[str, ...], expected_s: list[float], says: bool
) -> None:
    path = written(tmp_path, AZURE + "".join(f"{stamp},1,1\n" for stamp in stamps))
    assert [r.arrival_s for r in load_online(path)] == expected_s
    assert caplog.messages == ["mine.txt: 1 of 2 rows come after a later one: sorted by arrival"] * says


def test_nothing_is_said_of_an_order_that_is_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_offline(written(tmp_path, LENGTHS + "5,10,2\n1,20,3\n"), seed=1, keep_order=True)
    assert not caplog.messages


def test_a_window_of_an_unsorted_file_is_that_of_the_sorted_one(tmp_path: Path) -> None:
    path = written(tmp_path, jsonl(*(MOONCAKE | {"timestamp": t} for t in (9001, 4000, 1000, 2500))))
    assert [r.arrival_s for r in load_online(path, window_s=(1.0, 4.0))] == [0.5, 2.0]


def test_ticks_of_an_unsorted_file_are_spread_in_the_files_order(tmp_path: Path) -> None:
    rows = [MOONCAKE | {"timestamp": t, "input_length": 1000 + k} for k, t in enumerate((3000, 0, 3000, 0))]
    assert shape(written(tmp_path, jsonl(*rows))) == [(0, 1001, 5), (1.5, 1003, 5), (3, 1000, 5), (4.5, 1002, 5)]


def test_a_window_holds_requests_whose_tick_began_before_it(tmp_path: Path) -> None:
    path = written(tmp_path, jsonl(*(MOONCAKE | {"timestamp": t} for t in (0, 0, 3000))))
    assert [r.arrival_s for r in load_online(path, window_s=(1.0, 2.0))] == [0.5]


def test_a_sorted_file_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_online(written(tmp_path, LENGTHS + "1,1,1\n1,1,1\n2,1,1\n"))
    load_online(written(tmp_path, jsonl(AGENT, AGENT | {"session": 1}, AGENT)))
    assert not caplog.messages


def test_failed_requests_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "Timestamp,Request tokens,Response tokens\n3,10,0\n5,10,2\n6,0,0\n8,20,3\n")
    assert shape(path) == [(0, 10, 2), (3, 20, 3)]
    assert caplog.messages == [
        "mine.txt: of 4 rows, these are skipped: 2 failed requests, which have no response",
    ]


def test_long_prompts_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_online(written(tmp_path, LENGTHS + "1,10,1\n2,30,1\n"), max_input_tokens=20)
    assert caplog.messages == ["1 of 2 requests skipped: prompts above 20 tokens"]


def test_a_row_outside_the_window_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 3"):
        load_online(written(tmp_path, LENGTHS + "1,10,1\n900,-1,1\n"), window_s=(0, 10))


def test_a_window_that_no_row_of_a_file_lies_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"window 5:10: the last one arrives at 2\.0 s"):
        load_online(written(tmp_path, LENGTHS + "1,10,1\n2,10,1\n"), window_s=(5, 10))


@given(
    stamps=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    window=st.tuples(st.integers(0, 40), st.integers(1, 20)),
    tick_ms=st.sampled_from([700, 3000]),
)
def test_cutting_while_reading_is_cutting_the_whole(
    tmp_path_factory: pytest.TempPathFactory, stamps: list[int], window: tuple[int, int], tick_ms: int
) -> None:
    rows = [{"timestamp": t * tick_ms, "input_length": 1 + k, "output_length": 1} for k, t in enumerate(stamps)]
    path = written(tmp_path_factory.mktemp("cut"), jsonl(*rows))
    low, high = float(window[0]), float(window[0] + window[1])
    whole = read_trace(path)
    assert len(whole.rows) == whole.num_rows == len(stamps)
    assert read_trace(path, (low, high)).rows == [row for row in whole.rows if low <= row.arrival_s < high]


# ---- memory ----


def million(path: Path, rows: int) -> None:
    draw = random.Random(1)
    with path.open("w") as file:
        file.write(LENGTHS)
        for k in range(rows):
            file.write(f"{k / 100},{draw.randrange(1, 4000)},{draw.randrange(1, 500)}\n")


def ticks(path: Path, rows: int) -> None:
    """300 rows in each of Mooncake's ticks."""
    with path.open("w") as file:
        for k in range(rows):
            file.write(f'{{"timestamp": {k // 300 * 3000}, "input_length": 9, "output_length": 1, "hash_ids": [7]}}\n')


@pytest.mark.parametrize("write", [million, ticks])
def test_a_window_costs_what_it_holds(tmp_path: Path, write: Callable[[Path, int], None]) -> None:
    path = tmp_path / "many.csv"
    write(path, 20_000)
    tracemalloc.start()
    try:
        assert len(load_online(path, window_s=(100.0, 101.0))) == 100
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 800_000  # all rows take 8 MB


@pytest.mark.full
@pytest.mark.parametrize("write", [million, ticks])
def test_a_window_of_a_million_rows_stays_below_a_hundred_megabytes(
    tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    path = tmp_path / "many.csv"
    write(path, 1_000_000)
    code = (
        "import sys; from neaptide.loadgen.workloads.traces import load_online; "
        "print(len(load_online(sys.argv[1], window_s=(5000, 5060)))); "
        # Not ru_maxrss: it is at least what the process had that started this one.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=os.environ)
    count, peak_kib = map(int, done.stdout.split())
    assert count == 6000
    assert peak_kib < 95 << 10


def seconds_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "timestamp is read in milliseconds" in message]


@pytest.mark.parametrize(
    ("stamps", "words"),
    [
        ([0, 1, 2, 3], "so 4 requests come in 0.003 s; if it is in seconds (3 s), call that column arrival_s"),
        ([0.0, 27.5, 80.25], "so 3 requests come in 0.0803 s; if it is in seconds (80.2 s)"),
        ([0, 1000, 2000], None),
    ],
)
def test_stamps_that_may_be_seconds_are_named_in_both_readings(
    stamps: list[float], words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"timestamp": stamp, "input_length": 5, "output_length": 5} for stamp in stamps]
    assert len(read_trace(written(tmp_path, jsonl(*rows))).rows) == len(stamps)
    assert len(seconds_of(caplog)) == (words is not None)
    assert words is None or words in seconds_of(caplog)[0]


def test_rows_that_are_no_requests_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As load generators write them: delays within a session, texts, hashes of 64 bits, unknown or no output."""
    turn = {"session_id": "a", "input_length": 600, "output_length": 5}
    rows: list[dict[str, Any]] = [
        turn | {"timestamp": 5000, "hash_ids": [2**63, 3]},
        turn | {"delay": 250, "hash_ids": [2**63, 2**64 - 1]},
        {"timestamp": 6000, "text_input": "x" * 40, "output_length": 2},
        {"session_id": "b", "delay": 10, "input_length": 5, "output_length": 5},
        {"timestamp": 7000, "input_length": 5},
        {"timestamp": 8000, "input_length": 5, "output_length": 0},
    ]
    found = read_trace(written(tmp_path, jsonl(*rows)))
    assert [kept.arrival_s for kept in found.rows] == [0.0, 0.25, 1.0]
    assert [kept.entry.input_tokens for kept in found.rows] == [600, 600, 10]
    first, second = found.rows[0].entry.block_ids, found.rows[1].entry.block_ids
    assert first is not None
    assert second is not None
    assert (first[0], first[1]) == (second[0], 3)
    assert len({*first, *second}) == 3
    (message,) = [message for message in caplog.messages if "skipped" in message]
    for count in ("1 requests without output_length", "1 requests without output", "1 requests with a delay after"):
        assert count in message


def test_what_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_rows_module, "MAX_UNPACKED_BYTES", 1 << 20)
    line = "1,10,5\n"
    fits = LENGTHS + line * ((1 << 20) // len(line) - 100)
    assert len(list(trace_rows(written_packed(tmp_path, fits)))) > 100_000
    too_much = written_packed(tmp_path, fits + line * 200)
    message = "trace.csv.gz: more than 1 MiB when unpacked; unpack it first if that is meant"
    for read in (lambda path: list(trace_rows(path)), read_csv):
        with pytest.raises(ValueError, match=f"^{message}$"):
            read(too_much)


def written_packed(directory: Path, text: str) -> Path:
    path = directory / "trace.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path
