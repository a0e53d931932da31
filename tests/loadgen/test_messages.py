"""What is said of a trace or an offline set that cannot be used: which file, which line, what else there is."""

import gzip
from pathlib import Path

import pytest

from neaptide.loadgen.workloads.offline_sets import load_offline, offline_names
from neaptide.loadgen.workloads.online_sets import generated_online_names, online_requests
from neaptide.loadgen.workloads.traces import load_online, online_names

FINE = '{"body": {"prompt": "fine"}}\n'


def complaint_about(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the callers compare the whole message
        load_offline(path, seed=1)
    return str(raised.value)


def test_a_line_that_is_not_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    # the empty line counts
    assert complaint_about(tmp_path / "bad.jsonl", FINE + "\nhello") == (
        "bad.jsonl, line 3: not JSON: Expecting value, character 1"
    )


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    assert complaint_about(tmp_path / "bad.jsonl", FINE + "[1]") == "bad.jsonl, line 2: not a JSON object"


def test_a_binary_file_is_named(tmp_path: Path) -> None:
    assert complaint_about(tmp_path / "bad.bin", b"\xff\xfe\x00") == "bad.bin, line 1: not text in UTF-8"


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    content = gzip.compress(b"cut off" * 99, mtime=0)[:30]
    assert complaint_about(tmp_path / "bad.jsonl.gz", content) == "bad.jsonl.gz: not a gzip file, or truncated"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_offline_file_is_refused(tmp_path: Path, content: str) -> None:
    assert complaint_about(tmp_path / "empty.jsonl", content) == "empty.jsonl has no requests"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"custom_id": "1"}', "'body' is missing"),
        ('{"body": {"model": "m"}}', "'messages, prompt or input' is missing"),
        ('{"body": {"messages": [{"role": "user"}]}}', "'content' is missing"),
        ('{"body": {"messages": [1]}}', "a field has the wrong type"),
        ('{"body": {"prompt": [1, "a"]}}', "a field has the wrong type"),
        ('{"body": {"prompt": ""}}', "the prompt is empty"),
    ],
)
def test_a_line_that_is_no_request_is_told_without_an_exceptions_name(
    tmp_path: Path, line: str, complaint: str
) -> None:
    assert complaint_about(tmp_path / "jobs.jsonl", line) == f"jobs.jsonl, line 1: not a request: {complaint}"


@pytest.mark.parametrize(
    ("limit", "complaint"),
    [
        ('"many"', "'many' is not a number"),
        ("-5", "-5 is negative"),
        ("0", "a length must be at least 1, not 0"),
        ("NaN", "nan is not finite"),
        ("1.5", "1.5 is not a whole number"),
        ("true", "True is not a number"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_told_by_line_and_column(tmp_path: Path, limit: str, complaint: str) -> None:
    line = f'{{"body": {{"prompt": "p", "max_tokens": {limit}}}}}'
    said = complaint_about(tmp_path / "jobs.jsonl", FINE + line)
    assert said == f"jobs.jsonl, line 2, column max_tokens: {complaint}"


def test_a_name_that_stands_twice_in_a_line_is_told(tmp_path: Path) -> None:
    said = complaint_about(tmp_path / "jobs.jsonl", FINE + '{"body": {"prompt": "a", "prompt": "b"}}')
    assert said == "jobs.jsonl, line 2, column prompt: occurs twice"


@pytest.mark.parametrize(
    "content", [gzip.compress(FINE.encode(), mtime=0), b"\xef\xbb\xbf" + FINE.encode()], ids=["gzip", "bom"]
)
def test_a_batch_file_is_read_whatever_its_name_says(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.txt"
    path.write_bytes(content)
    (request,) = load_offline(path, seed=1).requests
    assert (request.input_tokens, request.output_tokens) == (1, 256)


def test_a_prompt_of_a_few_characters_is_a_token(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"body": {"prompt": "Hi", "max_tokens": null, "max_completion_tokens": 7}}\n')
    (request,) = load_offline(path, seed=1).requests
    assert (request.input_tokens, request.output_tokens) == (1, 7)


def test_an_unknown_offline_set_lists_names_and_patterns() -> None:
    with pytest.raises(ValueError, match="bros-be-N, batchllm-P-O-sD, blend-RHO-S") as raised:
        load_offline("nosuch", seed=1)
    assert all(name in str(raised.value) for name in offline_names())


def test_an_unknown_online_set_lists_recorded_and_synthetic_names() -> None:
    with pytest.raises(ValueError, match="NAME@RATE") as raised:
        online_requests("nosuch")
    assert all(name in str(raised.value) for name in (*online_names(), *generated_online_names()))


def test_a_recorded_trace_takes_no_rate() -> None:
    with pytest.raises(ValueError, match="azure_conv_2023@2: a recorded trace has no rate"):
        online_requests("azure_conv_2023@2")


@pytest.mark.parametrize(("rate", "complaint"), [("fast", "is a number"), ("nan", "positive"), ("inf", "positive")])
def test_a_rate_is_a_positive_number(rate: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        online_requests(f"bros-rt-lmsys@{rate}")


@pytest.mark.parametrize(
    ("window_s", "complaint"),
    [
        ((-5.0, 10.0), "window -5:10 starts before the trace, which starts at 0"),
        ((float("nan"), 10.0), "starts before"),
        ((5.0, float("nan")), "has no length"),
        ((5000.0, 6000.0), "no request lies in the window 5000:6000: the last one arrives at 1740.0 s"),
    ],
)
def test_a_window_that_holds_nothing_is_refused(window_s: tuple[float, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_online("azure_conv_2023", window_s=window_s)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "mine.csv has no requests"),
        ("arrival_s,input_tokens\n1,2\n", "unknown format, with the columns arrival_s, input_tokens; known"),
        ("arrival_s,input_tokens,output_tokens\n1,many,2\n", "line 2, column input_tokens: 'many' is not a number"),
    ],
)
def test_a_trace_file_with_a_bad_row_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        load_online(path)
