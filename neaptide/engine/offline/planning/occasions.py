"""Decides when a pool is planned: when it has grown, and again as answers show how long others will be."""

LEAST_ROWS = 500
"""Least number of lines that are planned; a smaller pool does as well in the order of its prefix trees."""
GROWTH = 0.1
"""Share of new lines, relative to the last plan, that makes another plan due."""
PERIOD_S = 5.0
"""Least time between two plans."""


class Occasions:
    """Schedule of plans. Times may be of any clock that runs evenly.

    Before a line has ended, only the limits of answers are known, and a plan by limits is worth no more than none (ADR
    33). So ended answers make another plan due. The wait doubles each time: after hours, another minute teaches little,
    and a large pool takes long to plan.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = self._wait_s = period_s
        self._again_s = 0.0
        """Time from which ended answers make another plan due."""
        self._num_new = self._num_ended = 0
        """New and ended lines since the last plan was begun."""
        self._num_planned = 0
        """Lines of the last plan."""

    def engine_is_new(self) -> None:
        """Resets the state: a new engine follows no plan."""
        self._num_new = self._num_planned = 0

    def grown(self, num_rows: int) -> None:
        """Counts lines that were given to the engine."""
        self._num_new += num_rows

    def ended(self, num_rows: int) -> None:
        """Counts ended lines."""
        self._num_ended += num_rows

    def is_due(self, now_s: float) -> bool:
        tells_more = self._num_planned >= LEAST_ROWS and self._num_ended > 0 and now_s >= self._again_s
        return tells_more or self._has_grown

    def begin(self, now_s: float) -> None:
        """Notes that a plan is begun."""
        self._wait_s = self._period_s if self._has_grown else 2.0 * self._wait_s
        self._again_s = now_s + self._wait_s
        self._num_new = self._num_ended = 0

    def planned(self, num_rows: int) -> None:
        """Notes the number of lines of the plan."""
        self._num_planned = num_rows

    @property
    def _has_grown(self) -> bool:
        return self._num_new >= max(LEAST_ROWS, GROWTH * self._num_planned)
