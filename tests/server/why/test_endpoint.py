"""``GET /admin/why/{id}`` and the command, over the real app with an engine that tells of its steps."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from neaptide.engine.messages import AddRequest, RecentSteps, StepOutputs
from neaptide.server.text.tokenizer import Tokenizer
from neaptide.server.why.desk import REPORTED_S
from neaptide.server.why.requests import EndedRequests
from neaptide.server.why.steps import KEPT_S
from tests.server.conftest import MODEL_ID, USER, Server, make_server
from tests.server.why.timeline import OTHER, Timeline

ALICE, BOB, ROOT = ({"Authorization": f"Bearer {name}-key-of-a-test"} for name in ("alice", "bob", "root"))


class LateServer:
    """A server whose clock stands still but for the way of a request through the engine: 100 ms for another prompt,
    50 ms for its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.now_s = 100.0
        server.context.clock = lambda: self.now_s
        server.context.ttft_slo_s = 0.04
        engine, send = server.engine, server.engine.send
        engine.attach()

        def send_and_step(message: Any) -> None:
            send(message)
            if isinstance(message, AddRequest):
                self._step(message)

        engine.send = send_and_step  # type: ignore[method-assign]
        output = engine._output

        def at_the_steps_end(request: AddRequest, new: list[int]) -> Any:
            found = output(request, new)
            found.first_token_s = self.now_s
            return found

        engine._output = at_the_steps_end  # type: ignore[method-assign]

    def _step(self, message: AddRequest) -> None:
        time = Timeline(now_ms=1e3 * self.now_s, taken_s={OTHER: self.now_s})
        held = {"online_blocks": 60, "offline_blocks": 900, "available_blocks": 40, "reserved_blocks": 130}
        lengths = [("prompts", 0.1, 0.0, ""), ("offline", 0.05, 1.25, "streams")]
        time.step(100, prompts={OTHER: 500}, lengths=lengths, offline_limit="length", **held)
        time.step(50, prompts={"own": 100})
        last = time.steps[-1]
        last.admitted.append((3, message.request_id))
        time.steps[0].admitted.append((1, OTHER))
        self.now_s += 0.15
        report = RecentSteps(self.now_s, 16, time.steps, [(OTHER, self.now_s - 0.15, 500)])
        self.server.context.client.on_message(StepOutputs([], [], recent=report))

    async def chat(self, **headers: str) -> dict[str, Any]:
        body = {"model": MODEL_ID, "messages": USER, "max_tokens": 1}
        response = await self.server.http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return {"id": response.json()["id"], "request_id": response.headers["x-request-id"]}

    async def why(self, request_id: str, **headers: str) -> Any:
        return await self.server.http.get(f"/admin/why/{request_id}", headers=headers)


@pytest.fixture
async def late(server: Server) -> LateServer:
    return LateServer(server)


@pytest.fixture
async def keyed(tokenizer: Tokenizer) -> AsyncIterator[LateServer]:
    built = make_server(tokenizer, ("alice-key-of-a-test", "bob-key-of-a-test", "root-key-of-a-test:admin"))
    yield LateServer(built)
    await built.openai.close()


async def test_a_late_chat_is_explained_under_each_of_its_ids(late: LateServer) -> None:
    said = await late.chat()
    answers = [(await late.why(one)).json() for one in (said["id"], said["request_id"], said["id"][9:])]
    assert answers[0]["sentence"] == (
        "late by 110 ms; 0 ms of it by batch work: 100 ms waiting for one prompt before it, 10 ms its own prompt "
        "(its first token took 150 ms for a target of 40 ms)"
    )
    assert answers[1:] == answers[:1] * 2
    (wait,) = answers[0]["waits"]
    assert wait["what"] == "first_token"
    assert wait["late_ms"] == pytest.approx(sum(wait["late_parts_ms"].values()))
    assert wait["took_ms"] == pytest.approx(sum(wait["parts_ms"].values()))
    assert [(step["at_ms"], step["busy_ms"], step["prompt_tokens"]) for step in wait["steps"]] == [
        (0, 100, 500),
        (100, 50, 100),
    ]


async def test_a_step_says_who_held_the_memory_what_was_forecast_and_what_the_judgement_weighed(
    late: LateServer,
) -> None:
    answer = (await late.why((await late.chat())["id"])).json()
    first, second = answer["waits"][0]["steps"]
    assert first["judgement"] == (
        "100.0 ms for prompts, 0.00 late; 50.0 ms for offline, 1.25 late, most of them streams; "
        "batch work ended by length"
    )
    blocks = ("online_blocks", "batch_blocks", "available_blocks", "forecast_blocks")
    assert [first[name] for name in blocks] == [60, 900, 40, 130]
    assert second["judgement"] == ""


async def test_an_unknown_id_and_one_of_long_ago_are_not_found(late: LateServer) -> None:
    said = await late.chat()
    assert (await late.why(said["id"])).status_code == 200
    late.now_s += KEPT_S + 1.0
    for request_id in (said["id"], "chatcmpl-0", "x%20y", f"batch_x:{9:05000}"):
        response = await late.why(request_id)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_key_asks_about_its_own_requests_and_an_admin_about_all(keyed: LateServer) -> None:
    said = await keyed.chat(**ALICE)
    assert (await keyed.why(said["id"], **ALICE)).status_code == 200
    assert (await keyed.why(said["id"], **ROOT)).status_code == 200
    assert (await keyed.why(said["id"], **BOB)).json() == (await keyed.why("chatcmpl-0", **BOB)).json()
    assert (await keyed.why(said["id"])).status_code == 401


async def test_a_chat_without_a_token_is_told_so(late: LateServer) -> None:
    late.server.engine.fail_after = 0
    body = {"model": MODEL_ID, "messages": USER, "max_tokens": 1}
    failed = await late.server.http.post("/v1/chat/completions", json=body)
    assert failed.status_code == 500
    answer = (await late.why(failed.headers["x-request-id"])).json()
    assert answer["waits"] == []
    assert answer["sentence"] == "it failed before the first token; the server's log has the error"


async def test_a_chat_that_fails_after_its_first_token_is_told_so(late: LateServer) -> None:
    late.server.engine.fail_after = 1
    body = {"model": MODEL_ID, "messages": USER, "max_tokens": 4, "ttft_slo_ms": 60_000}
    failed = await late.server.http.post("/v1/chat/completions", json=body)
    assert failed.status_code == 500
    answer = (await late.why(failed.headers["x-request-id"])).json()
    assert answer["sentence"].startswith(
        "it failed before its end; the server's log has the error; until then on time: "
    )


async def test_requests_are_bounded(late: LateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.why.requests.MAX_REQUESTS", 2)
    said = [await late.chat() for _ in range(3)]
    requests: EndedRequests = late.server.app.state.why.requests
    assert len(requests) == 2
    assert [bool(requests.find(one["id"])) for one in said] == [False, True, True]


async def test_the_dashboard_says_why_once_the_engine_has_told_of_its_steps(late: LateServer) -> None:
    await late.chat()
    desk = late.server.app.state.why
    (chat,) = late.server.app.state.metrics.late
    assert await desk.sentence_of(chat.request) == ""
    late.now_s += REPORTED_S
    (shown,) = (await late.server.http.get("/dashboard/data")).json()["late"]
    assert shown["why"].startswith("late by 110 ms; 0 ms of it by batch work, 100 ms waiting for one prompt before it")
