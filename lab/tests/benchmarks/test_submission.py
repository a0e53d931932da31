"""What a submission costs the steps of an engine: the figures, and once the real server with a simulated executor."""

import json
import random

import pytest

from benchmarks.common import EMBEDDED
from benchmarks.live.plan import Targets
from lab.benchmarks import submission
from lab.benchmarks.pairs import differences
from lab.benchmarks.submission import (
    HEAD_LINES,
    Measured,
    Pair,
    Window,
    content_of,
    repeated_arrivals,
    summary,
    targets_of,
    whole_periods,
)
from neaptide.engine.record.step_log import BatchLine, Line, OrderLine, StepLine
from neaptide.loadgen.client.recorder import ChatRecord

pytestmark = pytest.mark.usefixtures("few_resamples")

TARGETS = Targets(0.120, 0.024)
PAIRS = [Pair(Window(0.0, 10.0), Window(10.0, 20.0)), Pair(Window(30.0, 40.0), Window(20.0, 30.0))]


def steps(begin_s: float, *milliseconds: float) -> list[Line]:
    return [StepLine(0, [begin_s + k, begin_s + k + ms / 1e3], [], []) for k, ms in enumerate(milliseconds)]


def chat(due_s: float, ttft_s: float, tpot_s: float, error: str | None = None) -> ChatRecord:
    times_s = [due_s + ttft_s + k * tpot_s for k in range(3)]
    return ChatRecord(due_s, due_s=due_s, token_times_s=times_s, num_output_tokens=3, error=error)


def found(*more: Line, records: list[ChatRecord]) -> Measured:
    log = [*steps(1.0, 4.0, 6.0), *steps(11.0, 5.0, 7.0), *steps(21.0, 8.0), *steps(31.0, 5.0), *steps(9.999, 2.0)]
    return Measured(
        TARGETS, PAIRS, records, [*log, BatchLine("a", 15.0, 0.0, []), BatchLine("b", 25.0, 0.0, []), *more]
    )


def test_steps_belong_to_the_turn_that_they_lie_in() -> None:
    records = [chat(at_s, 0.01, 0.01) for at_s in (1.0, 11.0, 21.0, 31.0)]
    result = summary(found(records=records), is_planned=False)
    assert result["steps"] == {"alone": 3, "beside": 3}
    assert result["step_p50_ms_alone"] == pytest.approx(5.0)
    assert result["step_p50_ms_beside"] == pytest.approx(7.0)
    assert result["step_p50_ratio"] == pytest.approx(1.4)
    assert result["step_p99_ratio_of_halves_alone"] == pytest.approx(5.0 / 5.98)
    assert result["submission_s"] == [10.0, 10.0]


def test_targets_are_what_the_chats_of_the_probe_took_and_half_as_much_again() -> None:
    probe = [chat(0.0, 0.05, 0.010), chat(1.0, 0.15, 0.030)]
    targets = targets_of(probe)
    assert targets.ttft_s == pytest.approx(1.5 * (0.05 + 0.99 * 0.10))
    assert targets.tpot_s == pytest.approx(1.5 * (0.010 + 0.99 * 0.020))
    assert all(record.met(targets.ttft_s, targets.tpot_s) for record in probe)


def test_a_probe_with_a_chat_that_failed_says_no_targets() -> None:
    with pytest.raises(SystemExit, match="1 chats alone failed: cut"):
        targets_of([chat(0.0, 0.05, 0.010), chat(1.0, 0.05, 0.010, "cut")])
    with pytest.raises(SystemExit, match="no chat alone has two tokens"):
        targets_of([ChatRecord(0.0, due_s=0.0, token_times_s=[0.1], num_output_tokens=1)])


def test_chats_are_judged_by_the_targets_that_the_server_was_told() -> None:
    alone = [chat(1.0, 0.05, 0.010), chat(2.0, 0.05, 0.010), chat(31.0, 0.05, 0.010), chat(32.0, 0.13, 0.010)]
    beside = [chat(11.0, 0.11, 0.020), chat(12.0, 0.05, 0.025), chat(21.0, 0.05, 0.010, "cut"), chat(22.0, 0.05, 0.010)]
    result = summary(found(records=[*alone, *beside]), is_planned=False)
    assert result["targets_ms"] == pytest.approx({"ttft": 120.0, "tpot": 24.0})
    assert result["attainment"] == {"alone": 0.75, "beside": 0.5}
    assert result["missed"] == {"alone": 1, "beside": 2}
    # A pair alone and beside: 2 of 2 and 1 of 2, then 1 of 2 and 1 of 2.
    assert [result[f"attainment_change{end}"] for end in ("", "_low", "_high")] == [-0.25, -0.5, 0.0]
    assert result["ttft_p50_ms_alone"] == pytest.approx(50.0)
    assert result["ttft_p99_ms_alone"] == pytest.approx(50.0 + 0.97 * 80.0)
    assert result["ttft_p99_ms_beside"] == pytest.approx(50.0 + 0.97 * 60.0)
    assert result["tpot_p50_ms_beside"] == pytest.approx(15.0)
    assert result["longest_gap_ms"] == pytest.approx({"alone": 10.0, "beside": 25.0})
    assert result["chats"] == {"alone": 4, "beside": 4}


def test_the_change_is_of_all_values_whatever_a_turn_has() -> None:
    found = differences("share", [[1.0], [1.0, 1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]], random.Random(0))
    assert found == pytest.approx({"share_change": -0.5, "share_change_low": -2 / 3, "share_change_high": -0.5})


def test_chats_that_miss_their_targets_alone_say_nothing() -> None:
    log: list[Line] = [BatchLine("a", 15.0, 0.0, []), BatchLine("b", 25.0, 0.0, [])]
    log += [step for at_s in (1.0, 11.0, 21.0, 31.0) for step in steps(at_s, 5.0)]
    records = [chat(at_s, 0.2 if at_s == 31.0 else 0.01, 0.01) for at_s in (1.0, 11.0, 21.0, 31.0)]
    result = summary(Measured(TARGETS, PAIRS, records, log), is_planned=False)
    assert (result["is_still"], result["attainment"]) == (True, {"alone": 0.5, "beside": 1.0})
    assert (result["alone_holds_its_targets"], result["holds"]) == (False, False)


@pytest.mark.parametrize(
    ("factor", "lost", "holds"), [(1.0, False, True), (1.09, False, True), (1.12, False, False), (1.0, True, False)]
)
def test_it_holds_where_steps_and_targets_do(factor: float, lost: bool, holds: bool) -> None:
    log: list[Line] = [BatchLine("a", 15.0, 0.0, []), BatchLine("b", 25.0, 0.0, [])]
    log += [*steps(1.0, 5.0), *steps(31.0, 5.0), *steps(11.0, 5.0 * factor), *steps(21.0, 5.0 * factor)]
    records = [chat(at_s, 0.01, 0.01, "cut" if lost and at_s == 11.0 else None) for at_s in (1.0, 11.0, 21.0, 31.0)]
    assert summary(Measured(TARGETS, PAIRS, records, log), is_planned=False)["holds"] is holds


def test_a_machine_that_changes_says_nothing() -> None:
    log: list[Line] = [BatchLine("a", 15.0, 0.0, []), BatchLine("b", 25.0, 0.0, [])]
    log += [*steps(1.0, 5.0), *steps(31.0, 6.0), *steps(11.0, 5.0), *steps(21.0, 5.0)]
    records = [chat(at_s, 0.01, 0.01) for at_s in (1.0, 11.0, 21.0, 31.0)]
    result = summary(Measured(TARGETS, PAIRS, records, log), is_planned=False)
    assert result["step_p99_ratio"] < 1.0
    assert (result["is_still"], result["holds"]) == (False, False)


def test_a_submission_ends_when_the_engine_has_the_batch_and_its_plan() -> None:
    records = [chat(at_s, 0.01, 0.01) for at_s in (1.0, 11.0, 21.0, 31.0)]
    with pytest.raises(SystemExit, match="had its plan"):
        summary(found(records=records), is_planned=True)
    planned = found(OrderLine([]), *steps(16.0, 5.0), OrderLine([]), *steps(26.0, 5.0), records=records)
    assert summary(planned, is_planned=True)["steps"]["beside"] == 5
    late = Measured(TARGETS, [PAIRS[0], Pair(PAIRS[1].alone, Window(26.0, 30.0))], records, planned.log)
    with pytest.raises(SystemExit, match="had its batch"):
        summary(late, is_planned=True)


def test_every_turn_has_the_same_prompts_that_meet() -> None:
    arrivals_s = repeated_arrivals(2.0, 5.0, 15.0, seed=0)
    turns = [[at_s - begin_s for at_s in arrivals_s if begin_s <= at_s < begin_s + 5.0] for begin_s in (0.0, 5.0, 10.0)]
    assert len(turns[0]) == 10
    assert turns[0] == sorted(turns[0])
    assert turns[1] == pytest.approx(turns[0])
    assert turns[2] == pytest.approx(turns[0])
    assert len(arrivals_s) == 30


@pytest.mark.parametrize(("duration_s", "whole_s"), [(0.1, 5.0), (5.0, 5.0), (17.3, 20.0), (25.0, 25.0)])
def test_turns_last_whole_periods(duration_s: float, whole_s: float) -> None:
    assert whole_periods(duration_s) == whole_s


def test_lines_share_the_heads_of_their_groups() -> None:
    prompts = [json.loads(line)["body"]["prompt"] for line in content_of(HEAD_LINES + 2).splitlines()]
    assert len({prompt[:190] for prompt in prompts}) == 2
    assert len({*prompts}) == HEAD_LINES + 2


@pytest.mark.full
def test_the_engine_has_each_batch_and_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(EMBEDDED), "--executor", "sim", "--policy", "blendserve", "--lines", "600"]
    submission.main([*arguments, "--pairs", "1", "--turn-s", "3", "--settle-s", "20", "--probe-s", "5"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert min(*result["steps"].values(), *result["chats"].values()) > 0
    assert result["attainment"].keys() == {"alone", "beside"}
    assert all(result["targets_ms"][name] > 1.0 for name in ("ttft", "tpot"))
