"""What the engine is and has now, as far as it has said so."""

from collections.abc import Callable

from neaptide.engine.messages import Occupancy, StepStats
from neaptide.server.link.engine_client import EngineClient

NOTHING = Occupancy(*[0] * len(Occupancy.__struct_fields__))


class EngineState:
    """Implements ``StatsListener`` and ``EngineListener``. Event loop only.

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
        client.add_stats_listener(self)
        client.add_engine_listener(self)

    @property
    def age_s(self) -> float:
        """Of what is known."""
        return max(0.0, self._clock() - self.as_of_s)

    def on_stats(self, stats: StepStats) -> None:
        """As in ``StatsListener``."""
        self.occupancy = self.last_step = stats
        self.as_of_s = self._clock()

    def on_occupancy(self, occupancy: Occupancy) -> None:
        """As in ``EngineListener``."""
        self.occupancy = occupancy
        self.as_of_s = self._clock()

    def on_engine_ready(self) -> None:
        """As in ``EngineListener``."""
        self.num_ready += 1
        self._begin(is_up=True)

    def on_engine_lost(self) -> None:
        """As in ``EngineListener``."""
        self._begin(is_up=False)

    def _begin(self, *, is_up: bool) -> None:
        self.is_up = is_up
        self.occupancy, self.last_step = NOTHING, None
        self.as_of_s = self._clock()
