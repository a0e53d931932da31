"""``neaptide loadgen`` from the outside."""

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.cli import main
from neaptide.commands.loadgen.flags import add_common, add_synth, shots_of
from neaptide.commands.loadgen.view import RunView
from neaptide.loadgen.percentiles import percentiles
from neaptide.loadgen.run.runner import Progress
from neaptide.loadgen.workloads.traces import TraceRequest
from tests.loadgen.fake_server import FakeServer, fake_server

SYNTH = [
    "--rate",
    "200",
    "--duration",
    "0.05",
    "--output-tokens",
    "2",
    "--input-tokens",
    "30",
    "--target",
    "60000:60000",
]
TRACE = "arrival_s,input_tokens,output_tokens\n0.0,20,2\n0.02,30,3\n5.0,30,3\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as state:
        yield state


@pytest.fixture
def report(tmp_path: Path) -> list[str]:
    return ["--html", str(tmp_path / "out.html"), "--json", str(tmp_path / "out.json")]


def test_made_load_ends_in_a_table_a_json_and_a_page(
    server: FakeServer, report: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadgen", "synth", "--server", f"{server.url}/v1", *SYNTH, *report]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    (figures,) = found["servers"].values()
    assert figures["requests"] == len(server.bodies) > 0
    assert figures["attainment"]["both"] == 1.0
    assert "TTFT p50, ms" in out
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert "<svg" in (tmp_path / "out.html").read_text()


def test_every_request_is_a_line_of_the_records(server: FakeServer, report: list[str], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert main(["loadgen", "synth", "--server", server.url, *SYNTH, *report, "--records", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (figures,) = json.loads((tmp_path / "out.json").read_text())["servers"].values()
    assert len(lines) == len(server.bodies) == figures["requests"]
    for name in ("ttft_ms", "ttft_from_sending_ms", "tpot_ms", "e2e_ms", "late_ms"):
        found = percentiles(line[name] for line in lines)
        assert found._asdict() == pytest.approx(figures[name], abs=0.006)
    arrivals_s = [line["arrival_s"] for line in lines]
    assert arrivals_s == sorted(arrivals_s)
    assert {(line["output_tokens"], line["target_ms"], line["error"]) for line in lines} == {(2, "60000:60000", None)}
    refused = ["loadgen", "synth", "--server", server.url, *SYNTH, *report, "--records", str(tmp_path)]
    assert main(refused) == 2


def test_a_window_of_a_trace_is_replayed_at_a_speed(server: FakeServer, report: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "mine"
    trace.write_text(TRACE)
    flags = ["--window", "0:1", "--speed", "2", "--server", server.url, "--endpoint", "completions"]
    assert main(["loadgen", "replay", str(trace), *flags, *report]) == 0
    assert sorted(body["max_tokens"] for body in server.bodies) == [2, 3]
    assert sorted(len(body["prompt"].split()) for body in server.bodies) == [19, 29]


def test_the_key_is_sent_and_not_written(server: FakeServer, report: list[str], tmp_path: Path) -> None:
    assert main(["loadgen", "synth", "--server", server.url, "--api-key", "sekret", *SYNTH, *report]) == 0
    assert server.keys == {"Bearer sekret"}
    assert "sekret" not in (tmp_path / "out.html").read_text() + (tmp_path / "out.json").read_text()


def test_servers_get_the_same_load_and_ratios(
    server: FakeServer, report: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as other:
        servers = ["--server", f"A={server.url}", "--server", f"B={other.url}"]
        assert main(["loadgen", "compare", *servers, *SYNTH, *report]) == 0
        prompts = [sorted(str(body["messages"]) for body in one.bodies) for one in (server, other)]
    assert prompts[0] == prompts[1] != []
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert list(found["servers"]) == ["A", "B"]
    assert set(found["ratios"]["A"].values()) == {1.0, None}
    assert "over A" in out
    page = (tmp_path / "out.html").read_text()
    assert "<h2>B</h2>" in page
    assert "<h2>Over A</h2>" in page
    assert page.count("<td>1.000</td>") >= 1


def test_one_server_under_two_names_is_told(report: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    servers = ["--server", "A=http://127.0.0.1:9", "--server", "B=http://127.0.0.1:9/v1"]
    assert main(["loadgen", "compare", *servers, *SYNTH, *report]) == 1
    assert "both names are one server: the second run finds the first run's prompts" in capsys.readouterr().err


def test_a_salt_asks_for_the_same_load_in_other_words() -> None:
    def requests(*words: str) -> list[TraceRequest]:
        parser = argparse.ArgumentParser()
        add_synth(parser)
        add_common(parser)
        parser.set_defaults(trace=None)
        return [shot.request for shot in shots_of(parser.parse_args([*SYNTH, *words]))]

    plain, again = requests(), requests("--salt", "again")
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in plain] == [
        (r.arrival_s, r.input_tokens, r.output_tokens) for r in again
    ]
    assert not {r.segments for r in plain} & {r.segments for r in again}


def test_a_failed_run_is_told_and_its_report_written(
    server: FakeServer, report: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fails_every = 1
    assert main(["loadgen", "synth", "--server", server.url, *SYNTH, *report]) == 1
    assert "requests failed: HTTP 503" in capsys.readouterr().err
    assert "overloaded" in (tmp_path / "out.html").read_text()


def test_a_batch_that_fails_says_why_in_words(
    server: FakeServer, report: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"url": "/v1/completions"}\n')
    wrong = [{"line": k + 1, "message": "Not this model.", "code": "model_not_found"} for k in range(5)]
    server.batch |= {"status": "failed", "errors": {"object": "list", "data": wrong}}
    assert main(["loadgen", "synth", "--server", server.url, *SYNTH, *report, "--batch", str(file)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("neaptide loadgen: the batch is failed: line 1: Not this model. (model_not_found); line 2: ")
    assert said.endswith("; 2 more")


def test_a_model_without_a_chat_template_is_asked_with_prompts(
    server: FakeServer, report: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.has_template = False
    assert main(["loadgen", "synth", "--server", server.url, *SYNTH, *report]) == 1
    assert capsys.readouterr().err.endswith("; use --endpoint completions, which needs none\n")
    assert main(["loadgen", "synth", "--server", server.url, "--endpoint", "completions", *SYNTH, *report]) == 0


def test_what_the_client_cannot_know_is_said(
    server: FakeServer, report: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.can_tokenize = False
    assert main(["loadgen", "synth", "--server", server.url, *SYNTH, *report]) == 0
    assert "prompt lengths are approximate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["replay", "nowhere.csv"], "no trace 'nowhere.csv'"),
        (["replay", "azure_conv_2023", "--window", "5"], "--window must be two numbers A:B in seconds, not '5'"),
        (["replay", "azure_conv_2023", "--max-input-tokens", "1"], "--max-input-tokens excludes every request"),
        (["replay", "azure_conv_2023", "--speed", "nan"], "speed must be positive"),
        (["synth", "--rate", "0"], "--rate must be positive"),
        (["synth", "--target", "5"], "a target is TTFT_MS:TPOT_MS"),
        (["synth", "--cancel-share", "2"], "--cancel-share must be from 0 to 1"),
        (["synth", "--cancel-within-s", "0"], "--cancel-within-s must be positive"),
        (["synth", "--users", "0"], "--users must be at least 1"),
        (["synth", "--think-s", "-1"], "--think-s must be at least 0"),
        (["synth", "--body", "[1]"], "--body is not a JSON object"),
        (["synth", "--body", "{"], "--body is not JSON"),
        (["synth", "--batch", "/nowhere"], "/nowhere: No such file or directory"),
        (["synth", "--batch", __file__], "the first line is not a batch request"),
        (["synth", "--html", "/nowhere/out.html"], "/nowhere: no such directory"),
        (["synth", "--server", "localhost:8000"], "is not a server URL such as http://"),
        (["synth", "--prefixes", "-1"], "--prefixes must be at least 0"),
        (["synth", "--api-key", "schlüssel"], "--api-key: there must be one key, in printable ASCII characters"),
        (["synth", "--warm-up-s", "nan"], "--warm-up-s must be at least 0"),
        (
            ["replay", "azure_conv_2023", "--window", "0:5", "--warm-up-s", "5"],
            "--warm-up-s excludes every request",
        ),
        (["compare", "--server", "http://a"], "--server must be NAME=URL"),
        (["compare", "--server", "A=http://a"], "compare needs at least two servers"),
        (["compare", "--server", "A=http://a", "--server", "A=http://b"], "two servers are called 'A'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadgen", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("neaptide loadgen: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, report: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loadgen", "synth", "--server", "http://127.0.0.1:9", *SYNTH, *report]) == 1
    complaint = capsys.readouterr().err
    assert "ConnectError" in complaint
    assert complaint.endswith("; start a server with: neaptide serve\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_reports_what_has_ended(
    number: signal.Signals,
    server: FakeServer,
    report: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = tmp_path / "mine"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,20,2\n1000000.0,30,3\n")

    def interrupt_after_an_answer(_: RunView, progress: Progress) -> None:
        if progress.records and not progress.was_stopped:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunView, "update", interrupt_after_an_answer)
    words = ["loadgen", "replay", str(trace), "--server", server.url, *report]
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            main(words)
    else:
        assert main(words) == 143
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    (figures,) = found["servers"].values()
    assert (found["partial"], figures["requests"]) == (True, 1)
    assert "stopped: the results are partial, of 1 of 2 requests" in captured.err
    assert "partial: stopped" in (tmp_path / "out.html").read_text()
