"""``neaptide experiment``."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neaptide.__main__ import main as command
from neaptide.cli import main
from neaptide.commands import outputs
from neaptide_lab import command as experiment
from neaptide_lab.experiments.bros import setting
from neaptide_lab.experiments.registry import EXPERIMENT_NAMES, LOGGER, load_experiment
from neaptide_lab.experiments.result import ExperimentResult, Row


class Made:
    """An experiment with the given rows."""

    NAME = "golden"
    ABOUT = "made up"

    def __init__(self, *rows: Row, **more: Any) -> None:
        self.result = ExperimentResult("made", list(rows), **more)
        self.quick: bool | None = None

    def run(self, quick: bool) -> ExperimentResult:
        self.quick = quick
        return self.result


def use(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    monkeypatch.setattr(experiment, "load_experiment", lambda name: made)


@pytest.mark.parametrize("name", EXPERIMENT_NAMES)
def test_every_registered_experiment_is_complete(name: str) -> None:
    module = load_experiment(name)
    assert name == module.NAME
    assert module.ABOUT
    assert "\n" not in module.ABOUT
    assert callable(module.run)


def test_list_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENT_NAMES)


def test_list_imports_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys; from neaptide_lab.experiments.registry import *; "
        "[load_experiment(name).ABOUT for name in EXPERIMENT_NAMES]; "
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_an_unknown_name_gets_one_line_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "gold"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    expected = f"neaptide experiment: there is no experiment 'gold'; there are: {', '.join(EXPERIMENT_NAMES)}\n"
    assert shown.err == expected


def test_the_table_shows_paper_ours_and_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Row("speed", 3.0, 2.0, "req/s", 1, holds=True), Row("new", 1234.5678))
    use(monkeypatch, Made(*rows, notes=["[what] it means"]))
    assert main(["experiment", "golden"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [["speed", "2.0 req/s", "3.0 req/s", "1.500", "holds"], ["new", "", "1,234.57", "", ""]]
    assert "- [what] it means" in lines


def test_the_last_line_is_the_json_that_is_also_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, Made(Row("speed", 3.0, 2.0, holds=True), Row("new", 1.0), data={"series": [1, 2]}))
    assert main(["experiment", "golden", "--json", str(tmp_path / "out.json")]) == 0
    expected = {
        "experiment": "made",
        "against": "paper",
        "holds": True,
        "rows": [
            {"case": "speed", "paper": 2.0, "ours": 3.0, "ratio": 1.5, "unit": "", "holds": True},
            {"case": "new", "paper": None, "ours": 1.0, "ratio": None, "unit": ""},
        ],
        "notes": [],
        "data": {"series": [1, 2]},
    }
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected
    assert json.loads((tmp_path / "out.json").read_text()) == expected


def test_a_row_that_must_hold_and_does_not_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Made(Row("a", 1.0, holds=True), Row("b", 1.0, holds=False)))
    assert main(["experiment", "golden"]) == 1
    shown = capsys.readouterr().out
    assert "FAILS" in shown
    assert json.loads(shown.splitlines()[-1])["holds"] is False


@pytest.mark.parametrize("quick", [False, True])
def test_quick_reaches_the_experiment(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    made = Made()
    use(monkeypatch, made)
    main(["experiment", "golden", *["--quick"] * quick])
    assert made.quick is quick


def test_a_plot_without_matplotlib_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = Made()
    use(monkeypatch, made)
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    assert main(["experiment", "golden", "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install 'neaptide[plots]'" in capsys.readouterr().err
    assert made.quick is None, "it says so before it spends minutes"


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("path", "complaint"), [("missing/out.png", "no such directory"), ("made.png", "is a directory")]
)
def test_a_file_that_cannot_be_written_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    path: str,
    complaint: str,
) -> None:
    pytest.importorskip("matplotlib")
    made = Made()
    use(monkeypatch, made)
    (tmp_path / "made.png").mkdir()
    assert main(["experiment", "golden", option, str(tmp_path / path)]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert made.quick is None


@pytest.mark.parametrize("name", ["plot.xyz", "plot"])
def test_a_plot_in_an_unknown_format_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    pytest.importorskip("matplotlib")
    made = Made()
    use(monkeypatch, made)
    assert main(["experiment", "golden", "--plot", str(tmp_path / name)]) == 2
    assert ".png" in capsys.readouterr().err
    assert made.quick is None


def test_the_json_line_is_printed_though_a_file_could_not_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(monkeypatch, Made(Row("speed", 3.0)))
    monkeypatch.setattr(experiment, "check_writable", lambda path: None)
    assert main(["experiment", "golden", "--json", str(tmp_path / "gone" / "out.json")]) == 2
    shown = capsys.readouterr()
    assert "No such file or directory" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["experiment"] == "made"


@pytest.mark.parametrize(
    "option",
    [
        ["--json", "out.json"],
        ["--keep", "runs"],
        ["--plot", "out.png"],
        ["--quick"],
        ["--likely"],
        ["--cells", "OPT-30B"],
        ["--window-s", "60"],
        ["--speed", "2"],
    ],
)
def test_list_refuses_what_it_would_ignore(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "list", *option]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert option[0] in shown.err


def test_the_parts_of_an_experiment_are_told_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made()
    run = made.run

    def slow(quick: bool) -> ExperimentResult:
        logging.getLogger("neaptide_lab.experiments.made").info("policy %s", "fcfs")
        return run(quick)

    monkeypatch.setattr(made, "run", slow)
    use(monkeypatch, made)
    assert main(["experiment", "golden"]) == 0
    assert capsys.readouterr().err == "golden: policy fcfs\n"
    assert LOGGER.handlers == []


def test_what_holds_is_our_check_and_not_the_papers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Made(Row("saving", 65.42, 58.1, holds=True)))
    assert main(["experiment", "golden"]) == 0
    (header,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("┃")]
    assert [cell.strip() for cell in header.split("┃")[1:-1]] == ["case", "paper", "ours", "ratio", "our check"]


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made()

    def stopped(quick: bool) -> ExperimentResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "run", stopped)
    use(monkeypatch, made)
    assert command(["experiment", "golden"]) == 130
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "stopped\n")


def test_a_plot_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    use(monkeypatch, Made(plot=lambda figure: figure.add_subplot().plot([1, 2], [3, 4])))
    assert main(["experiment", "golden", "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_an_experiment_without_a_plot_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    use(monkeypatch, Made())
    assert main(["experiment", "golden", "--plot", str(tmp_path / "out.png")]) == 0
    assert "made has no plot" in capsys.readouterr().err


def test_nan_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Made(Row("broken", float("nan"))))
    with pytest.raises(ValueError, match="not JSON compliant"):
        main(["experiment", "golden"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["golden", "--trace", "azure_conv_2023"], "--trace goes with forecast-coverage"),
        (["golden", "--keep", "runs"], "--keep goes with tuned-rivals, quotes, bros-latency, bros-slo, bros-rt-only"),
        (["tuned-rivals", "--cells", "OPT"], "--cells goes with bros-latency, bros-slo, bros-rt-only"),
        (["tuned-rivals", "--window-s", "60"], "--window-s goes with bros-latency, bros-slo, bros-rt-only"),
        (["bros-latency", "--cells", "OPT-66B"], "there is no cell 'OPT-66B'; there are: OPT-13B, ShareGPT at 3/s; "),
        (["bros-slo", "--window-s", "1"], "the window must be of 5 s at least"),
        (["golden", "--likely"], "--likely goes with tuned-rivals, without --quick"),
        (["tuned-rivals", "--likely", "--quick"], "--likely goes with tuned-rivals, without --quick"),
        (["forecast-coverage", "--speed", "2"], "--speed goes with --trace"),
        (["forecast-coverage", "--trace", "nowhere.csv"], "no trace 'nowhere.csv'"),
        (["forecast-coverage", "--trace", "azure_conv_2023", "--speed", "100"], "is too short: the forecasts need 200"),
        (["forecast-coverage", "--trace", "azure_conv_2023", "--speed", "0"], "speed must be positive"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_part_of_a_figure_is_run_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setting, "DRAIN_S", 0.0)
    wanted = ["--cells", "LMSYS at 6/s", "--window-s", "5", "--keep", str(tmp_path / "runs")]
    assert main(["experiment", "bros-rt-only", "--quick", "--cells", "LMSYS"]) == 2
    capsys.readouterr()
    for num_run in (7, 0):
        main(["experiment", "bros-slo", "--quick", *wanted])
        shown = capsys.readouterr()
        assert len(shown.err.splitlines()) == num_run
        found = json.loads(shown.out.splitlines()[-1])
        assert list(found["data"]["runs"]) == ["OPT-13B, LMSYS at 6/s"]
        assert found["data"]["settings"]["window_s"] == 5.0


def test_a_trace_of_the_users_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mine.csv"
    rows = "".join(f"{k * 0.5},{100 + k % 7},{20 + k % 5}\n" for k in range(500))
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    plot = ["--plot", str(tmp_path / "out.svg")]
    assert main(["experiment", "forecast-coverage", "--trace", str(trace), *plot]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"][0]["case"] == "mine.csv: mu + 2 sigma, moments of the next 30 s"
    assert found["data"]["traces"][0]["seconds"] == 250 - 30 - 100
    assert (tmp_path / "out.svg").read_text().count("mine.csv") >= 1


@pytest.mark.parametrize("name", ["tuned-rivals", "bros-latency"])
def test_a_file_that_is_no_sweep_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("a,b\n1,2\n")
    assert main(["experiment", name, "--keep", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{file}: line 1 is not a run of this experiment" in shown.err
    assert file.read_text() == "a,b\n1,2\n"
