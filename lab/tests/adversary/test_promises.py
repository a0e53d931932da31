"""Each promise on made outcomes, kept and broken."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from lab.tests.adversary.cases import CASE
from neaptide_lab.adversary.case import Case
from neaptide_lab.adversary.promises import PROMISES, REFERENCE, Breach, passed_over_s, reached_by
from neaptide_lab.adversary.runs import Chat, Outcome, TenantShare

IN_TIME, BARELY, LATE = Chat(0.0, 0.0, 0.5, 0.5), Chat(0.0, 0.0, 0.95, 0.5), Chat(0.0, 0.0, 1.2, 0.5)
OUTCOME = Outcome(
    chats=(IN_TIME,) * 20,
    offline_tokens=100_000,
    tenants={},
    largest_row_tokens=1000,
    preemptions=0,
    computed_tokens=100_000,
    again_tokens=0,
    hit_share=0.0,
    longest_out_s=0.0,
    num_steps=100,
    failure=None,
)
Outcomes = Callable[[Case, str, int | None], Outcome]


def with_late(count: int, late: Chat = LATE) -> Outcome:
    return replace(OUTCOME, chats=(late,) * count + (IN_TIME,) * (20 - count))


def always(outcome: Outcome) -> Outcomes:
    return lambda case, policy, cap: outcome


def breach(name: str, simulate: Outcomes) -> Breach:
    return PROMISES[name].measure(CASE, "neaptide", simulate)


@pytest.mark.parametrize(("late", "is_broken"), [(0, False), (2, False), (3, True), (10, True)])
def test_late_beside_offline_work(late: int, is_broken: bool) -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        return with_late(late) if case.rows else OUTCOME

    assert breach("late", simulate).is_broken is is_broken


def test_a_chat_that_was_barely_in_time_alone_may_be_late_beside_offline_work() -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        return with_late(10) if case.rows else with_late(10, BARELY)

    assert not breach("late", simulate).is_broken


def test_a_chat_without_room_for_one_more_step_may_be_late_beside_offline_work() -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        return with_late(10) if case.rows else OUTCOME

    case = replace(CASE, ttft_s=1.0, tpot_s=0.6)
    assert not PROMISES["late"].measure(case, "neaptide", simulate).is_broken


def test_few_safe_chats_prove_nothing() -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        return with_late(20) if case.rows else with_late(11)

    assert breach("late", simulate).amount == -1.0


def test_chats_that_are_late_alone_too_are_no_breach() -> None:
    assert not breach("late", always(with_late(15))).is_broken


def test_a_cap_is_not_tried_where_it_has_nothing_to_gain() -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        assert cap is None
        return with_late(2)

    assert not PROMISES["cap"].measure(CASE.alone(), "neaptide", simulate).is_broken


def test_what_chats_reach_leaves_out_the_last_tenth() -> None:
    assert reached_by(with_late(2)) == (0.5, 0.5)
    assert reached_by(with_late(3)) == (1.2, 0.5)
    assert reached_by(with_late(3, Chat(0.0, 0.0, math.inf, math.inf))) is None
    assert reached_by(replace(OUTCOME, chats=())) is None


@pytest.mark.parametrize(
    ("ours", "capped", "is_broken"),
    [
        (OUTCOME, OUTCOME, False),
        (with_late(1), OUTCOME, False),
        (with_late(2), OUTCOME, False),
        (with_late(3), OUTCOME, True),
        (OUTCOME, with_late(5), False),
        (OUTCOME, replace(OUTCOME, offline_tokens=106_000), False),
        (OUTCOME, replace(OUTCOME, offline_tokens=108_000), True),
        (OUTCOME, replace(with_late(1), offline_tokens=108_000), False),
        (replace(OUTCOME, offline_tokens=0), OUTCOME, False),
    ],
)
def test_a_constant_cap(ours: Outcome, capped: Outcome, is_broken: bool) -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        assert cap in (None, CASE.cap_tokens)
        return ours if cap is None else capped

    assert breach("cap", simulate).is_broken is is_broken


@pytest.mark.parametrize(
    ("delivered", "admitted", "is_broken"),
    [
        ((500_000, 500_000), (500_000, 500_000), False),
        ((540_000, 460_000), (540_000, 460_000), False),
        ((700_000, 300_000), (700_000, 300_000), True),
        # What is admitted is even: the answers of one are still to come.
        ((700_000, 300_000), (500_000, 500_000), False),
        # A turn has 8,192 tokens, so little work cannot be even.
        ((20_000, 5_000), (20_000, 5_000), False),
    ],
)
def test_shares(delivered: tuple[int, int], admitted: tuple[int, int], is_broken: bool) -> None:
    tenants = {f"tenant {k}": TenantShare(delivered[k], admitted[k]) for k in (0, 1)}
    assert breach("share", always(replace(OUTCOME, tenants=tenants))).is_broken is is_broken


def test_one_tenant_alone_has_no_share() -> None:
    assert not breach("share", always(OUTCOME)).is_broken
    assert not PROMISES["share"].applies(replace(CASE, rows=CASE.rows[:1]))


@pytest.mark.parametrize(
    ("preemptions", "again_tokens", "is_broken"),
    [(0, 0, False), (5, 0, False), (6, 0, True), (1, 20_000, False), (1, 21_000, True)],
)
def test_ping_pong(preemptions: int, again_tokens: int, is_broken: bool) -> None:
    outcome = replace(OUTCOME, preemptions=preemptions, again_tokens=again_tokens)
    assert breach("pingpong", always(outcome)).is_broken is is_broken


def waiting(began_s: float) -> Outcome:
    """The first chat begins then, others every second."""
    chats = [Chat(float(k), float(k), 0.5, 0.5) for k in range(60)]
    return replace(OUTCOME, chats=(replace(chats[0], began_s=began_s), *chats[1:]))


@pytest.mark.parametrize(("began_s", "is_broken"), [(0.0, False), (20.0, False), (22.0, True), (100.0, True)])
def test_a_chat_that_others_pass(began_s: float, is_broken: bool) -> None:
    def simulate(case: Case, policy: str, cap: int | None) -> Outcome:
        return waiting(0.0) if policy == REFERENCE else waiting(began_s)

    assert breach("wait", simulate).is_broken is is_broken


def test_a_wait_that_the_reference_has_too_is_no_breach() -> None:
    assert not breach("wait", always(waiting(25.0))).is_broken


def test_a_chat_that_nobody_passed_was_not_passed_over() -> None:
    in_order = tuple(Chat(float(k), 10.0 + k, 0.5, 0.5) for k in range(5))
    assert passed_over_s(replace(OUTCOME, chats=in_order)) == 0.0
    assert passed_over_s(waiting(30.5)) == 30.0


@pytest.mark.parametrize(("out_s", "is_broken"), [(19.0, False), (21.0, True)])
def test_a_preempted_row_that_stays_out(out_s: float, is_broken: bool) -> None:
    assert breach("wait", always(replace(OUTCOME, longest_out_s=out_s))).is_broken is is_broken


@pytest.mark.parametrize(("failure", "is_broken"), [(None, False), ("ValueError: x", True)])
def test_failures(failure: str | None, is_broken: bool) -> None:
    assert breach("failure", always(replace(OUTCOME, failure=failure))).is_broken is is_broken
