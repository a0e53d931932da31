"""The load generator on our own server: lengths in its tokens, and its series."""

import httpx
import pytest

from neaptide.loadgen.report.summary import summary
from neaptide.loadgen.run.load import Shot, Target
from neaptide.loadgen.run.runner import How, run
from neaptide.loadgen.run.samples import Watch
from neaptide.loadgen.workloads.traces import TraceRequest
from tests.server.conftest import Server
from tests.server.live import serving


@pytest.mark.parametrize("is_chat", [True, False])
async def test_prompts_and_answers_have_exactly_the_recorded_lengths(server: Server, is_chat: bool) -> None:
    lengths = [(40, 3), (100, 1), (777, 2)]
    shots = [Shot(TraceRequest(0.0, ((k, n),), out), Target(60.0, 60.0)) for k, (n, out) in enumerate(lengths)]
    async with serving(server.app) as live, httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.port}") as http:
        progress = await run(http, shots, How(is_chat=is_chat), lambda progress: None)
    found = [(record.num_prompt_tokens, record.num_output_tokens) for _, record in progress.records]
    assert sorted(found) == lengths
    assert progress.wording.exact
    assert summary(progress)["attainment"]["both"] == 1.0


async def test_the_series_of_the_engine_become_samples(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.loadgen.run.samples.LEAST_S", 0.0)
    async with serving(server.app) as live, httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.port}") as http:
        watch = Watch(http)
        await watch.look()
        server.engine.emit_stats(duration_s=0.5, predicted_s=0.25, offline_decode_tokens=9, blocks_online=4)
        await watch.look()
    (sample,) = watch.samples
    assert sample.tokens_per_s["offline"] * sample.seconds == pytest.approx(9)
    assert sample.kv_blocks["online"] == 4
    assert (sample.predicted_step_s, sample.measured_step_s) == (0.25, 0.5)
