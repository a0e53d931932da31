"""The exhaustive search over small states. A step takes 10 ms and 1 ms per token, unless said otherwise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide_lab.experiments.limits.driven import driven
from neaptide_lab.experiments.limits.small_states import (
    Judge,
    OfflineRow,
    Part,
    Prompt,
    State,
    Stream,
    best_plan,
    choices,
    greedy_plan,
)
from tests.engine.baselines.costs import PerTokenCost

COST = PerTokenCost()
JUDGE = Judge(COST)


def chunks(state: State, unit_tokens: int, max_tokens: int) -> set[tuple[tuple[str, int], ...]]:
    return {tuple((part.name, part.tokens) for part in choice) for choice in choices(state, unit_tokens, max_tokens)}


# ---- states ----


def test_a_step_moves_the_state_on() -> None:
    state = State(
        (Stream("s", 10, due_s=0.1, tpot_s=0.05, tokens_left=2),),
        (Prompt("p", 8, due_s=0.5, answer_tokens=3), Prompt("q", 8, due_s=0.5)),
        (OfflineRow("r", 8),),
    )
    end = state.after((Part("s", 1), Part("p", 8), Part("q", 4), Part("r", 3)), COST)
    assert end.now_s == pytest.approx(0.026)
    assert end.streams[0] == Stream("s", 11, pytest.approx(0.15), 0.05, 1)
    assert end.streams[1] == Stream("p", 8, pytest.approx(0.076), 0.05, 2)
    assert [prompt.tokens_left for prompt in end.prompts] == [4]
    assert [row.computed for row in end.rows] == [3]
    assert end.offline_tokens == 3
    assert not end.late


def test_who_ends_or_begins_late_is_late() -> None:
    state = State((Stream("s", 10, 0.011, 0.05, 1),), (Prompt("p", 8, 0.018), Prompt("q", 1, 0.021)))
    end = state.after((Part("s", 1), Part("p", 8), Part("q", 1)), COST)  # ends at 20 ms
    assert end.late == {"s", "p"}


def test_a_stream_that_is_behind_is_late_only_if_it_cannot_catch_up() -> None:
    """Its tokens take 11 ms each, and 20 ms are given."""
    behind = Stream("s", 10, due_s=-0.05, tpot_s=0.02, tokens_left=10)  # 130 ms for 10 tokens
    assert (
        JUDGE.value(
            State((behind,)),
        ).minus_late
        == 0
    )
    assert (
        JUDGE.value(
            State((Stream("s", 10, -0.08, 0.02, 10),)),
        ).minus_late
        == -1
    )


def test_prompts_that_cannot_all_be_in_time_lose_the_longest() -> None:
    waiting = (Prompt("long", 60, 0.07), Prompt("b", 20, 0.08), Prompt("c", 20, 0.08))  # 70 and 30 and 30 ms
    assert (
        JUDGE.value(
            State((), waiting),
        ).minus_late
        == -1
    )


def test_a_step_that_computes_what_it_costs_moves_the_end_by_its_overhead_alone() -> None:
    """1 ms a token; a step's 10 ms are lost beside it."""
    state = State((), (Prompt("p", 30, 1.0, answer_tokens=1),), (OfflineRow("r", 20),))
    assert JUDGE.value(state).minus_done_s == pytest.approx(-0.050)
    for choice, lost_s in (((Part("p", 30), Part("r", 20)), 0.010), ((Part("p", 1),), 0.010)):
        assert JUDGE.value(state.after(choice, COST)).minus_done_s == pytest.approx(-0.050 - lost_s)


def test_a_long_answer_needs_a_step_for_each_token() -> None:
    stream = Stream("s", 10, 0.1, 0.05, 40)
    state = State((stream,), (), (OfflineRow("r", 20),))
    assert JUDGE.value(state).minus_done_s == pytest.approx(-40 * 0.011)
    beside, without = ((Part("s", 1), Part("r", 5)), (Part("r", 5),))
    assert JUDGE.value(state.after(beside, COST)).minus_done_s == pytest.approx(-0.016 - 39 * 0.011)
    assert JUDGE.value(state.after(without, COST)).minus_done_s == pytest.approx(-0.015 - 40 * 0.011)


def test_a_prefix_of_several_rows_is_work_once() -> None:
    rows = (OfflineRow("a", 12, "x", 8), OfflineRow("b", 12, "x", 8))
    assert JUDGE.value(State(rows=rows)).minus_done_s == pytest.approx(-0.016)
    first = State(rows=rows).after((Part("a", 12), Part("b", 2, 8)), COST)
    assert first.cached == {"x"}
    assert first.offline_tokens == 14
    assert JUDGE.value(first).minus_done_s == pytest.approx(-0.024 - 0.002)


# ---- every step ----


def test_every_step_of_two_prompts() -> None:
    state = State((), (Prompt("p", 4, 1.0), Prompt("q", 2, 1.0)))
    assert chunks(state, 2, 5) == {
        (("p", 2),),
        (("p", 4),),
        (("p", 4), ("q", 1)),
        (("q", 2),),
        (("q", 2), ("p", 2)),
        (("q", 2), ("p", 3)),
    }


def test_streams_decode_by_their_deadlines_and_rows_take_what_is_left() -> None:
    streams = (Stream("late", 5, 0.5, 0.1, 3), Stream("soon", 5, 0.1, 0.1, 3))
    assert chunks(State(streams, (), (OfflineRow("r", 3),)), 2, 4) == {
        (("soon", 1), ("late", 1), ("r", 2)),
        (("soon", 1), ("late", 1)),
        (("soon", 1), ("r", 2)),
        (("soon", 1), ("r", 3)),
        (("soon", 1),),
        (("r", 2),),
        (("r", 3),),
    }


def test_rows_of_the_same_prefix_may_go_first() -> None:
    rows = (OfflineRow("a", 6, "x", 4), OfflineRow("b", 6), OfflineRow("c", 6, "x", 4))
    steps = set(choices(State(rows=rows), 8, 8))
    assert (Part("a", 6), Part("c", 2, 4)) in steps
    assert (Part("a", 6), Part("b", 2)) in steps


# ---- plans ----


def test_two_steps_together_save_a_request_that_the_best_first_step_loses() -> None:
    """In 50 ms both prompts fit one after the other. The most work per second has `long` and `short` in one step.

    That ends at 60 ms, and `short` is due at 35. One at a time sees that, too: it takes `short` alone first.
    """
    state = State((), (Prompt("long", 40, 0.2, answer_tokens=1), Prompt("short", 10, 0.035, answer_tokens=1)))
    assert state.after((Part("short", 10), Part("long", 40)), COST).late == {"short"}
    first, _ = best_plan(state, 2, JUDGE, 10, 100).steps
    assert first[0].name == "short"
    assert best_plan(state, 2, JUDGE, 10, 100).value.minus_late == 0


def test_a_plan_of_no_steps_is_the_state() -> None:
    assert best_plan(State(), 3, JUDGE, 10, 100).steps == ()
    assert greedy_plan(State(), 3, JUDGE, 10, 100).steps == ()


def states(longest: int, most_rows: int) -> st.SearchStrategy[State]:
    """Up to two streams and two prompts of at most ``longest`` tokens."""
    return st.builds(
        lambda streams, prompts, rows: State(
            tuple(Stream(f"s{n}", 20 + n, due / 100, 0.04, left) for n, (due, left) in enumerate(streams)),
            tuple(Prompt(f"p{n}", tokens, due / 100, answer_tokens=2) for n, (tokens, due) in enumerate(prompts)),
            tuple(OfflineRow(f"r{n}", 12) for n in range(rows)),
        ),
        st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=2),
        st.lists(st.tuples(st.integers(1, longest), st.integers(1, 30)), max_size=2),
        st.integers(0, most_rows),
    )


@given(states(longest=30, most_rows=1))
@settings(max_examples=20)
def test_no_way_to_choose_one_step_at_a_time_is_better_than_all_together(state: State) -> None:
    best = best_plan(state, 2, JUDGE, 12, 48).value
    assert greedy_plan(state, 2, JUDGE, 12, 48).value <= best
    assert greedy_plan(state, 2, JUDGE, 12, 48, look_ahead=2).value <= best


# ---- policies ----


@pytest.mark.parametrize("policy", ["neaptide", "priority", "qoserve", "slidingserve"])
@given(state=states(longest=16, most_rows=0))
@settings(max_examples=8)
def test_no_policy_loses_fewer_requests_than_the_best_plan(policy: str, state: State) -> None:
    steps, end = driven(state, policy, 2, COST, 16), state
    for step in steps:
        assert {part.name for part in step} <= set(end.names)
        end = end.after(step, COST)
    best = best_plan(state, len(steps), JUDGE, 1, 16) if steps else None
    assert best is None or JUDGE.value(end).minus_late <= best.value.minus_late


def test_a_policy_is_driven_from_the_state() -> None:
    """``fcfs`` decodes, computes the prompt and fills the step with the pool; the second row finds the first's prefix.

    Blocks have 16 tokens. The stream ends with its second token.
    """
    state = State(
        (Stream("s", 40, 0.1, 0.05, 2),),
        (Prompt("p", 30, 0.5, answer_tokens=5),),
        (OfflineRow("a", 48, "x", 32), OfflineRow("b", 48, "x", 32)),
    )
    assert driven(state, "fcfs", 3, COST, 64) == (
        (Part("s", 1), Part("p", 30), Part("a", 33)),
        (Part("s", 1), Part("p", 1), Part("a", 15), Part("b", 16, 32)),
        (Part("p", 1),),
    )


def test_a_policy_without_work_has_no_steps() -> None:
    assert driven(State(), "neaptide", 2, COST, 64) == ()
