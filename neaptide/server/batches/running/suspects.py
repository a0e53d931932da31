"""Finds the lines that crash the engine, and decides which lines may run together.

An engine's death names the lines of its last step, not the culprit. They become suspects, in groups. One group at a
time runs, together with all lines that are not suspects. If a group is in the last step again, it is halved. A single
suspect runs with no other line in the engine. So a line that crashes every engine is found in about ``log2 n`` deaths.
The other lines only run again; they do not wait in a queue.

A line is convicted only by a death with no other line in the step, and never by its first. Kills from outside are weak
evidence. The first one makes a single group, which runs as before. A line that runs alone is convicted after more kills
than chance explains, as it may need more memory than there is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from neaptide.server.engine_client.deaths import Evidence

MAX_KILLS_ALONE = 3
"""Kills from outside, with no other line running, that convict a line."""


class LineKey(NamedTuple):
    """One line of one job."""

    job_id: str
    line_no: int


_Group = dict[LineKey, None]
"""Lines in the order of the step."""


class Suspects:
    """State of the search, updated with every engine, death and ended line. Pure: no clock, no engine."""

    def __init__(self) -> None:
        self.turn = 0
        """Changes whenever more lines may run than before."""
        self._groups: list[_Group] = []
        """All suspects. The first group may run, the others wait."""
        self._deaths: dict[LineKey, set[int]] = {}
        """Numbers of the unexplained deaths at which each suspect ran."""
        self._kills_alone: Counter[LineKey] = Counter()
        self._num_deaths = 0
        self._is_solitary = False
        """Whether the suspect in the first group runs alone."""

    # ---- what may run ----

    @property
    def solitary(self) -> LineKey | None:
        """The only line that may run now; None if others may."""
        return next(iter(self._groups[0])) if self._is_solitary else None

    @property
    def needs_solitude(self) -> bool:
        """Whether a single suspect would run now, but with other lines."""
        return self._is_single() and not self._is_solitary

    def may_run(self, line: LineKey) -> bool:
        if line in self._deaths:
            return line in self._groups[0]
        return not self._is_solitary

    def of_job(self, job_id: str) -> list[LineKey]:
        return [line for line in self._deaths if line.job_id == job_id]

    # ---- what happens ----

    def engine_is_empty(self) -> None:
        """Notes that the engine has no lines: it is new, or all lines were withdrawn."""
        self._is_solitary = self._is_single()
        self.turn += 1

    def restore(self, attempts: Mapping[LineKey, int]) -> None:
        """Restores suspects from before a restart of the server, with their numbers of deaths."""
        if not attempts:
            return
        self._num_deaths += 1
        for count in sorted(set(attempts.values()), reverse=True):
            group = [line for line, found in attempts.items() if found == count]
            # Lines of more than one death are halved here too, for an engine whose server always ends with it.
            self._groups += [dict.fromkeys(group)] if count == 1 else _halves(group)
        for line in attempts:
            self._deaths[line] = {self._num_deaths}
        self.turn += 1

    def end(self, lines: Iterable[LineKey]) -> None:
        """Removes ended lines. When the first group is empty, the next may run."""
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
        """Handles an engine death in a step with these lines; returns the convicted line or None.

        ``has_strangers``: the step also had lines that have ended.
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
        """Removes the deaths that the culprit explains from the other suspects, and clears those without further
        deaths."""
        explained = self._deaths[culprit]
        acquitted = [line for line, deaths in self._deaths.items() if deaths <= explained]
        for deaths in self._deaths.values():
            if deaths is not explained:
                deaths -= explained
        self.end(acquitted)

    def _regroup(self, step: _Group, evidence: Evidence) -> None:
        """Puts the lines of the step first, with the suspects among them in halves."""
        hit: list[_Group] = []
        others: list[_Group] = []
        for group in self._groups:
            hit += _halves([line for line in group if line in step])
            others.append({line: None for line in group if line not in step})
        new = [line for line in step if line not in self._deaths]
        # With a suspect in the step, or after a kill, another cause is likelier.
        new_groups = _halves(new) if evidence is Evidence.STRONG and not hit else [dict.fromkeys(new)]
        self._groups = [group for group in [*hit, *new_groups, *others] if group]


def _halves(lines: Sequence[LineKey]) -> list[_Group]:
    middle = (len(lines) + 1) // 2
    return [dict.fromkeys(half) for half in (lines[:middle], lines[middle:]) if half]
