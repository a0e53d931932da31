"""``neaptide plan`` from the outside."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neaptide.cli import main
from neaptide.cluster.capacity import tuning
from neaptide.commands import outputs
from neaptide.commands.plan import _ordered
from neaptide.commands.simulation_flags import offline_of
from neaptide.estimator.device_profile import save_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.scenario import Scenario
from tests.simulation.scenes import COST, profile

NUM_REQUESTS = 24
POINT_KEYS = {"replicas", "kv_blocks", "kv_gib", "attainment", "too_large", "holds", "beside"}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """One seat, which a request holds for five steps of 4.2 ms and more: a replica serves 45 a second, and 80 come."""
    lines = [f"{k * 0.0125},4,5,a\n" for k in range(NUM_REQUESTS)]
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens,client\n" + "".join(lines))
    slow = profile(block_size=16)
    save_profile(slow, tmp_path / "slow.json")
    halved = msgspec.structs.replace(COST, fixed_s=COST.fixed_s / 2)
    fast = msgspec.structs.replace(slow, name="fast", costs=dict.fromkeys(slow.costs, halved))
    save_profile(fast, tmp_path / "fast.json")
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x" * 40}]}
    rows = [
        {"custom_id": str(k), "method": "POST", "url": "/v1/chat/completions", "body": body | {"n": 1}}
        for k in range(20)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("plan", "--online", str(tmp_path / "trace.csv"), "--profile", str(tmp_path / "slow.json")),
        *("--policy", "priority", "--max-num-seqs", "1", "--ttft-slo-s", "0.01", "--planning-scale", "0"),
        *("--margin-s", "0.02"),
    ]


def found(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    *shown, last = capsys.readouterr().out.strip().splitlines()
    return shown, json.loads(last)


def said(shown: list[str]) -> str:
    """The text for people without its line breaks."""
    return " ".join(" ".join(shown).split())


def test_the_answer_is_shown_and_the_last_line_is_the_json_that_is_also_written(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    shown, result = found(capsys)
    assert result == json.loads((tmp_path / "out.json").read_text())
    (plan,) = result["plans"]
    assert [(point["replicas"], point["holds"]) for point in plan["tried"]] == [(1, False), (2, True), (3, True)]
    assert all(point.keys() == POINT_KEYS for point in plan["tried"])
    assert (plan["answer"], plan["one_smaller"]) == (plan["tried"][1], plan["tried"][0])
    assert plan["peak"]["requests"] == NUM_REQUESTS
    assert plan["settings"]["max_num_seqs"] == 1
    assert result["cheapest"] == "scene"
    too_few = f"{plan['one_smaller']['attainment']['both']:.1%}"
    assert said(shown).endswith(
        " answer: 2 replicas with 0.00 GiB of KV (100.0% attained); "
        f"too few: 1 replica with 0.00 GiB of KV ({too_few} attained); cost: 2 devices"
    )


def test_the_file_of_a_batch_gets_an_interval(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--offline", str(tmp_path / "batch.jsonl"), "--max-num-seqs", "2"]) == 0
    shown, result = found(capsys)
    offline = result["plans"][0]["offline"]
    assert (offline["rows"], offline["tokens"]) == (20, 20 * (11 + 3))
    assert offline["tokens_per_day"] == pytest.approx(86_400 * offline["whole"]["tokens_per_s"])
    low_s, high_s = offline["finish_s"]
    assert 0 < low_s <= high_s
    assert f"20 rows of 280 tokens take {low_s:.1f} s to {high_s:.1f} s" in shown[-1]


def test_that_the_targets_do_not_hold_beside_offline_work_is_said(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only seat is often an offline row's, and ``fcfs`` takes it from none."""
    assert main([*arguments, "--offline", str(tmp_path / "batch.jsonl"), "--policy", "fcfs"]) == 0
    assert "with offline work, fewer than 90.0% meet both targets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prices", "cheapest", "cost"),
    [
        ([], "fast", "1 device"),
        (["--price", "1", "2.5"], "scene", "2 per hour"),
        (["--price", "1", "1.5"], "fast", "1.5 per hour"),
    ],
)
def test_the_cheapest_of_several_profiles(
    prices: list[str],
    cheapest: str,
    cost: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The slow one needs two replicas, the fast one a single one."""
    profiles = ["--profile", str(tmp_path / "slow.json"), str(tmp_path / "fast.json")]
    assert main([*arguments, *profiles, *prices]) == 0
    shown, result = found(capsys)
    assert [plan["answer"]["replicas"] for plan in result["plans"]] == [2, 1]
    assert result["cheapest"] == cheapest
    assert shown[-1] == f"cheapest: {cheapest}, {cost}"


def test_several_policies_are_planned_and_the_better_one_is_named(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One slot needs two replicas; with eight a single one is enough."""
    assert main([*arguments, "--policy", "priority@64x1,priority@64x8"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert [(plan["policy"], plan["answer"]["replicas"]) for plan in result["plans"]] == [
        ("priority@64x1", 2),
        ("priority@64x8", 1),
    ]
    assert (result["cheapest"], result["cheapest_policy"]) == ("scene", "priority@64x8")
    assert "priority@64x1: scene, 1 replica: the peak" in captured.err
    assert "cheapest: scene with priority@64x8, 1 device" in captured.out


@pytest.mark.parametrize("policy", ["priority", "neaptide"])
def test_step_tokens_and_slots_are_searched(
    policy: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "STEP_TOKENS", (4, 64))
    monkeypatch.setattr(tuning, "SLOTS", (1, 8))
    assert main([*arguments, "--policy", policy, "--tune"]) == 0
    shown, result = found(capsys)
    (plan,) = result["plans"]
    assert [(each["policy"], each["replicas"]) for each in plan["limits"]] == [
        (f"{policy}@4x1", 2),
        (f"{policy}@64x1", 2),
        (f"{policy}@64x8", 1),
    ]
    assert (plan["policy"], plan["settings"]["max_num_seqs"]) == (f"{policy}@64x8", 8)
    assert any(line.split()[:2] == ["64x8", "1"] for line in shown)


def test_limits_of_ones_own_are_not_searched(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--tune", "--policy", "priority@64x8"]) == 0
    (plan,) = found(capsys)[1]["plans"]
    assert (plan["policy"], plan["limits"]) == ("priority@64x8", [])


def test_the_price_of_offline_tokens_stands_beside_the_price_of_an_hour(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas at 3 an hour each."""
    flags = ["--offline", str(tmp_path / "batch.jsonl"), "--max-num-seqs", "2", "--price", "3"]
    assert main([*arguments, *flags]) == 0
    shown, result = found(capsys)
    (plan,) = result["plans"]
    replicas, offline = plan["answer"]["replicas"], plan["offline"]
    price = 3 * replicas / (3600 * offline["whole"]["tokens_per_s"] / 1e6)
    assert plan["cost_per_hour"] == 3 * replicas
    assert plan["price_per_million_offline_tokens"] == pytest.approx(price)
    assert offline["alone_tokens_per_s"] > offline["whole"]["tokens_per_s"] / replicas
    credit = 3 / offline["alone_tokens_per_s"]
    assert plan["net_cost_per_hour"] == pytest.approx(3 * replicas - credit * offline["whole"]["tokens_per_s"])
    assert f"cost: {3 * replicas} per hour, {price:.4g} per million offline tokens" in said(shown)


def test_the_lines_of_a_file_keep_their_order(arguments: list[str], tmp_path: Path) -> None:
    args = argparse.Namespace(offline=[str(tmp_path / "batch.jsonl"), "bbh"], keep_order=False, seed=3)
    (tmp_path / "batch.jsonl").write_text(
        "".join(json.dumps({"body": {"prompt": "x" * 80 * k, "max_tokens": 3}}) + "\n" for k in range(1, 9))
    )
    of_file, bundled = offline_of(args)
    assert [row.input_tokens for row in of_file.requests] == [20 * k for k in range(1, 9)]
    assert bundled.requests != load_offline("bbh", 3, keep_order=True).requests


@pytest.mark.parametrize(
    ("name", "policy", "offline_plan", "order"),
    [
        ("h100", "neaptide", "auto", "ends"),
        ("h100", "neaptide", "off", None),
        ("h100", "priority", "auto", None),
        ("cpu-4", "neaptide", "auto", None),
        ("cpu-4", "neaptide", "on", "ends"),
    ],
)
def test_offline_work_is_ordered_as_a_server_would(
    name: str, policy: str, offline_plan: str, order: str | None
) -> None:
    scenario = Scenario(profile=msgspec.structs.replace(profile(), name=name), policy=policy)
    ordered = _ordered(scenario, argparse.Namespace(offline_plan=offline_plan))
    assert ordered.order == order
    assert ordered.planner_is_told is (order is None)


def test_no_line_for_people_is_wider_than_a_terminal(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is cut either, so that every heading and number can be read."""
    flags = ["--policy", "priority@64x1,priority@64x8", "--offline", str(tmp_path / "batch.jsonl")]
    assert main([*arguments, *flags]) == 0
    shown, _ = found(capsys)
    assert max(len(line) for line in shown if str(tmp_path) not in line) <= 80
    assert not any("…" in line for line in shown)


def test_memory_is_found_in_parts_of_what_the_profile_has(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """64 blocks of 16, of which a request of 4 and 5 tokens needs one."""
    assert main([*arguments, "--find", "kv", "--replicas", "2"]) == 0
    _, result = found(capsys)
    answer = result["plans"][0]["answer"]
    assert (answer["replicas"], answer["kv_blocks"]) == (2, 1)
    assert result["plans"][0]["one_smaller"] is None


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["--max-replicas", "1"], "raise --max-replicas"),
        (["--find", "kv"], "share the load (--replicas N)"),
    ],
)
def test_that_nothing_holds_is_a_result_and_a_failure(
    flags: list[str], advice: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *flags]) == 1
    shown, result = found(capsys)
    assert result["plans"][0]["answer"] is None
    assert result["cheapest"] is None
    assert "no answer" in said(shown)
    assert advice in said(shown)


def test_each_simulation_is_told_on_stderr(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--max-replicas", "2"]) == 0
    assert capsys.readouterr().err.splitlines() == ["scene, 1 replica: the peak", "scene, 2 replicas: the peak"]


def test_what_the_context_does_not_hold_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--max-model-len", "6"]) == 0
    assert f"{NUM_REQUESTS} requests have more output than the limit" in capsys.readouterr().err


def test_a_plot_is_drawn_with_offline_work_beside_every_size(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--offline", str(tmp_path / "batch.jsonl"), "--max-num-seqs", "2", "--plot", str(tmp_path / "out.png")]
    assert main([*arguments, *flags]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    _, result = found(capsys)
    assert [point["beside"] is None for point in result["plans"][0]["tried"]] == [False, False]


def test_a_plot_says_what_it_shows(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr("neaptide.commands.plan.draw", lambda plot, path: drawn.append(plot))
    flags = ["--policy", "priority@64x1,priority@64x8", "--offline", str(tmp_path / "batch.jsonl")]
    assert main([*arguments, *flags, "--plot", str(tmp_path / "out.png")]) == 0
    figure = figures.Figure()
    drawn[0](figure)
    assert figure.get_suptitle() == "Replicas for the peak: TTFT 0.01 s and TPOT 50 ms for 90.0% of the requests"
    assert [axes.get_title() for axes in figure.axes] == ["Chats alone", "Offline work beside the chats"]
    assert [axes.get_xlabel() for axes in figure.axes] == ["replicas"] * 2
    lines = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    policies = ["scene, priority@64x1", "scene, priority@64x8"]
    assert lines == [[*policies, "90.0% wanted"], policies]


def test_a_plot_without_matplotlib_says_how_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    assert main([*arguments, "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install 'neaptide[plots]'" in capsys.readouterr().err


def test_the_json_line_is_printed_though_its_file_could_not_be_written(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("neaptide.commands.plan.check_writable", lambda path: None)
    assert main([*arguments, "--json", str(tmp_path / "gone" / "out.json")]) == 2
    shown = capsys.readouterr()
    assert "No such file or directory" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["cheapest"] == "scene"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--online", "none"], "name a trace or a file with --online"),
        (["--online", "nowhere"], "no trace 'nowhere'"),
        (["--online-window", "ten"], "A:B"),
        (["--profile", "abacus"], "no profile 'abacus'"),
        (["--offline", "nothing"], "no offline set 'nothing'"),
        (["--policy", "best"], "there is no policy 'best'"),
        (["--policy", "fcfs,best"], "there is no policy 'best'"),
        (["--attainment", "90"], "--attainment must be above 0"),
        (["--attainment", "0"], "--attainment must be above 0"),
        (["--peak-s", "0"], "--peak-s must be positive"),
        (["--margin-s", "-1"], "--margin-s must be at least 0"),
        (["--max-replicas", "0"], "--max-replicas must be at least 1"),
        (["--find", "kv", "--replicas", "0"], "--replicas must be at least 1"),
        (["--replicas", "2"], "--replicas needs --find kv"),
        (["--price", "1", "2"], "--price has 2 numbers for 1 profiles"),
        (["--price", "-1"], "--price must be positive"),
        (["--tpot-slo-s", "0"], "--tpot-slo-s must be positive"),
        (["--ttft-slo-s", "inf"], "--ttft-slo-s must be positive and finite"),
        (["--overlap-kappa", "nan"], "--overlap-kappa must be from 0 to 1"),
        (["--max-model-len", "4"], "raise --max-model-len"),
        (["--json", "/nowhere/out.json"], "/nowhere: no such directory"),
        (["--plot", "plot.xyz"], "the file must end in one of"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("neaptide plan: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
