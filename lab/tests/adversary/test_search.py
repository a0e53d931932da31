"""The search depends on its seed alone, and finds what is planted."""

from dataclasses import replace

import pytest

from lab.tests.adversary.cases import CASE
from neaptide_lab.adversary import search as search_module
from neaptide_lab.adversary.case import PROFILES, Case
from neaptide_lab.adversary.promises import Breach
from neaptide_lab.adversary.search import IMPOSSIBLE, Budget, Search, Tried, judged, niche_of, search


def short_answers(promise: str, policy: str, case: Case, siblings: int = 1) -> Breach:
    """A planted weakness: many chats whose answers have 2 to 4 tokens."""
    count = sum(group.count for group in case.chats if 2 <= group.output_tokens <= 4)
    return Breach(count / 50 - 1.0, f"{count} short answers")


def tried(seed: int, tries: int) -> Search:
    return search("cap", "neaptide", seed, Budget(tries=tries))


def test_the_same_seed_gives_the_same_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "judged", short_answers)
    first, again, other = tried(1, 200), tried(1, 200), tried(2, 200)
    assert first.found == again.found
    assert first.found != other.found


def test_it_finds_a_planted_weakness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "judged", short_answers)
    state = tried(1, 1500)
    assert state.best is not None
    assert state.best.breach.is_broken
    assert state.broken[0] == state.best


def test_it_stops_at_the_breach_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "judged", lambda *args: Breach(0.5, "broken"))
    state = search("failure", "neaptide", 1, Budget(tries=1000), stop_at=0.4)
    assert state.num_tries == search_module.BATCH


def test_impossible_cases_are_not_changed_further() -> None:
    state = Search(1, lambda case: True, PROFILES)
    state.learn(CASE, IMPOSSIBLE)
    state.learn(CASE, Breach(-0.5, "kept"))
    state.learn(CASE, Breach(-0.5, "kept"))
    assert state.found == {"plain": [Tried(CASE, Breach(-0.5, "kept"))]}
    assert state.num_tries == 3


def test_the_best_cases_of_every_niche_are_kept() -> None:
    state = Search(1, lambda case: True, PROFILES)
    talk = replace(CASE, chats=(replace(CASE.chats[0], turns=2),), scale=1.3)
    for number in range(10):
        state.learn(replace(CASE, seed=number), Breach(0.5 + number, "a"))
    state.learn(talk, Breach(0.1, "b"))
    state.learn(replace(talk, kv_blocks=2000), Breach(-0.1, "c"))
    assert [one.breach.amount for one in state.found["plain"]] == [9.5, 8.5, 7.5]
    assert [one.breach.text for one in state.broken] == ["a", "b"]
    assert niche_of(talk) == "conversations, wrong costs"


def test_a_failure_of_the_engine_is_noticed_whatever_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    served = search_module._simulated(CASE, "neaptide", None)
    monkeypatch.setattr(search_module, "_simulated", lambda *args: replace(served, failure="KeyError: 5"))
    breach = judged("pingpong", "neaptide", CASE)
    assert breach.failure == "KeyError: 5"
    state = Search(1, lambda case: True, PROFILES)
    state.learn(CASE, breach)
    assert state.failed == [Tried(CASE, breach)]


def test_only_cases_that_apply_are_tried() -> None:
    state = Search(1, lambda case: len(case.tenants) > 1)
    assert all(len(case.tenants) > 1 for _ in range(10) for case in state.next_cases())


def test_a_kind_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_cases: list[Case] = []

    def judge(promise: str, policy: str, case: Case, siblings: int = 1) -> Breach:
        tried_cases.append(case)
        return Breach(-1.0, "kept")

    monkeypatch.setattr(search_module, "judged", judge)
    search("late", "neaptide", 1, Budget(tries=40), kind="conversations")
    assert len(tried_cases) == 40
    assert all(max(group.turns for group in case.chats) > 1 for case in tried_cases)


def test_a_case_without_a_request_that_fits_breaks_nothing() -> None:
    assert judged("failure", "neaptide", replace(CASE, kv_blocks=20, chats=())) == IMPOSSIBLE


def test_processes_do_not_change_the_result() -> None:
    one, two = (search("failure", "fcfs", 3, Budget(tries=4), jobs=jobs, profiles=["cpu-111m"]) for jobs in (1, 2))
    assert one.found == two.found
