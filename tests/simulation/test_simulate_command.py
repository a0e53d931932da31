"""``neaptide simulate`` from the outside."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main
from neaptide.commands.simulate_tables import short_names
from neaptide.engine.record.step_log import AddLine, HeaderLine, read_log
from neaptide.estimator.device_profile import save_profile
from neaptide.simulation.replay import replay
from tests.simulation.scenes import profile

TRACE = "arrival_s,input_tokens,output_tokens,client\n0.1,20,3,a\n0.2,30,1,b\n0.6,9,4,a\n1.8,9,4,a\n"
"""Short, for rows are refilled all the time, some hundred steps a second."""
KEYS = {
    "valid": None,
    "policy": None,
    "profile": None,
    "seed": None,
    "settings": None,
    "steps": None,
    "online": {
        "requests": None,
        "ttft_s": {"p50", "p90", "p99"},
        "tpot_s": {"p50", "p90", "p99"},
        "itl_s": {"p50", "p90", "p99"},
        "longest_gap_s": None,
        "normalized_latency_s": None,
        "attainment": {"ttft", "tpot", "both", "both_from_arrival"},
        "goodput_rps": None,
    },
    "offline": {
        "requests_completed": None,
        "tokens_per_s": None,
        "output_tokens_per_s": None,
        "computed_tokens_per_s": None,
        "makespan_s": None,
        "longest_wait_s": None,
        "deadline_misses": None,
        "bound_tokens_per_s": {"long_run", "window", "in_time"},
    },
    "kv": {
        "hit_ratio": None,
        "online_hit_ratio": None,
        "saving_ratio": None,
        "saving_ratio_bound": None,
        "occupancy_by_class": None,
    },
    "preemptions": {"count_by_class", "count_by_kind", "recomputed_tokens", "swapped_blocks"},
    "wasted_tokens": None,
    "scheduler_ms": {"mean", "p99"},
    "prediction": {"mape", "coverage"},
    "peak_memory_bytes": None,
    "wall_s": None,
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A small trace and batch file on a small profile."""
    (tmp_path / "trace.csv").write_text(TRACE)
    save_profile(profile(num_blocks=64, block_size=16), tmp_path / "profile.json")
    lines = [
        {
            "custom_id": str(k),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "max_tokens": 5,
                "messages": [{"role": "user", "content": f"number {k}: " + "x" * 99}],
            },
        }
        for k in range(30)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"--profile": "profile.json", "--online": "trace.csv", "--offline": "batch.jsonl"}
    return ["simulate", *(text for flag, name in files.items() for text in (flag, str(tmp_path / name)))]


def assert_keys(result: dict[str, object], keys: dict[str, object]) -> None:
    assert result.keys() == keys.keys()
    for name, inner in keys.items():
        value = result[name]
        if isinstance(inner, set):
            assert isinstance(value, dict)
            assert value.keys() == inner
        elif isinstance(inner, dict):
            assert isinstance(value, dict)
            assert_keys(value, inner)


def test_the_last_line_is_the_result_with_every_key(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert_keys(result, KEYS)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert result["online"]["requests"] == 4
    assert any("online requests" in line and "4" in line for line in table)


def test_window_and_speed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--online-window", "0.2:1.8", "--speed", "2"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["online"]["requests"] == 2


def test_what_clients_ask_for_can_be_capped(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs of 3, 1, 4 and 4 tokens in the trace, and 30 of 5 in the batch file."""
    log = tmp_path / "log"
    assert main([*arguments, "--max-tokens", "3", "--step-log", str(log)]) == 0
    assert "32 requests have more output than the limit" in capsys.readouterr().err
    assert {line.max_tokens for line in read_log(log) if isinstance(line, AddLine)} == {3}


def test_the_context_can_be_set(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 20, 30, 9 and 9 tokens; a cut answer does not end the way of the others."""
    log = tmp_path / "log"
    assert main([*arguments, "--offline", "none", "--max-model-len", "22", "--step-log", str(log)]) == 0
    err = capsys.readouterr().err
    assert "1 requests exceed 22 tokens" in err
    assert "1 requests have more output than the limit" in err
    assert [line.max_tokens for line in read_log(log) if isinstance(line, AddLine)] == [2, 13, 13]


def test_log_trace_and_explanation(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, trace = tmp_path / "log.gz", tmp_path / "trace.json"
    outputs = ["--step-log", str(log), "--chrome-trace", str(trace)]
    assert main([*arguments, "--online-window", "0:0.4", *outputs, "--explain", "3"]) == 0
    assert "step 3 at " in capsys.readouterr().out
    assert replay(log).difference is None
    assert json.loads(trace.read_text())["traceEvents"]


def test_online_alone_and_offline_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--offline", "none"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["offline"]["tokens_per_s"] == 0
    assert main([*arguments, "--online", "none"]) == 0
    ceiling = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ceiling["online"]["requests"] == 0
    assert ceiling["offline"]["tokens_per_s"] > 0


def test_several_policies_make_a_row_each_and_one_of_online_alone(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--policy", "fcfs@64,priority@128x2,neaptide", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
    assert main([*arguments, *flags, "--json", str(tmp_path / "out.json")]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    results = json.loads(last)
    assert results == json.loads((tmp_path / "out.json").read_text())
    limits = [(r["name"], r["settings"]["max_num_batched_tokens"], r["settings"]["max_num_seqs"]) for r in results]
    assert limits == [
        ("fcfs@64", 64, 8),
        ("priority@128x2", 128, 2),
        ("neaptide", 256, 8),
        ("fcfs@64, online alone", 64, 8),
    ]
    assert [r["offline"]["tokens_per_s"] > 0 for r in results] == [True, True, True, False]
    shown = [line.strip() for line in table]
    assert all(any(line.startswith(name.partition(",")[0]) for line in shown) for name, *_ in limits)
    # Both of its rows among the chats, of which the longer name may be folded, and one of offline work.
    assert sum(line.startswith("fcfs@64") for line in shown) == 3
    assert max(map(len, table)) <= 80
    assert not any("…" in line for line in table), "a heading or a number is cut"
    assert any(line.startswith("Best: ") for line in shown)


def test_a_long_name_loses_its_module_unless_two_would_be_the_same() -> None:
    assert short_names(["fcfs", "a.b:Mine@512", "c:Yours"]) == ["fcfs", "Mine@512", "Yours"]
    assert short_names(["a:Mine", "b:Mine"]) == ["a:Mine", "b:Mine"]


def test_policies_are_drawn(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--policy", "fcfs,neaptide", "--plot", str(tmp_path / "out.svg")]) == 0
    assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize("without", ["--online", "--offline"])
def test_what_a_run_lacks_is_not_drawn(without: str, arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*arguments, without, "none", "--plot", str(tmp_path / "out.svg")]) == 0
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_picture_says_what_it_shows(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr("neaptide.commands.simulate.draw", lambda plot, path: drawn.append(plot))
    assert main([*arguments, "--policy", "fcfs,neaptide", "--plot", str(tmp_path / "out.svg")]) == 0
    figure = figures.Figure()
    drawn[0](figure)
    assert "TTFT target 1 s, TPOT target 50 ms" in figure.get_suptitle()
    assert [axes.get_title() for axes in figure.axes] == ["Offline work", "Waits for the first token"]
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert set(labels[0]) == {"offline work", "no policy can exceed"}
    assert labels[1] == ["fcfs", "neaptide", "fcfs, online alone", "TTFT target"]


def test_the_row_of_online_alone_needs_both_kinds_of_work(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--policy", "fcfs,priority", "--online", "none"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["name"] for result in results] == ["fcfs", "priority"]


def test_a_policy_alone_may_have_limits_of_its_own(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--policy", "fcfs@64x3"]) == 0
    settings = json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]
    assert (settings["max_num_batched_tokens"], settings["max_num_seqs"]) == (64, 3)


def test_offline_work_may_run_before_the_first_arrival(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert main([*arguments, "--warm-up-s", "1.4", "--step-log", str(log)]) == 0
    assert "window 1.5 to 3.2 s" in capsys.readouterr().out
    assert [line.arrival_s for line in read_log(log) if isinstance(line, AddLine)] == pytest.approx(
        [1.5, 1.6, 2.0, 3.2]
    )


def test_noise_and_headroom_reach_the_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    assert main([*arguments, "--noise", "0.1", "--headroom", "fixed@25", "--step-log", str(log)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prediction"]["mape"] > 0.01
    header = next(iter(read_log(log)))
    assert isinstance(header, HeaderLine)
    assert header.recipe["headroom"] == "fixed@25"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "best"], "there is no policy 'best'"),
        (["--policy", "fcfs,best@64"], "there is no policy 'best'"),
        (["--policy", "fcfs,"], "NAME@STEP_TOKENSxSLOTS, not ''"),
        (["--policy", "fcfs@x8"], "not 'fcfs@x8'"),
        (["--policy", "fcfs@64x0"], "limits of 'fcfs@64x0' must be at least 1"),
        (["--policy", "fcfs,priority", "--explain", "0"], "use them with one policy"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--noise", "-0.1"], "--noise must be at least 0"),
        (
            ["--headroom", "best"],
            "there are: fixed, mu-sigma, quantile, conformal, two-speed, near; all but mu-sigma also as",
        ),
        (["--headroom", "mu-sigma@2"], "no headroom predictor 'mu-sigma@2'"),
        (["--headroom", "fixed@101"], "headroom fixed@101: the percentage must be a number from 0 to 100"),
        (["--headroom", "fixed@half"], "must be a number from 0 to 100"),
        (["--headroom", "two-speed@100"], "must be a number above 0 and below 100"),
        (["--warm-up-s", "-1"], "--warm-up-s must be at least 0"),
        (["--planning-scale", "-1"], "--planning-scale must be at least 0"),
        (["--online", "nowhere"], "no trace 'nowhere'"),
        (["--offline", "nothing"], "no offline set 'nothing'"),
        (["--offline", "none", "mmlu"], "cannot be combined with other"),
        (["--profile", "abacus"], "no profile 'abacus'"),
        (["--online-window", "ten"], "A:B"),
        (["--online-window", "100:200"], "in the window"),
        (["--online-window", "5:1"], "no length"),
        (["--online", "none", "--online-window", "1:2"], "needs --online"),
        (["--online", "none", "--offline", "none"], "neither online nor offline"),
        (["--speed", "0"], "--speed must be positive"),
        (["--tpot-slo-s", "-1"], "--tpot-slo-s must be positive"),
        (["--tpot-slo-s", "inf"], "--tpot-slo-s must be positive and finite"),
        (["--ttft-slo-s", "inf", "--policy", "fcfs,priority"], "--ttft-slo-s must be positive and finite"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--overlap-kappa", "2"], "--overlap-kappa must be from 0 to 1"),
        (["--overlap-kappa", "nan"], "--overlap-kappa must be from 0 to 1"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--json", "/nowhere/out.json"], "/nowhere: no such directory"),
        (["--step-log", "/nowhere/log"], "/nowhere: no such directory"),
        (["--offline", "bros-be", "bros-be-64"], "cannot be mixed"),
        (["--max-model-len", "1"], "no online request and its answer fit into a context of 1 tokens"),
        (
            ["--offline-arrivals", "0@5"],
            "--offline-arrivals must be ROWS@SECONDS, such as 100@60, or recorded, not '0@5'",
        ),
        (["--offline-arrivals", "5@0"], "ROWS@SECONDS"),
        (["--offline", "bbh", "--offline-arrivals", "recorded"], "'bbh' has no recorded arrivals"),
        (["--offline", "none", "--offline-arrivals", "5@1"], "--offline-arrivals needs --offline"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("neaptide simulate: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--policy", "best"],
        ["--speed", "0"],
        ["--offline", "bros-be", "bros-be-64"],
        ["--max-model-len", "1"],
        ["--online", "none", "--offline", "none"],
    ],
)
def test_a_refused_command_leaves_no_file(
    flags: list[str], arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    outputs = ("--json", "result.json"), ("--step-log", "steps.jsonl"), ("--chrome-trace", "trace.json")
    asked = [text for flag, name in outputs for text in (flag, str(tmp_path / name))]
    assert main([*arguments, *flags, *asked]) == 2
    assert capsys.readouterr().out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_pool_that_runs_dry_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from neaptide.commands import simulate as command
    from tests.simulation.scenes import constant, offline, online

    scenario = constant(online((0.0, 4, 1), (5.0, 4, 1)), [offline((0, 4, 5))], refill=False)
    monkeypatch.setattr(command, "_scenario", lambda args: scenario)
    assert main(["simulate"]) == 0
    captured = capsys.readouterr()
    assert "the offline pool ran out of work at 0.0 s" in captured.err
    assert "NOT VALID" in captured.out
    assert json.loads(captured.out.splitlines()[-1])["valid"] is False


def test_offline_rows_may_arrive_in_parts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--online", "none", "--offline-arrivals", "20@30"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 30 < result["offline"]["makespan_s"] < 35
    assert result["valid"]


def test_an_offline_trace_arrives_as_recorded(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offline = ["--offline", str(tmp_path / "trace.csv"), "--offline-arrivals", "recorded"]
    assert main([*arguments, "--online", "none", *offline]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 1.8 < result["offline"]["makespan_s"] < 2.0


def test_an_unsorted_trace_is_said_on_stderr(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "trace.csv").write_text(TRACE + "0.0,5,5,a\n")
    done = subprocess.run([sys.executable, "-m", "neaptide", *arguments], capture_output=True, text=True)
    assert "trace.csv: 1 of 5 rows come after a later one: sorted by arrival\n" in done.stderr
