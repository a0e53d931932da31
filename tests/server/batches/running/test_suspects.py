"""The line that kills the engine is found in few deaths, and no other line is blamed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, log2

import hypothesis.strategies as st
import pytest
from hypothesis import given

from neaptide.server.batches.running.suspects import MAX_KILLS_ALONE, LineKey, Suspects
from neaptide.server.engine_client.deaths import Evidence

EXCUSED, WEAK, STRONG = Evidence.EXCUSED, Evidence.WEAK, Evidence.STRONG


def keys(*numbers: int) -> list[LineKey]:
    return [LineKey("b", number) for number in numbers]


def running(suspects: Suspects, count: int) -> list[int]:
    """Of lines 0 to ``count - 1`` those that may run."""
    return [number for number in range(count) if suspects.may_run(LineKey("b", number))]


def died(step: list[int], evidence: Evidence, suspects: Suspects | None = None) -> Suspects:
    suspects = suspects or Suspects()
    assert suspects.death(keys(*step), evidence) is None
    suspects.engine_is_empty()
    return suspects


# ---- the groups -----------------------------------------------------------------------------------------


def test_after_a_kill_from_outside_everything_runs_as_before() -> None:
    assert running(died([0, 1, 2], WEAK), 6) == [0, 1, 2, 3, 4, 5]


def test_after_a_crash_half_of_the_suspects_runs_beside_the_others() -> None:
    suspects = died([0, 1, 2], STRONG)
    assert running(suspects, 6) == [0, 1, 3, 4, 5]
    turn = suspects.turn
    suspects.end(keys(0))
    assert (running(suspects, 6), suspects.turn) == ([0, 1, 3, 4, 5], turn)
    suspects.end(keys(1))
    assert (running(suspects, 6), suspects.turn) == ([0, 1, 2, 3, 4, 5], turn + 1)


@pytest.mark.parametrize("evidence", [EXCUSED, WEAK, STRONG])
def test_a_further_death_halves_the_suspects_that_ran(evidence: Evidence) -> None:
    suspects = died([0, 1, 2, 3, 4], WEAK)
    died([0, 1, 2, 3, 5], evidence, suspects)
    assert running(suspects, 8) == [0, 1, 6, 7]
    suspects.end(keys(0, 1))
    assert running(suspects, 8) == [0, 1, 2, 3, 6, 7]
    suspects.end(keys(2, 3))
    assert running(suspects, 8) == [0, 1, 2, 3, 5, 6, 7]  # it ran in one of the two steps
    suspects.end(keys(5))
    assert running(suspects, 8) == list(range(8))


def test_a_death_without_a_suspect_leaves_them_waiting() -> None:
    suspects = died([0, 1, 2, 3], STRONG)
    died([4, 5, 6, 7], STRONG, suspects)
    assert running(suspects, 9) == [4, 5, 8]
    suspects.end(keys(4, 5))
    suspects.end(keys(6, 7))
    assert running(suspects, 9) == [0, 1, 4, 5, 6, 7, 8]


def test_a_death_outside_a_step_says_nothing() -> None:
    suspects = died([0, 1, 2, 3], STRONG)
    assert running(died([], STRONG, suspects), 5) == [0, 1, 4]


def test_a_single_suspect_has_the_engine_for_itself_and_so_has_the_next() -> None:
    suspects = died([0, 1], STRONG)
    assert (suspects.solitary, running(suspects, 4)) == (LineKey("b", 0), [0])
    suspects.end(keys(0))
    assert (suspects.solitary, running(suspects, 4)) == (LineKey("b", 1), [1])
    suspects.end(keys(1))
    assert (suspects.solitary, running(suspects, 4)) == (None, [0, 1, 2, 3])


def test_a_single_suspect_whose_turn_comes_in_a_full_engine_runs_beside_the_others() -> None:
    suspects = died([0, 1, 2], STRONG)
    suspects.end(keys(0, 1))
    assert (suspects.solitary, running(suspects, 4)) == (None, [0, 1, 2, 3])
    suspects.engine_is_empty()
    assert suspects.solitary == LineKey("b", 2)


def test_a_suspect_that_ends_while_it_waits_changes_no_turn() -> None:
    suspects = died([0, 1, 2, 3], STRONG)
    turn = suspects.turn
    suspects.end(keys(3, 7))
    assert (running(suspects, 4), suspects.turn) == ([0, 1, 3], turn)


# ---- the verdict ----------------------------------------------------------------------------------------


def test_the_first_death_convicts_nobody() -> None:
    assert Suspects().death(keys(0), STRONG) is None


def test_a_crash_while_a_suspect_runs_alone_convicts_it() -> None:
    assert died([0], STRONG).death(keys(0), STRONG) == LineKey("b", 0)


def test_nobody_is_convicted_beside_another() -> None:
    suspects = died([0], STRONG)
    assert suspects.death(keys(0, 1), STRONG) is None
    assert suspects.death(keys(0), STRONG, has_strangers=True) is None


def test_it_takes_more_kills_than_chance_brings() -> None:
    suspects = Suspects()
    verdicts = [suspects.death(keys(0), WEAK) for _ in range(MAX_KILLS_ALONE)]
    assert verdicts == [None, None, LineKey("b", 0)]


def test_kills_of_a_line_that_ended_are_forgotten() -> None:
    suspects = Suspects()
    for _ in range(MAX_KILLS_ALONE - 1):
        suspects.death(keys(0), WEAK)
    suspects.end(keys(0))
    assert suspects.death(keys(0), WEAK) is None


def test_an_excused_death_never_convicts() -> None:
    suspects = Suspects()
    assert [suspects.death(keys(0), EXCUSED) for _ in range(9)] == [None] * 9


def test_a_conviction_acquits_those_who_only_ran_beside_the_culprit() -> None:
    suspects = died([7, 8], WEAK)  # a death of its own
    died([0, 1, 2], STRONG, suspects)
    died([0, 1], STRONG, suspects)
    assert suspects.death(keys(0), STRONG) == LineKey("b", 0)
    suspects.engine_is_empty()
    died([9], STRONG, suspects)
    suspects.end(keys(9))
    assert running(suspects, 9) == list(range(9))
    died([2, 8], STRONG, suspects)  # of the two only 8 was suspected before
    assert suspects.solitary == LineKey("b", 8)


def test_suspects_of_before_a_restart_come_by_the_number_of_their_deaths() -> None:
    suspects = Suspects()
    suspects.restore({})
    assert suspects.turn == 0
    suspects.restore(dict(zip(keys(0, 1, 2, 3), [1, 2, 2, 1], strict=True)))
    assert (running(suspects, 5), suspects.turn) == ([1, 4], 1)
    suspects.end(keys(1))
    assert running(suspects, 5) == [1, 2, 4]
    suspects.end(keys(2))
    assert running(suspects, 5) == [0, 1, 2, 3, 4]
    suspects.end(keys(0))
    suspects.engine_is_empty()
    assert suspects.death(keys(3), STRONG) == LineKey("b", 3)


@pytest.mark.parametrize("culprit", range(7))
def test_a_line_that_ends_its_server_with_its_engine_is_found_by_one_start_after_another(culprit: int) -> None:
    """Seven lines run at once, and each server knows only how many deaths each line has had."""
    attempts: dict[LineKey, int] = {}
    left, num_starts, convict = set(range(7)), 0, None
    while convict is None and num_starts < 10:
        num_starts += 1
        suspects = Suspects()
        suspects.restore({line: deaths for line, deaths in attempts.items() if line.line_no in left})
        if suspects.needs_solitude:
            suspects.engine_is_empty()
        while culprit not in (runs := left.intersection(running(suspects, 7))):
            suspects.end(keys(*runs))
            left -= runs
        convict = suspects.death(keys(*runs), STRONG)
        attempts |= {line: attempts.get(line, 0) + 1 for line in keys(*runs)}
    assert convict == LineKey("b", culprit)
    assert num_starts <= 6


# ---- histories ------------------------------------------------------------------------------------------


@dataclass
class StateMachine:
    """Runs lines, ``seats`` at a time, as an engine does; a culprit kills it at a token of its own."""

    seats: int
    num_tokens: list[int]
    """Of each line."""
    fatal: dict[int, int]
    """Culprits, and before which token they kill."""
    evidence: Evidence
    """What their deaths say."""
    kills: set[int]
    """Steps at which the engine is killed from outside."""
    suspects: Suspects = field(default_factory=Suspects)
    convicted: list[int] = field(default_factory=list)
    num_deaths: int = 0

    def run(self) -> None:
        left = dict.fromkeys(range(len(self.num_tokens)))
        steps = self._steps(left)
        while left:
            for step in steps:
                convict = self.suspects.death(keys(*step), self._cause)
                self.num_deaths += 1
                assert self.num_deaths < 1_000
                if convict is not None:
                    self.convicted.append(convict.line_no)
                    del left[convict.line_no]
                self.suspects.engine_is_empty()
                break
            steps = self._steps(left)

    def _steps(self, left: dict[int, None]) -> Iterator[list[int]]:
        """Steps until there is a death, which it yields."""
        tokens: dict[int, int] = {}
        self.clock = getattr(self, "clock", 0)
        while left:
            for number in left:
                if len(tokens) < self.seats and number not in tokens and self.suspects.may_run(LineKey("b", number)):
                    tokens[number] = 0
            assert tokens, "no line may run"
            self.clock += 1
            if self.clock in self.kills:
                self._cause = WEAK
                yield list(tokens)
            if any(self.fatal.get(number) == done for number, done in tokens.items()):
                self._cause = self.evidence
                yield list(tokens)
            for number in list(tokens):
                tokens[number] += 1
                if tokens[number] == self.num_tokens[number]:
                    del tokens[number], left[number]
                    self.suspects.end(keys(number))


@st.composite
def machines(draw: st.DrawFn, *, max_culprits: int, evidence: Evidence = STRONG) -> StateMachine:
    num_lines = draw(st.integers(1, 40))
    num_tokens = draw(st.lists(st.integers(1, 6), min_size=num_lines, max_size=num_lines))
    culprits = draw(st.sets(st.integers(0, num_lines - 1), max_size=max_culprits))
    fatal = {number: draw(st.integers(0, num_tokens[number] - 1)) for number in sorted(culprits)}
    kills = draw(st.sets(st.integers(1, 60), max_size=2))
    return StateMachine(draw(st.integers(1, 16)), num_tokens, fatal, evidence, kills)


@given(machines(max_culprits=3))
def test_every_culprit_and_nobody_else_is_convicted_in_few_deaths(machine: StateMachine) -> None:
    machine.run()
    assert sorted(machine.convicted) == sorted(machine.fatal)
    per_culprit = ceil(log2(machine.seats)) + 3
    assert machine.num_deaths <= len(machine.fatal) * per_culprit + len(machine.kills)


@given(machines(max_culprits=1, evidence=WEAK))
def test_a_line_that_has_every_engine_killed_is_found_as_well(machine: StateMachine) -> None:
    machine.run()
    assert machine.convicted == list(machine.fatal)
    assert machine.num_deaths <= len(machine.fatal) * (ceil(log2(machine.seats)) + MAX_KILLS_ALONE + 2) + len(
        machine.kills
    )


@given(machines(max_culprits=0))
def test_two_kills_fail_nobody(machine: StateMachine) -> None:
    machine.run()
    assert machine.convicted == []
