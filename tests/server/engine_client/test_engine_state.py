"""What is known of the engine: up or not, what it has, and as of when."""

from neaptide.engine.messages import Occupancy, StepOutputs
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.engine_state import NOTHING, EngineState
from tests.server.fake_engine import FakeEngine, some_stats

HAS = Occupancy(1, 2, 3, 4, 5, 6, 7, 8, 9)


async def test_it_is_what_was_said_last_and_nothing_without_an_engine() -> None:
    now_s = 100.0
    client = EngineClient()
    state, engine = EngineState(client, lambda: now_s), FakeEngine(client)
    now_s = 103.0
    assert (state.is_up, state.num_ready, state.occupancy, state.age_s) == (False, 0, NOTHING, 3.0)
    engine.attach()
    assert (state.is_up, state.num_ready, state.occupancy, state.age_s) == (True, 1, NOTHING, 0.0)
    now_s = 104.0
    stats = some_stats(running_online=5, predicted_s=0.25)
    client.on_message(StepOutputs([], [stats]))
    assert (state.occupancy, state.last_step, state.age_s) == (stats, stats, 0.0)
    now_s = 105.0
    assert state.age_s == 1.0
    client.on_message(StepOutputs([], [stats], occupancy=HAS))  # the step's were held back: it is older
    assert (state.occupancy, state.last_step, state.age_s) == (HAS, stats, 0.0)
    client.on_message(StepOutputs([], []))
    assert state.occupancy == HAS
    engine.die()
    now_s = 107.0
    assert (state.is_up, state.num_ready, state.occupancy, state.last_step, state.age_s) == (
        False,
        1,
        NOTHING,
        None,
        2.0,
    )
    engine.attach()
    assert (state.is_up, state.num_ready, state.occupancy) == (True, 2, NOTHING)


async def test_who_listens_late_knows_that_there_is_an_engine() -> None:
    client = EngineClient()
    FakeEngine(client).attach()
    assert EngineState(client, lambda: 0.0).is_up
