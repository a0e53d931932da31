"""Series of the engine as it is now, and the counters that are there before anything is counted."""

import httpx2

from neaptide.engine.messages import Occupancy, StepOutputs
from neaptide.loadgen.client.prometheus import Samples
from neaptide.server.app import ServerState, create_app
from neaptide.server.http.auth import KeyRing
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import Server, make_context

HELD = ("neaptide_requests_running", "neaptide_requests_waiting", "neaptide_step_predicted_seconds")
OF_VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def samples(server: Server) -> Samples:
    return Samples((await server.http.get("/metrics")).text)


async def test_an_engine_that_became_idle_between_steps_is_shown_idle(server: Server) -> None:
    server.engine.emit_stats(running_online=5, waiting_online=2, blocks_online=11, blocks_free=53)
    found = await samples(server)
    assert (found.sum("neaptide_requests_running"), found.sum("vllm:num_requests_running")) == (5, 5)
    server.context.client.on_message(StepOutputs([], [], occupancy=Occupancy(0, 0, 0, 0, 60, 4, 0, 0, 3)))
    found = await samples(server)
    assert [found.sum(name) for name in HELD[:2] + OF_VLLM] == [0.0] * 5
    assert {state: found.sum("neaptide_kv_blocks", state=state) for state in ("free", "cached", "online")} == {
        "free": 60,
        "cached": 4,
        "online": 0,
    }
    assert found.sum("neaptide_kv_reserved_blocks") == 3


async def test_of_an_engine_that_is_gone_nothing_is_shown_but_that(server: Server) -> None:
    server.engine.emit_stats(running_online=5, waiting_offline=2, blocks_online=11, blocks_reserved=7)
    found = await samples(server)
    assert (found.sum("neaptide_engine_up"), found.sum("neaptide_engine_starts_total")) == (1, 1)
    server.engine.die()
    found = await samples(server)
    assert (found.sum("neaptide_engine_up"), found.sum("neaptide_engine_starts_total")) == (0, 1)
    gone = (*HELD, *OF_VLLM, "neaptide_kv_blocks", "neaptide_kv_reserved_blocks")
    assert [found.sum(name) for name in gone] == [0.0] * len(gone)
    server.engine.attach()
    found = await samples(server)
    assert (found.sum("neaptide_engine_up"), found.sum("neaptide_engine_starts_total")) == (1, 2)


async def test_before_the_first_engine_is_ready_none_is_up_and_every_counter_of_targets_is_there(
    tokenizer: Tokenizer,
) -> None:
    app = create_app(ServerState(context=make_context(tokenizer), keys=KeyRing(())))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as http:
        text = (await http.get("/metrics")).text
    assert "neaptide_engine_up 0.0" in text
    assert "neaptide_engine_starts_total 0.0" in text
    for tier in ("default", "priority"):
        for slo in ("ttft", "tpot"):
            for name in ("attained", "violated"):
                assert f'neaptide_slo_{name}_total{{slo="{slo}",tier="{tier}"}} 0.0' in text
    assert 'neaptide_admission_rejected_total{reason="overloaded",tier="flex"} 0.0' in text
