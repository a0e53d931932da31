"""The sentence that tells what is wrong: exact texts for exact figures."""

from dataclasses import replace
from typing import Any

import pytest

from neaptide.server.observe.status import (
    Figures,
    Recent,
    Severity,
    Status,
    duration,
    percent,
    short,
    standstill,
    status,
)

OK, INFO, WARN, BAD = Severity.OK, Severity.INFO, Severity.WARN, Severity.BAD
MET = Recent(
    seconds=60,
    judged=100,
    ttft_p50_s=0.1,
    ttft_p99_s=0.25,
    tpot_p50_s=0.02,
    tpot_p99_s=0.03,
    answers=100,
    online_tokens=1000,
    offline_tokens=9000,
    steps=1000,
    step_s=50.0,
    predicted_s=50.0,
)
LATE = replace(MET, ttft_missed=97, ttft_p99_s=16.0)
KILLED = "killed by signal 9, SIGKILL: an operator, or the kernel when memory ran out"


def of(window: Recent = MET, **changes: Any) -> Figures:
    return Figures(**({"now": window, "lately": window, "blocks_total": 100} | changes))


def told(figures: Figures) -> tuple[Severity, str, str]:
    found = status(figures)
    return found.severity, found.sentence, found.cause


def test_the_example_of_a_slow_machine() -> None:
    slow = replace(LATE, step_s=50.0, predicted_s=20.0)
    assert told(of(slow, running_online=3)) == (
        BAD,
        "Chats miss their targets: TTFT p99 16 s (target 1 s). 97% of 100 missed TTFT in the last minute.",
        "The machine does 40% of its calibrated speed; another process may use it.",
    )


@pytest.mark.parametrize(
    ("window", "changes", "cause"),
    [
        (LATE, {"waiting_online": 7, "blocks_online": 96}, "Chats hold 96% of the KV memory; 7 wait for it."),
        (
            replace(LATE, offline_tokens=0),
            {},
            "Chats alone are more than this machine can compute: add a replica, or send less.",
        ),
        (
            replace(LATE, offline_tokens=0, step_s=30.0, predicted_s=30.0),
            {},
            "Not known: the machine was busy for 50% of the time. Chats may come in bursts.",
        ),
        (
            replace(LATE, offline_tokens=0, predicted_s=20.0),
            {},
            "The machine does 40% of its calibrated speed; another process may use it. "
            "At this speed it is full of chats alone.",
        ),
        (LATE, {}, "Not known. Batch work has 90% of the tokens; pause it to compare."),
        (
            replace(LATE, ttft_missed=20, away_s=5.0),
            {"last_end": KILLED, "back_s": 28.0},
            f"There was no engine for 5 s, until 28 s ago: {KILLED}.",
        ),
        (
            replace(LATE, away_s=5.0),
            {"last_end": KILLED},
            "Not known. Batch work has 90% of the tokens; pause it to compare.",
        ),
        (Recent(judged=10, ttft_missed=10, ttft_p99_s=9.0), {}, ""),
    ],
    ids=["memory", "load", "bursts", "slow and full", "batch", "no engine", "too many for no engine", "nothing"],
)
def test_late_chats_have_a_cause(window: Recent, changes: dict[str, Any], cause: str) -> None:
    found = status(of(window, **changes))
    assert (found.severity, found.cause) == (BAD, cause)


def test_long_steps_are_why_tpot_is_missed() -> None:
    window = replace(MET, tpot_missed=60, tpot_p99_s=0.2, steps=500)
    window = replace(window, predicted_s=24.0, step_s=25.5)
    assert told(of(window, silent=1)) == (
        BAD,
        "Chats miss their targets: TPOT p99 200 ms (target 50 ms). 60% of 100 missed TPOT in the last minute.",
        "A step takes 51 ms on average, more than the TPOT target.",
    )


def test_a_target_below_what_the_machine_can_do_is_the_cause_whatever_else_runs() -> None:
    window = replace(MET, tpot_missed=60, tpot_p99_s=0.2, steps=500, predicted_s=30.0)
    assert status(of(window)).cause == (
        "A step of this load takes 60 ms even at the calibrated speed, more than the TPOT target."
    )


def test_both_targets_are_named_where_both_are_missed() -> None:
    window = replace(LATE, tpot_missed=60, tpot_p99_s=0.2)
    assert status(of(window, running_online=1)).sentence == (
        "Chats miss their targets: TTFT p99 16 s (target 1 s), TPOT p99 200 ms (target 50 ms). "
        "97% of 100 missed TTFT in the last minute."
    )


def test_chats_that_have_ended_missed_their_targets() -> None:
    assert status(of(LATE)).sentence == (
        "Chats missed their targets: TTFT p99 16 s (target 1 s). 97% of 100 missed TTFT in the last minute."
    )


def test_targets_that_requests_bring_along_are_called_their_own() -> None:
    window = replace(MET, ttft_missed=10, ttft_p99_s=0.4)
    assert status(of(window)).sentence == ("Chats missed their own targets. 10% of 100 missed TTFT in the last minute.")


def test_chats_that_have_no_token_yet_are_late_before_they_end() -> None:
    assert told(of(Recent(), silent=21, oldest_silent_s=16.0)) == (
        BAD,
        "21 chats wait for their first token, the oldest for 16 s; the target is 1 s.",
        "",
    )
    assert status(of(silent=1, oldest_silent_s=2.0)).severity is OK


def test_few_late_chats_are_no_alarm() -> None:
    assert told(of(replace(MET, ttft_missed=4, tpot_missed=2, missed=5))) == (
        OK,
        "95 of 100 chats of the last minute met both targets: "
        "TTFT p99 250 ms (target 1 s), TPOT p99 30 ms (target 50 ms).",
        "",
    )
    assert status(of(replace(MET, judged=4, ttft_missed=4))).severity is OK


def test_a_quiet_minute_is_judged_by_five() -> None:
    sentence = "Chats missed their targets: TTFT p99 16 s (target 1 s). 97% of 100 missed TTFT in the last 5 minutes."
    for now, severity in ((replace(MET, judged=2), BAD), (Recent(), WARN)):
        found = status(of(now, lately=LATE))
        assert (found.severity, found.sentence) == (severity, sentence)


def test_it_is_fine() -> None:
    assert told(of()) == (
        OK,
        "All 100 chats of the last minute met both targets: "
        "TTFT p99 250 ms (target 1 s), TPOT p99 30 ms (target 50 ms).",
        "",
    )
    assert told(of(Recent(offline_tokens=5))) == (
        OK,
        "Batch work runs. There were no chats in the last five minutes.",
        "",
    )
    assert told(of(Recent())) == (INFO, "Ready. There was no work in the last five minutes.", "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"is_up": False, "has_started": False, "engine_age_s": 40},
            (INFO, "The model has been loading for 40 s. Requests get 503 until it is ready.", ""),
        ),
        (
            {"is_up": False, "engine_age_s": 180, "last_end": KILLED},
            (
                BAD,
                "The engine has been down for 3 min. New chats get 503 until it has restarted.",
                f"It ended: {KILLED}.",
            ),
        ),
        (
            {"is_up": False, "has_given_up": True, "engine_age_s": 300},
            (BAD, "There has been no engine for 5 min: five in a row did not start.", "The log says why."),
        ),
        (
            {"engine_age_s": 12},
            (
                WARN,
                "The engine has not reported for 12 s.",
                "A step takes long, or the engine hangs; then it is replaced.",
            ),
        ),
        (
            {"is_draining": True},
            (WARN, "The server stops. New work is refused; replies that have begun may finish.", ""),
        ),
        (
            {"storage_failing": True},
            (
                BAD,
                "Files and batches cannot be stored. Chats go on.",
                "The disk or the database is full, broken or away; the log says which.",
            ),
        ),
        ({"is_paused": True}, (INFO, "The operator has paused offline work.", "")),
        (
            {"infeasible": 2},
            (
                WARN,
                "2 batches cannot end in the window, even with the whole machine.",
                "Cancel batches that are due before, or give a longer window.",
            ),
        ),
        (
            {"at_risk": 1},
            (WARN, "A batch will not end in the window at the current rate.", "Less online load would help."),
        ),
    ],
)
def test_other_states(changes: dict[str, Any], expected: tuple[Severity, str, str]) -> None:
    assert told(of(**changes)) == expected


def test_errors_are_told_with_what_ended_the_engine() -> None:
    window = replace(MET, errors=12, error_codes=("engine_unavailable", "internal_error"))
    sentence = "12% of the answers in 5 minutes are errors of the server."
    assert told(of(window, last_end="exit status 1")) == (BAD, sentence, "An engine ended: exit status 1.")
    assert told(of(window)) == (BAD, sentence, "Most have the code engine_unavailable.")
    assert status(of(replace(window, errors=4))).severity is OK
    assert status(of(replace(window, errors=5))).severity is OK


def test_refusals_are_told() -> None:
    assert told(of(replace(MET, refused=3))) == (
        BAD,
        "Requests are refused because the server is full: 3 in the last minute.",
        "Not known. Batch work has 90% of the tokens; pause it to compare.",
    )


def test_a_slow_machine_is_told_before_chats_are_late() -> None:
    assert told(of(replace(MET, predicted_s=30.0))) == (
        WARN,
        "The machine does 60% of its calibrated speed. All 100 chats of the last 5 minutes met both targets.",
        "Perhaps another process uses it, or the profile is another machine's.",
    )
    few_late = replace(MET, predicted_s=30.0, ttft_missed=4, missed=4)
    assert (
        told(of(few_late))[1]
        == "The machine does 60% of its calibrated speed. 96 of 100 chats of the last 5 minutes met both targets."
    )
    assert told(of(replace(few_late, judged=0)))[1] == "The machine does 60% of its calibrated speed."
    assert status(of(replace(MET, predicted_s=30.0, steps=19))).severity is OK


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_up": False}, "there is no engine"),
        ({"is_paused": True}, "the operator has paused offline work"),
        ({"storage_failing": True}, "batch data cannot be stored"),
        ({"waiting_batches": 1}, "no server has the model, or the context, that the batches need"),
        ({"blocks_online": 95}, "chats hold the whole KV memory"),
        ({}, "chats use the whole machine"),
        ({"lately": Recent()}, "they are being checked, or have just begun"),
        ({"pending_lines": 0}, ""),
        ({"running_offline": 1}, ""),
        ({"lately": MET}, ""),
    ],
)
def test_why_batch_work_stands_still(changes: dict[str, Any], why: str) -> None:
    chats_alone = replace(MET, offline_tokens=0)
    assert standstill(of(**({"lately": chats_alone, "pending_lines": 600} | changes))) == why


def test_a_standstill_is_told_where_nothing_is_worse() -> None:
    figures = of(replace(MET, offline_tokens=0), pending_lines=600)
    assert status(figures) == Status(WARN, "Batch work stands still: 600 lines wait.", "Chats use the whole machine.")


def test_texts_of_numbers() -> None:
    assert [short(s) for s in (0.0042, 0.151, 0.9994, 1.2, 2.048, 16.0, 180.0)] == [
        "4.2 ms",
        "151 ms",
        "999 ms",
        "1.2 s",
        "2.05 s",
        "16 s",
        "3 min",
    ]
    assert [duration(s) for s in (119, 7200, 200_000)] == ["119 s", "2 h", "2 days"]
    assert [percent(n, 1000) for n in (0, 1, 50, 999, 1000)] == ["0%", "0.1%", "5%", "99.9%", "100%"]
