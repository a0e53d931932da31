"""Which lines may have killed an engine, and which of them may run beside which.

An engine's death names the lines of its last step, not the culprit. They are suspects, in groups that are tried one
after another, each beside all lines that are not suspected. A group that is in the last step again is halved; a single
suspect is tried with no other line in the engine. So a line that kills every engine is found in about ``log2 n``
deaths, and what it cost the others is to be run again, not to stand in a queue.

A line is convicted only by a death at which no other line ran, and never by the first one that it was in. Kills from
outside say little: the first of them makes one group, which runs as it did before, and it takes more kills of one
lonely line than chance brings until the line is taken for their reason (it may need more memory than there is).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from neaptide.server.link.deaths import Evidence

MAX_KILLS_ALONE = 3
"""So many kills from outside while no other line ran convict a line."""


class LineKey(NamedTuple):
    """One line of one job."""

    job_id: str
    line_no: int


_Group = dict[LineKey, None]
"""Lines in the order in which the step named them."""


class Suspects:
    """Told of every engine, every death and every line that ends; says what may run. Pure: no clock, no engine."""

    def __init__(self) -> None:
        self.turn = 0
        """Changes whenever more lines may run than before."""
        self._groups: list[_Group] = []
        """All suspects. The first group is on trial, the others wait."""
        self._deaths: dict[LineKey, set[int]] = {}
        """For each suspect the deaths (by number) at which it ran and which nothing else explains."""
        self._kills_alone: Counter[LineKey] = Counter()
        self._num_deaths = 0
        self._is_solitary = False
        """The line on trial has the engine for itself."""

    # ---- what may run ----

    @property
    def solitary(self) -> LineKey | None:
        """The only line that may run now, if there is one."""
        return next(iter(self._groups[0])) if self._is_solitary else None

    def may_run(self, line: LineKey) -> bool:
        if line in self._deaths:
            return line in self._groups[0]
        return not self._is_solitary

    def of_job(self, job_id: str) -> list[LineKey]:
        return [line for line in self._deaths if line.job_id == job_id]

    # ---- what happens ----

    def engine_is_empty(self) -> None:
        """A new engine has come, or all lines were taken from the one that runs."""
        self._is_solitary = self._is_single()
        self.turn += 1

    def restore(self, attempts: Mapping[LineKey, int]) -> None:
        """Suspects of before a restart of the server, and how many deaths each was in."""
        if not attempts:
            return
        self._num_deaths += 1
        for count in sorted(set(attempts.values()), reverse=True):
            self._groups.append({line: None for line, found in attempts.items() if found == count})
        for line in attempts:
            self._deaths[line] = {self._num_deaths}
        self.turn += 1

    def end(self, lines: Iterable[LineKey]) -> None:
        """These lines need not run any more. The next group's turn comes with the end of the last one on trial."""
        before = self._groups[0] if self._groups else None
        for line in lines:
            if self._deaths.pop(line, None) is not None:
                self._kills_alone.pop(line, None)
                for group in self._groups:
                    group.pop(line, None)
        self._groups = [group for group in self._groups if group]
        if before is not None and not before:
            self._is_solitary = self._is_solitary and self._is_single()
            self.turn += 1

    def death(self, step: Sequence[LineKey], evidence: Evidence, *, has_strangers: bool = False) -> LineKey | None:
        """An engine died in a step with these lines; returns the line that is convicted of it.

        ``has_strangers``: batch rows of lines that have ended were in the step, too.
        """
        self._num_deaths += 1
        if len(step) == 1 and not has_strangers and self._convicts(step[0], evidence):
            self._acquit_company(step[0])
            return step[0]
        self._regroup(dict.fromkeys(step), evidence)
        for line in step:
            self._deaths.setdefault(line, set()).add(self._num_deaths)
        return None

    # ---- inside ----

    def _is_single(self) -> bool:
        return bool(self._groups) and len(self._groups[0]) == 1

    def _convicts(self, line: LineKey, evidence: Evidence) -> bool:
        if evidence is Evidence.WEAK:
            self._kills_alone[line] += 1
            return self._kills_alone[line] >= MAX_KILLS_ALONE
        return evidence is Evidence.STRONG and line in self._deaths

    def _acquit_company(self, culprit: LineKey) -> None:
        """The deaths at which the culprit ran are explained: they say nothing against other lines any more."""
        explained = self._deaths[culprit]
        acquitted = [line for line, deaths in self._deaths.items() if deaths <= explained]
        for deaths in self._deaths.values():
            if deaths is not explained:
                deaths -= explained
        self.end(acquitted)

    def _regroup(self, step: _Group, evidence: Evidence) -> None:
        """Lines of the step come first, the suspects among them in halves."""
        hit: list[_Group] = []
        others: list[_Group] = []
        for group in self._groups:
            hit += _halves([line for line in group if line in step])
            others.append({line: None for line in group if line not in step})
        new = [line for line in step if line not in self._deaths]
        # With a suspect in the step, or after a kill, there is a likelier cause.
        new_groups = _halves(new) if evidence is Evidence.STRONG and not hit else [dict.fromkeys(new)]
        self._groups = [group for group in [*hit, *new_groups, *others] if group]


def _halves(lines: Sequence[LineKey]) -> list[_Group]:
    middle = (len(lines) + 1) // 2
    return [dict.fromkeys(half) for half in (lines[:middle], lines[middle:]) if half]
