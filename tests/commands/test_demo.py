"""``neaptide demo``: its sizing, its sentence and its charts; the whole of it in the long form."""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from neaptide import cli
from neaptide.commands.demo import command
from neaptide.commands.demo.chart import ASCII, bin_s, binned_rates, latency_chart, latency_row, rate_chart, tops
from neaptide.commands.demo.lines import answers_of, batch_jsonl, computed_texts, line_tokens, make_batch, right_answers
from neaptide.commands.demo.load import DemoLoad, fit_load, lines_to_measure
from neaptide.commands.demo.state import DemoState, Moment
from neaptide.commands.demo.verdict import (
    LEAST_LINES,
    MOST_LINES,
    DemoFigures,
    lines_for,
    scaled,
    sentence,
    too_slow,
    unfinished,
)
from neaptide.data import skills
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord
from tests.patience import PATIENCE_S

MEASURED = DemoFigures(20.0, 10_000.0, 1_000.0, met_alone=10, chats_alone=10, met_beside=60, chats_beside=60)


def chat(arrival_s: float, ttft_s: float, tpot_s: float, tokens: int = 11) -> tuple[skills.Example, ChatRecord]:
    times = [100.0 + ttft_s + tpot_s * i for i in range(tokens)]
    record = ChatRecord(100.0, arrival_s=arrival_s, due_s=100.0, token_times_s=times, end_s=times[-1])
    return skills.Example("add", [], "4"), record


# ---- how many lines --------------------------------------------------------------------------------------


def test_the_batch_fills_the_time_with_what_chat_leaves() -> None:
    assert lines_for(20.0, 1_000.0, 200.0, [50, 110]) == 200


def test_a_chat_that_takes_the_whole_machine_leaves_the_batch_a_tenth() -> None:
    assert lines_for(20.0, 1_000.0, 3_000.0, [10]) == 200


@pytest.mark.parametrize(("alone_per_s", "lines"), [(float("nan"), LEAST_LINES), (0.0, LEAST_LINES), (1e9, MOST_LINES)])
def test_there_are_bounds_for_machines_of_any_speed(alone_per_s: float, lines: int) -> None:
    assert lines_for(20.0, alone_per_s, 0.0, [50]) == lines


def test_a_few_shot_line_costs_its_question_and_answer_only() -> None:
    examples = make_batch(2, seed=0)
    assert computed_texts(examples[0]) == [*(m["content"] for m in examples[0].messages), examples[0].answer]
    assert computed_texts(examples[1]) == [examples[1].messages[-1]["content"], examples[1].answer]
    assert all(10 < tokens < 300 for tokens in line_tokens(make_batch(64, seed=0)))


async def test_lines_are_made_beside_the_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def made(lines: int, seed: int) -> list[skills.Example]:
        assert goes_on.wait(PATIENCE_S), "nothing else went on"
        return make_batch(lines, seed)

    monkeypatch.setattr(command, "make_batch", made)
    making = asyncio.create_task(command.sized_batch(DemoState(), argparse.Namespace(lines=4, seed=0), 60.0))
    await asyncio.sleep(0)
    goes_on.set()
    examples, content = await making
    assert (len(examples), content) == (4, batch_jsonl(examples))


def test_only_exact_answers_of_lines_that_succeeded_are_right() -> None:
    examples = [skills.Example("add", [], "4"), skills.Example("add", [], "5"), skills.Example("add", [], "6")]
    reply = '{"custom_id": "line-%d", "response": {"status_code": %d, "body": {"choices": [{"message": %s}]}}}'
    lines = [reply % (0, 200, '{"content": " 4 "}'), reply % (1, 200, '{"content": "4"}')]
    lines += [reply % (2, 500, '{"content": "6"}')]
    assert right_answers(examples, answers_of("\n".join(lines).encode())) == 1


# ---- a load that the machine can bear ----------------------------------------------------------------------


def test_a_fast_machine_gets_the_load_as_it_is() -> None:
    load = fit_load([chat(0.0, 0.05, 0.01)[1]], None, is_taught=True)
    assert load == DemoLoad(answer_s=pytest.approx(0.15))
    assert not load.is_scaled


def test_on_a_slow_machine_targets_rate_and_answers_follow_its_speed() -> None:
    load = fit_load([chat(0.0, 0.9, 0.15)[1]], None, is_taught=False)
    assert (load.ttft_slo_ms, load.tpot_slo_ms) == (2_700.0, 300.0)
    assert load.max_tokens == 20  # three seconds of them
    assert load.answer_s == pytest.approx(0.9 + 20 * 0.15)
    assert load.rate_per_s == pytest.approx(1 / load.answer_s)
    assert scaled(load).endswith("with targets of 2,700 ms to the first token and 300 ms for each further one")


def test_a_rate_that_the_user_gives_is_kept() -> None:
    assert fit_load([chat(0.0, 0.9, 0.15)[1]], 7.0, is_taught=False).rate_per_s == 7.0


@pytest.mark.parametrize(("answer_s", "lines"), [(0.0, 1500), (1.0, 1280), (100.0, 64)])
def test_the_batch_alone_is_long_enough_to_measure(answer_s: float, lines: int) -> None:
    load = DemoLoad(max_tokens=100, answer_s=answer_s)
    assert lines_to_measure(load, 10.0, tokens_per_line=50.0, most=1500) == lines


def test_answers_of_a_model_that_was_not_taught_are_as_long_as_the_limit() -> None:
    (few_shot,) = make_batch(2, seed=0)[1:]
    (untaught,) = line_tokens([few_shot], answer_tokens=1_000)
    assert 1_000 < untaught < 1_100


def test_where_no_chat_ends_the_demo_says_what_to_try() -> None:
    assert "try --max-seconds 400, or a smaller model" in too_slow(80.0)


# ---- the sentence ----------------------------------------------------------------------------------------


def test_the_sentence_says_what_was_won_in_measured_figures() -> None:
    assert sentence(MEASURED) == (
        "Co-serving saved 33% of the time that chat and batch need one after the other: 20.0 s together, 30.0 s in "
        "turn (20.0 s of chat, then the batch alone for 10.0 s), with 60 of 60 chats within both targets with the "
        "batch and 10 of 10 without it."
    )


def test_a_batch_that_hardly_ran_beside_the_chat_won_nothing() -> None:
    assert sentence(replace(MEASURED, batch_tokens=500.0)).startswith(
        "Co-serving had no benefit on this machine: 20.0 s"
    )


def test_it_is_said_when_chats_paid_for_it() -> None:
    assert "but more chats missed their targets" in sentence(replace(MEASURED, met_beside=50))
    assert "but more chats missed their targets" not in sentence(replace(MEASURED, met_beside=58))


def test_without_the_batchs_own_speed_nothing_is_claimed() -> None:
    assert "is unknown" in sentence(replace(MEASURED, batch_alone_per_s=0.0))


# ---- state and charts ------------------------------------------------------------------------------------


def test_recomputed_tokens_are_no_work() -> None:
    text = (
        'neaptide_step_tokens_total{class="online"} 5\nneaptide_step_tokens_total{class="offline"} 90\n'
        "neaptide_recomputed_tokens_total 20\n"
    )
    state = DemoState()
    state.saw(Samples(text), 1.5)
    assert state.moments == [Moment(1.5, 5.0, 70.0)]


def test_chats_are_told_apart_by_when_the_batch_came() -> None:
    state = DemoState(chats=[chat(1.0, 0.1, 0.01), chat(3.0, 0.1, 0.01)], chat_start_s=4.0, both_start_s=6.0)
    assert [r.arrival_s for r in state.records(beside_batch=False)] == [1.0]
    assert [r.arrival_s for r in state.records(beside_batch=True)] == [3.0]


@pytest.mark.parametrize(("elapsed_s", "length_s"), [(10.0, 0.5), (10.1, 1.0), (60.0, 4.0)])
def test_columns_grow_longer_until_all_time_fits(elapsed_s: float, length_s: float) -> None:
    assert bin_s(elapsed_s, 20) == length_s


def test_rates_of_columns_are_those_between_their_scrapes() -> None:
    moments = [Moment(0.0, 0, 0), Moment(0.5, 10, 50), Moment(1.0, 20, 150), Moment(2.0, 20, 150)]
    state = DemoState(moments=moments, elapsed_s=2.0)
    assert binned_rates(state, 1.0) == [(20.0, 150.0), (0.0, 0.0)]


def test_a_column_without_a_scrape_repeats_the_one_before() -> None:
    state = DemoState(moments=[Moment(0.0, 0, 0), Moment(0.5, 5, 0), Moment(1.5, 15, 0)], elapsed_s=1.5)
    assert binned_rates(state, 0.5) == [(10.0, 0.0), (10.0, 0.0), (10.0, 0.0)]


def test_what_is_there_is_seen_however_small() -> None:
    assert tops((1.0, 2.0), 100.0, 7) == (1, 2)
    assert tops((0.0, 100.0), 100.0, 7) == (0, 7)
    assert tops((0.0, 0.0), 100.0, 7) == (0, 0)


def test_the_chart_of_rates_stacks_the_tiers_under_the_line_of_the_batch_alone() -> None:
    moments = [Moment(0.0, 0, 0), Moment(0.5, 10, 25), Moment(1.0, 20, 25)]
    state = DemoState(moments=moments, elapsed_s=1.0, batch_alone_per_s=50.0)
    assert rate_chart(state, 3, ASCII).plain.splitlines() == [
        "      70 .  ",
        "         .  ",
        "      50 .--",
        "         .  ",
        "         .  ",
        "         ## ",
        "         ## ",
        "tokens/s # chat  . batch  - batch without chat: 50",
    ]


def test_a_chat_that_missed_stands_above_the_line_of_targets() -> None:
    state = DemoState(chats=[chat(0.0, 0.1, 0.01, 2), chat(1.0, 1.2, 0.05, 2)], elapsed_s=3.0)
    assert latency_chart(state, 6, ASCII).plain.splitlines()[:5] == [
        "             o ",
        "  target ------",
        "               ",
        "             x ",
        "         8     ",
    ]


@pytest.mark.parametrize(("share", "row"), [(0.0, 1), (0.34, 2), (1.0, 3), (1.01, 5), (9.0, 5)])
def test_rows_of_the_latency_chart(share: float, row: int) -> None:
    assert latency_row(share) == row


# ---- the whole -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
@pytest.mark.parametrize("flag", ["--rate", "--lines", "--max-seconds", "--lead-seconds"])
def test_a_load_that_is_none_is_refused_in_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", f"{flag}={value}"])
    assert ended.value.code == 2
    kind = "a whole number" if flag == "--lines" else "a number"
    said = f"neaptide demo: argument {flag}: '{value}' is not {kind} above 0; see neaptide demo --help\n"
    assert capsys.readouterr().err == said


def test_half_a_line_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--lines", "0.5"])
    assert "'0.5' is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.full
def test_the_demo_ends_with_right_answers_and_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neaptide", "demo", "--dir", str(tmp_path), "--lines", "40", "--lead-seconds", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch: 40 of 40 lines answered" in done.stdout
    assert re.search(r"exactly right: \d+ of 40 lines", done.stdout)
    assert re.findall(r"^form: .* \((\w+)\)$", done.stdout, re.MULTILINE) == ["right", "right"]
    assert done.stdout.splitlines()[-1].startswith("Co-serving ")


@pytest.mark.parametrize(("status", "says_what_next"), [("in_progress", True), ("failed", False), ("expired", False)])
def test_a_batch_that_is_not_done_in_time_is_told_from_one_that_failed(status: str, says_what_next: bool) -> None:
    batch = {"status": status, "request_counts": {"total": 565, "completed": 28, "failed": 0}}
    said = unfinished(batch, 85.3)
    assert said.startswith(f"the batch is {status} after 85 s, 28 of 565 lines done")
    assert ("--max-seconds" in said) is says_what_next
