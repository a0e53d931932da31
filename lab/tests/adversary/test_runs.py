"""Simulations of cases."""

import math
from dataclasses import replace

import pytest

from lab.tests.adversary.cases import CASE
from neaptide_lab.adversary import runs
from neaptide_lab.adversary.case import Chats, Rows
from neaptide_lab.adversary.runs import TooLong, simulate_case


def test_a_small_load_is_served_and_counted() -> None:
    outcome = simulate_case(CASE, "neaptide")
    assert outcome.failure is None
    assert outcome.attained == len(outcome.chats) == 8
    assert outcome.offline_tokens == 12 * 1020
    assert outcome.largest_row_tokens == 1020
    assert outcome.preemptions == outcome.again_tokens == 0
    assert outcome.computed_tokens >= 8 * 500 + 12 * 1000


def test_the_same_case_gives_the_same_outcome() -> None:
    case = replace(CASE, noise=0.1, rare_every=50, rare_factor=5.0)
    assert simulate_case(case, "neaptide") == simulate_case(case, "neaptide")
    assert simulate_case(case, "neaptide") != simulate_case(case.sibling(1), "neaptide")


def test_cancelled_chats_do_not_count_and_make_room() -> None:
    case = replace(CASE, chats=(Chats(20, 0.1, 2000, 500, cancelled=0.5, cancel_after_s=0.2),), rows=())
    kept = simulate_case(case, "neaptide")
    assert 0 < len(kept.chats) < 20
    whole = simulate_case(replace(case, chats=(replace(case.chats[0], cancelled=0.0),)), "neaptide")
    assert kept.computed_tokens < whole.computed_tokens


def test_a_cancelled_job_ends() -> None:
    case = replace(CASE, chats=(), rows=(Rows(50, 2000, 100, cancel_at_s=1.0),))
    assert simulate_case(case, "neaptide").offline_tokens < 0.5 * 50 * 2100


def test_chats_that_cannot_be_served_are_late() -> None:
    case = replace(CASE, chats=(Chats(60, 0.01, 4000, 10),), rows=(), duration_s=2.0)
    outcome = simulate_case(case, "neaptide")
    assert outcome.attained < 20
    assert max(chat.ratio for chat in outcome.chats) == math.inf


def test_a_last_chat_has_the_time_that_its_targets_allow() -> None:
    case = replace(CASE, tpot_s=0.1, duration_s=2.0, chats=(Chats(5, 0.4, 90, 100),), rows=(Rows(16, 4000, 20),))
    assert max(chat.ratio for chat in simulate_case(case, "priority").chats) < math.inf


def test_prefix_hits_of_conversations_are_counted() -> None:
    case = replace(CASE, chats=(Chats(4, 0.3, 500, 10, turns=2, think_s=2.0),), rows=())
    # A second turn has 1,010 tokens and finds 31 whole blocks of the first turn, which had 500.
    assert simulate_case(case, "neaptide").hit_share == pytest.approx(4 * 496 / (4 * (500 + 1010)))


def test_the_service_of_tenants_is_counted_while_both_have_work() -> None:
    case = replace(CASE, chats=(), rows=(Rows(40, 1000, 20), Rows(20, 2000, 20, tenant=1)), duration_s=20.0, seats=4)
    shares = simulate_case(case, "neaptide").tenants
    assert set(shares) == {"tenant 0", "tenant 1"}
    assert all(20_000 < share.delivered_tokens < 41_000 for share in shares.values())


def test_a_policy_of_the_laboratory_can_be_attacked() -> None:
    assert simulate_case(CASE, "lpm").failure is None


def test_a_failure_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("blocks")

    monkeypatch.setattr(runs._Watch, "finish", fail)
    assert simulate_case(CASE, "neaptide").failure == "AssertionError: blocks"


def test_a_long_simulation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_STEPS", 5)
    with pytest.raises(TooLong):
        simulate_case(CASE, "neaptide")
