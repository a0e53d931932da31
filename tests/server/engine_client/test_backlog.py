"""Outputs that are not taken: merged, bounded, and in the end given up."""

import asyncio
import json
from typing import Any

import pytest

from neaptide.engine.messages import AddRequest, RequestOutput, StepOutputs, TokenLogprobs
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.server.engine_client.backlog import MAX_BACKLOG_VALUES, OutputBacklog, SlowReaderError
from tests.server.asgi import Exchange, settle
from tests.server.conftest import USER, Server

CHAT = "/v1/chat/completions"


def output(*tokens: int, top: int | None = None, **more: Any) -> RequestOutput:
    scores = None if top is None else [TokenLogprobs(t, -0.5, [t] * top, [-0.5] * top) for t in tokens]
    return RequestOutput("r", list(tokens), logprobs=scores, **more)


async def test_what_waits_is_merged_and_what_was_taken_is_not_touched() -> None:
    backlog: OutputBacklog[str] = OutputBacklog()
    backlog.put_nowait(output(1, top=2, num_cached_tokens=7, scheduled_s=0.5))
    taken = await backlog.get()
    assert isinstance(taken, RequestOutput)
    for token in (2, 3):
        backlog.put_nowait(output(token, top=2))
    backlog.put_nowait(output(4, top=2, finish_reason=FinishReason.LENGTH, num_preemptions=1))
    rest = await backlog.get()
    assert isinstance(rest, RequestOutput)
    assert (taken.new_token_ids, rest.new_token_ids) == ([1], [2, 3, 4])
    assert rest.logprobs is not None
    assert [scores.token_id for scores in rest.logprobs] == [2, 3, 4]
    assert (rest.finish_reason, rest.num_preemptions) == (FinishReason.LENGTH, 1)
    assert backlog.empty()


async def test_an_end_keeps_its_place_behind_what_waits() -> None:
    backlog: OutputBacklog[str] = OutputBacklog()
    for item in (output(1), output(2), "lost", output(3), output(4)):
        backlog.put_nowait(item)
    found = [backlog.get_nowait() for _ in range(backlog.qsize())]
    assert [item if isinstance(item, str) else item.new_token_ids for item in found] == [[1, 2], "lost", [3, 4]]


@pytest.mark.acceptance("A13", "outputs that are not taken")
@pytest.mark.parametrize(("top", "tokens"), [(None, MAX_BACKLOG_VALUES + 2), (3, MAX_BACKLOG_VALUES // 4 + 2)])
async def test_beyond_its_bound_it_grows_no_more(top: int | None, tokens: int) -> None:
    backlog: OutputBacklog[str] = OutputBacklog()
    for _ in range(tokens - 1):
        backlog.put_nowait(output(1, top=top))
    assert not backlog.overflowed
    for _ in range(100):
        backlog.put_nowait(output(1, top=top))
    assert backlog.overflowed
    waiting = backlog.get_nowait()
    assert isinstance(waiting, RequestOutput)
    assert len(waiting.new_token_ids) == tokens


async def test_who_falls_too_far_behind_is_aborted_in_the_engine(server: Server) -> None:
    client = server.context.client
    outputs = client.generate(
        AddRequest("r", [1], SamplingParams(max_tokens=2), Tier.DEFAULT, arrival_s=0.0, ttft_slo_s=1, tpot_slo_s=1)
    )
    server.engine.released.clear()
    first = asyncio.ensure_future(anext(outputs))
    await settle()
    client.on_message(StepOutputs([output(1)], []))
    assert (await first).new_token_ids == [1]
    client.on_message(StepOutputs([output(*range(3000)), output(*range(3000)), output(*range(3000))], []))
    assert ("r", FinishReason.ABORT) in server.engine.aborts
    with pytest.raises(SlowReaderError):
        await anext(outputs)
    assert client.num_in_flight == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_a_reader_that_catches_up_gets_the_same_text_in_fewer_pieces(server: Server, n: int) -> None:
    body = {"messages": USER, "max_tokens": 300, "stream": True, "seed": 1, "n": n}

    async def texts(pauses: int) -> tuple[list[str], int]:
        exchange = SlowExchange(server.app, CHAT, body, pauses)
        await exchange.task
        found = [""] * n
        for event in exchange.events[:-1]:
            for choice in event["choices"]:
                found[choice["index"]] += choice["delta"].get("content", "")
        assert exchange.events[-1] == "[DONE]"
        return found, len(exchange.events)

    fast, num_events = await texts(0)
    slow, num_slow_events = await texts(40)
    assert slow == fast
    assert num_slow_events < num_events / 3


async def test_who_is_told_too_late_sees_an_error_and_counts_as_aborted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.engine_client.backlog.MAX_BACKLOG_VALUES", 20)
    exchange = SlowExchange(server.app, CHAT, {"messages": USER, "max_tokens": 3000, "stream": True}, pauses=60)
    await exchange.task
    assert exchange.events[-2]["error"]["code"] == "reader_too_slow"
    assert exchange.events[-1] == "[DONE]"
    assert server.engine.num_running == 0
    assert 'outcome="aborted",tier="default"} 1.0' in (await server.http.get("/metrics")).text


class SlowExchange(Exchange):
    """Takes every piece only after the event loop has gone round ``pauses`` times."""

    def __init__(self, app: Any, path: str, body: object, pauses: int) -> None:
        self._pauses = pauses
        super().__init__(app, path, json.loads(json.dumps(body)))

    async def _send(self, message: Any) -> None:
        for _ in range(self._pauses):
            await asyncio.sleep(0)
        await super()._send(message)
