"""When a pool is planned: after it has grown, and again as long as answers tell more of how long others will be."""

LEAST_ROWS = 500
"""A smaller pool is as well off in the order of its prefix trees."""
GROWTH = 0.1
"""Of the rows of the last plan: so many new ones are worth another."""
PERIOD_S = 5.0
"""Between two plans, at least."""


class Occasions:
    """Times are those of any clock that runs evenly.

    Before a row has ended nothing is known of answers but their limits, and a plan by limits is worth no more than none
    (ADR 33). So what has been learnt since is worth another one: each after twice as long as the one before, for what a
    run of hours has taught changes less with every minute, and a large pool takes long to plan.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = self._wait_s = period_s
        self._again_s = 0.0
        """When answers that have ended are worth another plan."""
        self._num_new = self._num_ended = 0
        """Rows since the last plan was begun ..."""
        self._num_planned = 0
        """... and rows of that plan."""

    def engine_is_new(self) -> None:
        """It follows no plan yet."""
        self._num_new = self._num_planned = 0

    def grown(self, num_rows: int) -> None:
        """So many more rows were given to the engine."""
        self._num_new += num_rows

    def ended(self, num_rows: int) -> None:
        """So many more rows have ended."""
        self._num_ended += num_rows

    def is_due(self, now_s: float) -> bool:
        tells_more = self._num_planned >= LEAST_ROWS and self._num_ended > 0 and now_s >= self._again_s
        return tells_more or self._has_grown

    def begin(self, now_s: float) -> None:
        """A plan is begun."""
        self._wait_s = self._period_s if self._has_grown else 2.0 * self._wait_s
        self._again_s = now_s + self._wait_s
        self._num_new = self._num_ended = 0

    def planned(self, num_rows: int) -> None:
        """It is of so many rows."""
        self._num_planned = num_rows

    @property
    def _has_grown(self) -> bool:
        return self._num_new >= max(LEAST_ROWS, GROWTH * self._num_planned)
