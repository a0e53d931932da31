"""Last reported state of the engine."""

from collections.abc import Callable

from neaptide.engine.messages import EngineReady, Occupancy, StepStats
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import EngineLost

NOTHING = Occupancy(*[0] * len(Occupancy.__struct_fields__))


class EngineState:
    """Last reported state of the engine. Event loop only.

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
        client.subscribe(StepStats, self._on_stats)
        client.subscribe(Occupancy, self._on_occupancy)
        client.subscribe(EngineReady, self._on_engine_ready)
        client.subscribe(EngineLost, self._on_engine_lost)

    @property
    def age_s(self) -> float:
        """Time since ``as_of_s``."""
        return max(0.0, self._clock() - self.as_of_s)

    def _on_stats(self, stats: StepStats) -> None:
        self.occupancy = self.last_step = stats
        self.as_of_s = self._clock()

    def _on_occupancy(self, occupancy: Occupancy) -> None:
        self.occupancy = occupancy
        self.as_of_s = self._clock()

    def _on_engine_ready(self, _: EngineReady) -> None:
        self.num_ready += 1
        self._begin(is_up=True)

    def _on_engine_lost(self, _: EngineLost) -> None:
        self._begin(is_up=False)

    def _begin(self, *, is_up: bool) -> None:
        self.is_up = is_up
        self.occupancy, self.last_step = NOTHING, None
        self.as_of_s = self._clock()
