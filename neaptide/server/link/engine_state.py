"""Last reported state of the engine."""

from collections.abc import Callable

from neaptide.engine.messages import Occupancy, StepStats
from neaptide.server.link.engine_client import EngineClient

NOTHING = Occupancy(*[0] * len(Occupancy.__struct_fields__))


class EngineState:
    """Last reported state of the engine. Implements ``StatsListener`` and ``EngineListener``. Event loop only.

    Displays use this state and not the last step's. Requests that leave between steps may leave none to run, and a lost
    engine has no state.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_up = False
        self.num_ready = 0
        """Number of engines that have been ready; 0 while the first one starts."""
        self.as_of_s = clock()
        """When it last reported its state, started or ended."""
        self.occupancy: Occupancy | StepStats = NOTHING
        self.last_step: StepStats | None = None
        """Last step of the current engine."""
        client.add_stats_listener(self)
        client.add_engine_listener(self)

    @property
    def age_s(self) -> float:
        """Time since ``as_of_s``."""
        return max(0.0, self._clock() - self.as_of_s)

    def on_stats(self, stats: StepStats) -> None:
        self.occupancy = self.last_step = stats
        self.as_of_s = self._clock()

    def on_occupancy(self, occupancy: Occupancy) -> None:
        self.occupancy = occupancy
        self.as_of_s = self._clock()

    def on_engine_ready(self) -> None:
        self.num_ready += 1
        self._begin(is_up=True)

    def on_engine_lost(self) -> None:
        self._begin(is_up=False)

    def _begin(self, *, is_up: bool) -> None:
        self.is_up = is_up
        self.occupancy, self.last_step = NOTHING, None
        self.as_of_s = self._clock()
