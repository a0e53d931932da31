"""The plug-in in an application like vLLM's: what a client of files and batches gets."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from prometheus_client import REGISTRY, generate_latest
from starlette.responses import JSONResponse

from neaptide.server.http.auth import principal_for
from tests.patience import until
from tests.vllm_plugin.fake_vllm import MODEL, FakeVllm, chat_reply, echo, until_gone


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEAPTIDE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def asking(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def submit(http: httpx.AsyncClient, bodies: list[dict[str, Any]], key: str | None = None) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i, body in enumerate(bodies)
    ]
    files = {"file": ("lines.jsonl", "\n".join(lines).encode())}
    upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)).json()
    body = {"input_file_id": upload["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=body, headers=headers)).raise_for_status().json()["id"])


async def get_batch(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
    return found


async def wait_terminal(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    async def has_ended() -> bool:
        await asyncio.sleep(0.01)
        return (await get_batch(http, batch_id))["status"] in ("completed", "failed", "cancelled", "expired")

    await until(has_ended)
    return await get_batch(http, batch_id)


async def results(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Responses by custom id; each id once."""
    lines: list[dict[str, Any]] = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            content = (await http.get(f"/v1/files/{batch[name]}/content")).raise_for_status().content
            lines += [json.loads(line) for line in content.splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    return found


async def test_every_line_is_answered_by_vllms_own_endpoint_with_the_priority_of_batches() -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        batch = await wait_terminal(http, await submit(http, [asking(f"word {i}", tools=[]) for i in range(20)]))
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        found = await results(http, batch)
    assert {one: reply["body"]["choices"][0]["message"]["content"] for one, reply in found.items()} == {
        f"c{i}": f"word {i}" for i in range(20)
    }
    assert sorted(body["messages"][0]["content"] for body, _ in vllm.asked) == sorted(f"word {i}" for i in range(20))
    assert {(json.dumps(body["tools"]), priority) for body, priority in vllm.asked} == {("[]", "2")}
    assert batch["usage"]["output_tokens"] == 40


async def test_a_refusal_of_vllm_ends_its_line_alone() -> None:
    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        if body.get("temperature") == 9:
            return JSONResponse({"error": {"message": "too hot"}}, status_code=400)
        return await echo(body, request)

    async with FakeVllm(answer).running() as http:
        batch = await wait_terminal(http, await submit(http, [asking("a"), asking("b", temperature=9), asking("c")]))
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        found = await results(http, batch)
    assert (found["c1"]["status_code"], found["c1"]["body"]) == (400, {"error": {"message": "too hot"}})


async def test_an_exception_in_vllm_ends_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide_vllm.batches.link.RETRY_S", 0.0)

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        if body["messages"][0]["content"] == "bad":
            raise ZeroDivisionError
        return await echo(body, request)

    async with FakeVllm(answer).running() as http:
        batch = await wait_terminal(http, await submit(http, [asking("good"), asking("bad")]))
        found = await results(http, batch)
    assert {one: reply["status_code"] for one, reply in found.items()} == {"c0": 200, "c1": 500}


@pytest.mark.parametrize(
    "passing",
    [
        JSONResponse({"error": {"message": "scaling"}}, status_code=503),
        chat_reply("half an ans", finish_reason="abort"),
    ],
)
async def test_what_says_nothing_of_the_line_is_no_result_of_it(
    passing: JSONResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide_vllm.batches.link.RETRY_S", 0.0)
    replies = iter([passing, chat_reply("whole")])

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        return next(replies)

    async with FakeVllm(answer).running() as http:
        batch = await wait_terminal(http, await submit(http, [asking("a")]))
        found = await results(http, batch)
    assert found["c0"]["body"]["choices"][0]["message"]["content"] == "whole"


async def test_chats_keep_slots() -> None:
    """Batch lines take at most seven of eight slots."""
    open_now, most_open = 0, 0

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        await until(lambda: most_open >= 7)
        open_now -= 1
        return await echo(body, request)

    async with FakeVllm(answer, max_num_seqs=8).running() as http:
        await wait_terminal(http, await submit(http, [asking(f"{i}") for i in range(40)]))
    assert most_open == 7


async def test_a_cancelled_batch_is_aborted_in_vllm() -> None:
    gone = 0

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        nonlocal gone
        await until_gone(request)
        gone += 1
        return chat_reply("too late")

    vllm = FakeVllm(answer)
    async with vllm.running() as http:
        batch_id = await submit(http, [asking(f"{i}") for i in range(20)])
        await until(lambda: len(vllm.asked) == 7)
        await http.post(f"/v1/batches/{batch_id}/cancel")
        batch = await wait_terminal(http, batch_id)
        assert batch["status"] == "cancelled"
        assert set((await results(http, batch)).values()) == {None}
        await until(lambda: gone == 7)


async def test_lines_of_a_dead_engine_run_again_at_the_next_start() -> None:
    dead: FakeVllm

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        if len(dead.asked) <= 3:
            return await echo(body, request)
        dead.errored = True
        return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, status_code=500)

    dead = FakeVllm(answer)
    async with dead.running() as http:
        batch_id = await submit(http, [asking(f"{i}") for i in range(20)])
        await until(lambda: dead.errored)
    async with FakeVllm().running() as http:
        batch = await wait_terminal(http, batch_id)
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert set(await results(http, batch)) == {f"c{i}" for i in range(20)}


async def test_what_vllm_says_while_it_stops_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its renderer first, and its endpoints then fail."""
    monkeypatch.setattr("neaptide_vllm.batches.link.RETRY_S", 0.0)
    stopping: FakeVllm

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        if len(stopping.asked) > 3:
            stopping.shutdown(timeout=0)
            raise RuntimeError("cannot schedule new futures after shutdown")
        return await echo(body, request)

    stopping = FakeVllm(answer)
    async with stopping.running() as http:
        batch_id = await submit(http, [asking(f"{i}") for i in range(20)])
        link = stopping.plugin._link
        assert link is not None
        await until(lambda: len(stopping.asked) > 3 and not link._runs)
    async with FakeVllm().running() as http:
        batch = await wait_terminal(http, batch_id)
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


async def test_a_line_that_ends_the_engine_of_every_server_is_found_and_the_others_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neaptide_vllm.batches.link.RETRY_S", 0.0)

    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        if body["messages"][0]["content"] == "3":
            vllm.errored = True
        if vllm.errored:
            return JSONResponse({"error": {"message": "EngineCore encountered an issue"}}, status_code=500)
        return await echo(body, request)

    async def has_ended() -> bool:
        await asyncio.sleep(0.01)
        return vllm.errored or (await get_batch(http, batch_id))["status"] == "completed"

    batch_id, num_starts = "", 0
    vllm = FakeVllm(answer)
    while num_starts == 0 or vllm.errored:
        num_starts += 1
        assert num_starts < 10
        vllm = FakeVllm(answer)
        async with vllm.running() as http:
            batch_id = batch_id or await submit(http, [asking(f"{i}") for i in range(20)])
            await until(has_ended)
            if not vllm.errored:
                batch = await get_batch(http, batch_id)
                found = await results(http, batch)
    assert batch["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
    assert found["c3"]["body"]["error"]["code"] == "engine_crash"


async def test_adapters_are_models_of_batches_and_others_are_not() -> None:
    async with FakeVllm().running() as http:
        batch = await wait_terminal(http, await submit(http, [asking("a") | {"model": "poet"}]))
        assert batch["status"] == "completed"
        batch = await wait_terminal(http, await submit(http, [asking("a") | {"model": "painter"}]))
        assert [error["code"] for error in batch["errors"]["data"]] == ["model_not_found"]


async def test_keys_see_only_their_own_batches() -> None:
    async with FakeVllm(api_key="one").running() as http:
        batch_id = await submit(http, [asking("a")], key="one")
        of_one = await http.get(f"/v1/batches/{batch_id}", headers={"authorization": "Bearer one"})
        of_two = await http.get(f"/v1/batches/{batch_id}", headers={"authorization": "Bearer two"})
    assert (of_one.status_code, of_two.status_code) == (200, 404)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the plug-in logs about its start."""
    found: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            logging.getLogger("neaptide_vllm.batches.plugin"), level, lambda text, *args: found.append(text % args)
        )
    return found


async def test_another_api_process_refuses_and_says_which_one_serves(lines: list[str]) -> None:
    async with FakeVllm(rank=1).running() as http:
        reply = await http.get("/v1/files")
        chat = await http.post("/v1/chat/completions", json=asking("hello"))
    assert (reply.status_code, reply.headers["connection"], chat.status_code) == (503, "close", 200)
    assert reply.json()["error"]["message"] == (
        "Files and batches are served by API process 0 of this server, not by this one."
    )
    assert lines == ["neaptide_batches: API process 0 serves files and batches, not this one, 1"]


@pytest.mark.parametrize("comes_first", [True, False])
async def test_files_of_another_plugin_stay_its_own(comes_first: bool, lines: list[str]) -> None:
    vllm = FakeVllm()

    async def theirs() -> str:
        return "theirs"

    if comes_first:
        vllm.app.get("/v1/files")(theirs)
    else:
        attach = vllm.plugin.attach_router
        vllm.plugin.attach_router = lambda app: (attach(app), app.get("/v1/files")(theirs))  # type: ignore[method-assign,assign,func-returns-value]
    async with vllm.running() as http:
        assert (await http.get("/v1/files")).json() == "theirs"
        assert (await http.get("/v1/batches")).status_code == 404
    assert lines == ["neaptide_batches is off: another plug-in has /v1/files; leave one of them out of VLLM_PLUGINS"]


async def test_vllms_metrics_have_the_series_of_batches_while_it_runs() -> None:
    series = 'neaptide_batch_requests_total{outcome="completed"} 3.0'
    async with FakeVllm().running() as http:
        await wait_terminal(http, await submit(http, [asking(f"{i}") for i in range(3)]))
    async with FakeVllm().running():
        await until(lambda: series in generate_latest(REGISTRY).decode())
    assert "neaptide_batch" not in generate_latest(REGISTRY).decode()


async def test_a_data_directory_that_is_in_use_ends_the_start_with_one_line() -> None:
    async with FakeVllm().running():
        with pytest.raises(SystemExit, match=r"^neaptide_batches: another neaptide process .* uses the data directory"):
            async with FakeVllm().running():
                pass


async def test_a_bad_request_for_a_batch_gets_openais_error() -> None:
    async with FakeVllm().running() as http:
        reply = await http.post("/v1/batches", json={"endpoint": "/v1/chat/completions"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input_file_id")


@pytest.mark.parametrize(
    ("asked", "priority"),
    [
        ({"service_tier": "flex"}, "1"),
        ({"service_tier": "priority"}, "-1"),
        ({"service_tier": "auto"}, None),
        ({}, None),
        ({"service_tier": "flex", "priority": 7}, None),
    ],
)
async def test_a_service_tier_becomes_vllms_priority(asked: dict[str, Any], priority: str | None) -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        reply = await http.post("/v1/chat/completions", json=asking("hello", **asked))
    assert reply.json()["choices"][0]["message"]["content"] == "hello"
    assert vllm.asked == [(asking("hello", **asked), priority)]


async def test_a_priority_in_the_header_goes_before_the_tier() -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        body, headers = asking("hello", service_tier="flex"), {"X-Vllm-Priority": "5"}
        await http.post("/v1/chat/completions", json=body, headers=headers)
    assert [priority for _, priority in vllm.asked] == ["5"]


@pytest.mark.parametrize("wrong", [0, -1, "soon", True, None, [250], 10**400])
@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms"])
async def test_a_target_that_cannot_be_is_refused_in_openais_shape(name: str, wrong: Any) -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        reply = await http.post("/v1/chat/completions", json=asking("hello", vllm_xargs={"top": 1, name: wrong}))
    assert (reply.status_code, vllm.asked) == (400, [])
    assert reply.json()["error"] == {
        "message": "A latency target must be a positive number of milliseconds.",
        "type": "invalid_request_error",
        "param": f"vllm_xargs.{name}",
        "code": None,
    }


async def test_a_wrong_target_in_a_header_is_refused() -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        headers = {"X-Neaptide-TPOT-Ms": "fast"}
        reply = await http.post("/v1/chat/completions", json=asking("hello"), headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"], vllm.asked) == (400, "x-neaptide-tpot-ms", [])


async def test_targets_in_headers_become_arguments_of_vllm_and_the_bodys_go_before_them() -> None:
    vllm = FakeVllm()
    async with vllm.running() as http:
        headers = {"X-Neaptide-TTFT-Ms": "300", "X-Neaptide-TPOT-Ms": "40"}
        body = asking("hello", vllm_xargs={"tpot_ms": 30, "other": "a"}, service_tier="priority")
        await http.post("/v1/chat/completions", json=body, headers=headers)
    assert vllm.asked == [(body | {"vllm_xargs": {"ttft_ms": 300.0, "tpot_ms": 30, "other": "a"}}, "-1")]


async def test_a_body_that_is_no_json_is_vllms_to_refuse() -> None:
    async def answer(body: dict[str, Any], request: Request) -> JSONResponse:
        raise AssertionError("not reached")

    async with FakeVllm(answer).running() as http:
        with pytest.raises(json.JSONDecodeError):  # as without the plug-in: this stand-in reads it so
            await http.post("/v1/chat/completions", content=b"{", headers={"X-Neaptide-TTFT-Ms": "1"})


async def test_offline_work_is_shared_by_the_weights_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEAPTIDE_KEY_WEIGHTS", "one:x3, two")
    vllm = FakeVllm(api_key="one")
    async with vllm.running():
        assert vllm.plugin._link is not None
        assert vllm.plugin._link._pool._turns._weights == {principal_for("one").share: 3.0}


async def test_a_wrong_weight_ends_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEAPTIDE_KEY_WEIGHTS", "one:x0")
    with pytest.raises(SystemExit, match=r"^neaptide_batches: NEAPTIDE_KEY_WEIGHTS: the weight of an API key is 0$"):
        async with FakeVllm().running():
            pass
