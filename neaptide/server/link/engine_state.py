"""What the engine is and has now, as far as it has said so."""

from collections.abc import Callable

from neaptide.engine.messages import EngineReady, Occupancy, StepStats
from neaptide.server.link.engine_client import EngineClient
from neaptide.server.link.events import EngineLost

NOTHING = Occupancy(*[0] * len(Occupancy.__struct_fields__))


class EngineState:
    """Subscribes to what the engine says of itself. Event loop only.

    What is shown of an engine is read here and not off its last step: requests that leave between two steps may leave
    none to run, and an engine that is gone has nothing.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_up = False
        self.num_ready = 0
        """Engines that have been ready. Without one the first still starts."""
        self.as_of_s = clock()
        """When it last said what it has, or came or went."""
        self.occupancy: Occupancy | StepStats = NOTHING
        self.last_step: StepStats | None = None
        """Of this engine."""
        client.subscribe(StepStats, self._on_stats)
        client.subscribe(Occupancy, self._on_occupancy)
        client.subscribe(EngineReady, self._on_engine_ready)
        client.subscribe(EngineLost, self._on_engine_lost)

    @property
    def age_s(self) -> float:
        """Of what is known."""
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
