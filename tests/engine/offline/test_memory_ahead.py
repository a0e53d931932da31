"""How much memory requests at work will hold."""

from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.offline.dual_scan import MemoryAhead, MemoryShares

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(1, 100)), max_size=12)
"""Ages, prompts, steps that are left; none is late."""


def ahead_of(rows: list[tuple[int, int, int]], now: int) -> MemoryAhead:
    ahead = MemoryAhead()
    for number, (age, prompt, left) in enumerate(rows):
        ahead.start(str(number), now - age, prompt, age + left)
    return ahead


def held_at(rows: list[tuple[int, int, int]], later: int) -> int:
    """Before the rows that end then have ended."""
    return sum(prompt + age + later for age, prompt, left in rows if left >= later)


@given(ROWS, st.integers(0, 60), st.integers(1, 100))
def test_the_peak_is_that_of_all_steps(rows: list[tuple[int, int, int]], prompt: int, lasting: int) -> None:
    everything = [*rows, (0, prompt, lasting)]
    # The one that starts holds nothing before its first step has ended.
    most = max(
        held_at(everything, later) for later in range(lasting + 1) if any(left == later for *_, left in everything)
    )
    assert ahead_of(rows, 70).peak_tokens(70, prompt, lasting) == most


def test_rows_that_start_together_are_largest_together() -> None:
    ahead = ahead_of([(0, 5, 100)] * 3, 0)
    assert ahead.peak_tokens(0, 5, 100) == 420.0
    # Late, they are expected to hold a quarter more; then the new one holds as much as it has lasted.
    assert ahead.peak_tokens(100, 5, 100) == 3 * (105 + 25) + 5 + 25


@given(ROWS)
def test_what_is_left_to_read_is_what_all_steps_to_come_read(rows: list[tuple[int, int, int]]) -> None:
    tokens, longest = ahead_of(rows, 70).left(70)
    # Each step reads what a row holds halfway through it.
    assert tokens == sum(prompt + age + later + 0.5 for age, prompt, left in rows for later in range(left))
    assert longest == max((left for *_, left in rows), default=0)


def test_a_new_plan_says_how_long_those_last_that_run() -> None:
    ahead = ahead_of([(10, 5, 90)] * 2, 10)
    ahead.end("1", 60)  # after 60 steps of 100
    look = ahead.copy()
    assert look.left(60).longest_steps == 0.8 * 100 - 60
    ahead.expect({"0": 240.0, "gone": 7.0})
    assert ahead.left(60) == (180 * (5 + 60 + 90), 180.0)
    # What is new has its length from the plan that knows of those that have ended.
    assert ahead.peak_tokens(60, 1, 10) == (5 + 60 + 10) + (1 + 10)
    assert look.left(60).longest_steps == 0.8 * 100 - 60


def test_short_answers_of_the_dense_end_have_half_of_their_reading_left() -> None:
    shares = MemoryShares()
    shares.start("dense", False, 100.0, 10.0, memory_s=2e-3)
    shares.start("sparse", True, 60.0, 100.0, memory_s=6e-3)  # a prompt of 10 tokens
    assert shares.left(1e-6) == (1000.0 + 100 * (10 + 50), 100.0)
    shares.end("dense")
    assert shares.copy().left(1e-6) == (6000.0, 100.0)
    shares.end("sparse")
    assert shares.left(1e-6) == (0.0, 0.0)


def test_what_ends_holds_nothing() -> None:
    ahead = ahead_of([(0, 5, 100), (0, 5, 50)], 0)
    look = ahead.copy()
    look.end("0", 100)
    look.end("unknown", 100)
    assert (len(look), len(ahead)) == (1, 2)
    assert look.peak_tokens(0, 1, 10) == 11 + 15
    assert ahead.peak_tokens(0, 1, 10) == 11 + 15 + 15


def test_answers_are_off_as_those_were_that_have_ended() -> None:
    ahead = ahead_of([(0, 0, 100)] * 4, 0)
    for number in range(3):
        ahead.end(str(number), 20)
    # Three lasted a fifth; the one that runs may still last all of its 100 steps.
    off = (3 * 20 + 100) / 400
    assert ahead.peak_tokens(20, 0, 100) == (20 + 100 * off - 20) + (100 * off - 20)
