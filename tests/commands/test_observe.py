"""``neaptide observe`` from the outside."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main
from neaptide.commands.server_process import free_port
from neaptide.observation.forecast import ForecastQuestion
from neaptide.observation.record import RecordError, read_record
from neaptide.observation.step_times import InferredStepTimes, fit_step_times
from tests.observation.metrics_server import MetricsServer, metrics_server
from tests.observation.pretended import VllmMetrics, recorded
from tests.observation.scenes import watched

FEW = ["--draws", "1", "--simulate-s", "12", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
TARGETS = ["--ttft-slo-s", "1.5", "--tpot-slo-s", "0.3"]


@dataclass(slots=True)
class Outcome:
    said: dict[str, Any]
    page: str
    out: str
    err: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("observe")
    record, html, said = folder / "record.jsonl", folder / "o.html", folder / "o.json"
    recorded(watched().truth, record)
    patch = pytest.MonkeyPatch()
    lines: dict[str, list[str]] = {"out": [], "err": []}
    with patch.context() as context:
        for name in lines:
            context.setattr(f"sys.std{name}", _Kept(lines[name]))
        assert main(["observe", str(record), *FEW, *TARGETS, "--html", str(html), "--json", str(said)]) == 0
    return Outcome(json.loads(said.read_text()), html.read_text(), "".join(lines["out"]), "".join(lines["err"]))


class _Kept:
    """A stream that is no terminal."""

    encoding = "utf-8"

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def write(self, text: str) -> int:
        self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_a_sentence_comes_first_then_a_table_then_json(outcome: Outcome) -> None:
    assert outcome.out.startswith("With Neaptide inside vLLM, ")
    table = [line for line in outcome.out.splitlines()[1:-1] if not line.startswith("- ")]  # warnings wrap
    assert "Neaptide instead of vLLM" in " ".join(" ".join(line[:20] for line in table).split())
    assert max(map(len, table)) <= 80
    assert json.loads(outcome.out.splitlines()[-1]) == outcome.said


def test_the_page_loads_nothing_and_says_what_the_json_says(outcome: Outcome) -> None:
    assert outcome.said["sentence"] in unescape(outcome.page)
    assert not re.search(r"<script|src=|<link|url\(|@import", outcome.page)
    assert "default-src 'none'" in outcome.page
    assert "<svg" in outcome.page
    for heading in ("What this rests on", "What would show that it is wrong", "What this page does not say"):
        assert f"<h2>{heading}</h2>" in outcome.page


def test_every_option_has_its_intervals(outcome: Outcome) -> None:
    options = {option["name"]: option for option in outcome.said["forecast"]["options"]}
    assert {"alone", "inside", "instead", "fcfs"} < set(options)
    assert outcome.said["forecast"]["best_priority"] in options
    for option in options.values():
        for name in ("attainment", "batch_tokens_per_s"):
            assert option[name]["low"] <= option[name]["value"] <= option[name]["high"]


def test_assumptions_and_what_would_show_an_error_are_named(outcome: Outcome) -> None:
    said = outcome.said
    assert any("drawn inside vLLM's buckets" in each for each in said["assumptions"])
    assert any("16,000 tokens, as the server says" in each for each in said["assumptions"])
    assert any("at least 400 such chats" in each for each in said["falsifiers"])
    assert {each["name"] for each in said["checks"]} == {"gap between tokens", "TTFT"}


def test_the_replayed_gap_is_near_the_recorded_one(outcome: Outcome) -> None:
    (gap,) = (each for each in outcome.said["checks"] if each["name"] == "gap between tokens")
    assert gap["replayed_s"] == pytest.approx(gap["recorded_s"], rel=0.1)


def test_the_wait_for_the_step_in_progress_is_not_added_to_what_is_simulated(outcome: Outcome) -> None:
    assert outcome.said["observed"]["overhead_s"] > 0.05  # vLLM counts that wait in neither queue nor steps
    assert outcome.said["forecast"]["overhead_s"] < 0.02
    (ttft,) = (each for each in outcome.said["checks"] if each["name"] == "TTFT")
    assert ttft["replayed_s"] == pytest.approx(ttft["recorded_s"], rel=0.15)


@pytest.mark.parametrize(("error", "noise"), [(0.07, 0.07), (2.0, 0.3), (math.nan, 0.0)])
def test_simulated_steps_scatter_by_what_the_fit_does_not_explain(
    error: float, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ForecastQuestion] = []

    def fitted(*arguments: Any) -> InferredStepTimes:
        return replace(fit_step_times(*arguments), error=error)

    def forecast(question: ForecastQuestion, watch: object) -> None:
        asked.append(question)
        raise RecordError("seen enough")

    monkeypatch.setattr("neaptide.commands.observe.fit_step_times", fitted)
    monkeypatch.setattr("neaptide.commands.observe.forecast", forecast)
    record = tmp_path / "record.jsonl"
    recorded(watched().truth, record)
    assert main(["observe", str(record), *FEW, *TARGETS, "--html", str(tmp_path / "o.html")]) == 1
    assert [one.base.step_noise for one in asked] == [noise]


def test_a_trace_needs_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.1,20,3\n")
    assert main(["observe", str(trace), "--html", str(tmp_path / "o.html")]) == 2
    assert capsys.readouterr().err == (
        f"neaptide observe: {trace} is a trace, which says nothing of step times: add --profile\n"
    )


def test_what_a_trace_and_a_profile_give_is_simulated_once(tmp_path: Path) -> None:
    trace, said = tmp_path / "trace.csv", tmp_path / "o.json"
    rows = "".join(f"{0.2 * k:.1f},20,3\n" for k in range(24))
    trace.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    flags = ["--profile", "cpu-111m", "--max-num-seqs", "8", "--max-replicas", "1", "--simulate-s", "3"]
    assert main(["observe", str(trace), *flags, "--html", str(tmp_path / "o.html"), "--json", str(said)]) == 0
    assert json.loads(said.read_text())["forecast"]["draws"] == 0


# ---- servers ----


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics, pages = VllmMetrics(100, 16), []
    for _ in range(3):
        metrics["prompt_tokens"].inc(10)
        pages.append(metrics.page())
    with metrics_server(pages) as state:
        yield state


def test_a_server_is_recorded_into_a_file(server: MetricsServer, tmp_path: Path) -> None:
    out = tmp_path / "record.jsonl"
    flags = ["--for", "1s", "--every-s", "0.5", "--record-only", "--out", str(out), "--api-key", "sk-1"]
    assert main(["observe", f"{server.url}/v1", *flags]) == 0
    assert len(read_record(out).intervals) == 2
    assert server.keys == {"Bearer sk-1"}


def test_too_few_chats_are_refused_in_one_line(
    server: MetricsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--for", "1s", "--every-s", "0.5", "--html", str(tmp_path / "o.html"), "--out", str(tmp_path / "record")]
    assert main(["observe", server.url, *flags]) == 1
    assert "too few steps with streams were recorded" in capsys.readouterr().err
    assert not (tmp_path / "o.html").exists()


def test_a_server_that_is_away_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["observe", url, "--html", str(tmp_path / "o.html")]) == 1
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("neaptide observe"))
    assert said.startswith(f"neaptide observe: {url}/metrics: ")


def test_a_server_without_series_of_vllm_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with metrics_server(["python_info 1.0\n"]) as state:
        assert main(["observe", state.url, "--html", str(tmp_path / "o.html")]) == 1
    assert "/metrics: there is no series of vLLM\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--every-s", "0"], "--every-s must be at least 0.1, and at most the time of --for"),
        (["--draws", "51"], "--draws must be from 0 to 50"),
        (["--speed", "0"], "--speed must be positive and finite"),
        (["--out", "/nowhere/record"], "/nowhere: no such directory"),
        (["--batch", "mmlu", "--batch-lengths", "1", "1"], "--batch and --batch-lengths exclude each other"),
        (["--batch-lengths", "x", "1"], "lengths are N, uniform:LOW:HIGH or lognormal:MEAN:DEVIATION in tokens"),
        (["--profile", "nothing"], "no profile 'nothing'"),
        (["--html", "/nowhere/o.html"], "/nowhere: no such directory"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--attainment", "1.5"], "--attainment must be above 0 and at most 1"),
    ],
)
def test_wrong_flags_are_refused_before_the_server_is_asked(
    flags: list[str], message: str, server: MetricsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["observe", server.url, *flags]) == 2
    assert message in capsys.readouterr().err
    assert server.paths == []


def test_a_file_that_does_not_exist_is_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--profile", "h100-80g-llama-3.1-8b", "--html", str(tmp_path / "o.html")]
    assert main(["observe", "nothing.jsonl", *flags]) == 2
    assert "no trace 'nothing.jsonl'" in capsys.readouterr().err
