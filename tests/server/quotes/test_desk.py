"""Quotes of a running server: over HTTP, from files, and as promises."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from neaptide.engine.messages import BatchDeadlineStatus, DeadlineStatus, EngineReady, StepOutputs
from neaptide.launch.device_time import device_time
from neaptide.server.batches.storing import period_rows
from neaptide.server.batches.storing.tables import traffic_periods
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.quotes.desk import ALONE, QuoteDesk
from neaptide.server.quotes.measure import MeasureTask, measured, sampled, shared_length
from neaptide.server.quotes.periods import KEPT_S, PERIOD_S, Period, period_decoder
from neaptide.server.quotes.work import BatchWork, DeviceTime, KnownBatch
from tests.server.batches.fakes import CHAT, Server, jsonl, line
from tests.server.batches.test_http import app_of, http_client
from tests.server.fake_engine import some_stats

TASK = MeasureTask("", 100, 8, 1 << 20)


def slow_device(info: EngineReady) -> DeviceTime:
    """A second per new token of a prompt; answers cost nothing."""

    def seconds(work: BatchWork) -> float:
        return float(work.new_tokens)

    return seconds


def desk_of(server: Server) -> QuoteDesk:
    return QuoteDesk(server.service, server.client, BodyThreads(), slow_device, lambda: server.clock.now_s)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Any]:
    """A client of an app with quotes; the record is of an hour of idle time."""
    desk = desk_of(server)
    now_s = int(server.clock.now_s) // PERIOD_S * PERIOD_S
    for start_s in range(now_s - 3600, now_s, PERIOD_S):
        await server.service.store.write(period_rows.add_period, ALONE, Period(start_s=start_s, seconds=600.0))
    try:
        async with http_client(app_of(server, desk=desk)) as client:
            yield client
    finally:
        await desk.stop()


def lines(count: int, text: str = "abcdefgh", **body: Any) -> bytes:
    return jsonl([line(f"c{k}", f"{text}{k:04}", **body) for k in range(count)])


async def test_a_file_is_quoted_and_nothing_is_changed(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, client_of(server) as client:
        file = await server.upload(lines(10))
        reply = await client.post("/v1/batches/quote", json={"input_file_id": file.id})
        assert reply.status_code == 200, reply.text
        quote = reply.json()
        assert (quote["object"], quote["lines"], quote["input_tokens"]) == ("batch.quote", 10, 120)
        assert quote["shared_tokens"] > 60  # the eight letters, but for once
        assert quote["device_seconds"]["p50"] == quote["input_tokens"] - quote["shared_tokens"]
        assert quote["shared_device_seconds"] == quote["shared_tokens"]
        windows = quote["windows"]
        assert [one["completion_window"] for one in windows] == ["1h", "6h", "24h"]
        assert all(one["outlook"] == "on_time" and one["reason"] is None for one in windows)
        assert windows[0]["p90_at"] >= quote["created_at"] + windows[0]["p50_seconds"]
        assert quote["basis"]["recorded_seconds"] == 3600.0
        assert (await client.get("/v1/batches")).json()["data"] == []
        assert not server.engine.sent


@pytest.mark.parametrize(
    ("content", "status", "part"),
    [
        (b"", 400, "no lines"),
        (b"{}\n", 400, "Line 1"),
        (lines(2, temperature=9), 400, "sampled lines"),
        (None, 404, "No file"),
    ],
    ids=["empty", "no requests", "refused", "unknown"],
)
async def test_what_is_no_batch_file_is_refused(tmp_path: Path, content: bytes | None, status: int, part: str) -> None:
    async with Server(tmp_path) as server, client_of(server) as client:
        file_id = "file-x" if content is None else (await server.upload(content)).id
        reply = await client.post("/v1/batches/quote", json={"input_file_id": file_id})
        assert reply.status_code == status
        assert part in reply.json()["error"]["message"]


async def test_a_size_is_quoted_beside_the_pool(tmp_path: Path) -> None:
    size = {"lines": 1000, "input_tokens": 5, "shared_tokens": 4}
    async with Server(tmp_path) as server, client_of(server) as client:
        status = BatchDeadlineStatus("batch_1", DeadlineStatus.ON_TIME, 400.0, None, 1000.0)
        server.client.on_message(StepOutputs([], [], [status]))
        quote = (await client.post("/v1/batches/quote", json=size)).json()
        assert (quote["input_tokens"], quote["shared_tokens"]) == (5000, 3996)
        assert quote["windows"][0]["other_batches_seconds"] == 400.0
        assert quote["basis"]["pool_seconds"] == 400.0
        for wrong in ({}, {**size, "shared_tokens": 5}, {**size, "input_file_id": "f"}, {**size, "lines": 0}):
            assert (await client.post("/v1/batches/quote", json=wrong)).status_code == 400


async def test_without_an_engine_there_is_no_quote(tmp_path: Path) -> None:
    async with Server(tmp_path, engine=False) as server, client_of(server) as client:
        assert (await client.post("/v1/batches/quote", json={"lines": 1})).status_code == 503


async def test_a_promise_is_the_deadline_and_the_window_stays(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, client_of(server) as client:
        file = await server.upload(lines(10))
        now_s = int(server.clock.now_s)
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "accept_by": now_s + 3600}
        headers = {"Idempotency-Key": "k"}
        batch = (await client.post("/v1/batches", json=body, headers=headers)).json()
        due_at = batch["neaptide"]["due_at"]
        assert now_s + 24 <= due_at < now_s + 60
        assert batch["expires_at"] == now_s + 86_400
        await server.until_given(batch["id"])
        (told,) = [message for message in server.engine.sent if hasattr(message, "deadline_s")]
        assert told.deadline_s == pytest.approx(due_at - 1_700_000_000.0)
        # A repeat is the same batch, whatever could be promised now.
        server.clock.now_s += 3590
        again = (await client.post("/v1/batches", json=body, headers=headers)).json()
        assert again["id"] == batch["id"]


@pytest.mark.parametrize(
    ("accept_by", "status", "code"),
    [(10, 409, "quote_too_late"), (-5, 400, "invalid_value"), ("soon", 400, "invalid_type")],
)
async def test_a_promise_that_cannot_be_given_makes_no_batch(
    tmp_path: Path, accept_by: int | str, status: int, code: str
) -> None:
    async with Server(tmp_path) as server, client_of(server) as client:
        file = await server.upload(lines(10))
        at = accept_by if isinstance(accept_by, str) else int(server.clock.now_s) + accept_by
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "accept_by": at}
        reply = await client.post("/v1/batches", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        if status == 409:
            assert "of the device; chats leave at most" in reply.json()["error"]["message"]
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_server_without_quotes_refuses_promises(tmp_path: Path) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", "accept_by": 2_000_000_000}
        reply = await client.post("/v1/batches", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_the_record_outlives_a_restart_and_forgets_after_two_weeks(tmp_path: Path) -> None:
    start_s = 0
    for life in range(2):
        async with Server(tmp_path) as server:
            start_s = int(server.clock.now_s) // PERIOD_S * PERIOD_S
            desk = desk_of(server)
            for second in range(3):
                server.clock.now_s = start_s + 10.0 * life + second
                assert desk.tick() is None
            desk.recorder.on_step(some_stats(now_s=1.0, online_decode_tokens=4))
            await desk.stop()
            (kept,) = await server.service.store.read(period_rows.stored_periods, ALONE)
            whole = period_decoder.decode(kept)
            assert (whole.start_s, whole.seconds, whole.online_tokens) == (start_s, 2.0 * (life + 1), 4 * (life + 1))
    async with Server(tmp_path) as server:
        later = Period(start_s=start_s + KEPT_S + PERIOD_S, seconds=1.0)
        await server.service.store.write(period_rows.add_period, ALONE, later)
        counted = sa.select(sa.func.count()).select_from(traffic_periods)
        assert await server.service.store.read(lambda conn: conn.execute(counted).scalar_one()) == 1


async def test_completed_batches_tell_of_answers(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.engine.auto = True
        made = await server.create(lines(3), owner="a")
        await server.until(made.id, lambda record: record.is_terminal, "a")
        (known,) = await server.service.store.read(period_rows.known_batches, "a")
        assert known == KnownBatch(12.0, 3, known.other_s)
        assert known.other_s >= 0.0
        assert await server.service.store.read(period_rows.known_batches, "b") == []
        assert await server.service.store.read(period_rows.known_batches, None) == [known]


def test_prompts_are_measured_with_what_they_share() -> None:
    content = b"\xef\xbb\xbf" + b"\n\n".join(
        json.dumps({"url": CHAT, "custom_id": str(k), "body": {"max_tokens": 5, "messages": f"ab{k}"}}).encode()
        for k in range(20)
    )
    found = measured(content, TASK)
    assert (found.num_lines, len(found.samples), found.fault) == (20, 8, "")
    assert found.prompt_bytes == sum(len(f'"ab{k}"') for k in range(20))
    assert found.new_bytes < found.prompt_bytes / 2
    assert measured(content, MeasureTask("", 19, 8, 1 << 20)).fault == "The file has more than 19 lines."


@pytest.mark.parametrize(
    ("line_bytes", "sample_bytes", "wanted"),
    [
        ([10] * 4, 1000, [0, 1, 2, 3]),
        ([10] * 16, 1000, [0, 2, 4, 6, 8, 10, 12, 14]),
        ([100] * 16, 450, [0, 4, 8, 12]),
        ([100] * 3, 50, [0]),
        ([400, 10, 10, 10], 300, [2]),
    ],
    ids=["all", "as many as may be", "as many as fit", "one that is too long", "without the one that is too long"],
)
def test_the_sample_is_spread_over_the_file(line_bytes: list[int], sample_bytes: int, wanted: list[int]) -> None:
    assert sampled(line_bytes, MeasureTask("", 100, 8, sample_bytes)) == wanted


@pytest.mark.parametrize(
    ("a", "b", "wanted"), [("", "", 0), ("a", "b", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("abc", "abc", 3)]
)
def test_common_beginnings(a: str, b: str, wanted: int) -> None:
    assert shared_length(a.encode(), b.encode()) == wanted


def test_an_engine_that_tells_no_costs_has_no_device_time() -> None:
    assert device_time(EngineReady("", "", "", 0, 0, 0, 0, [])) is None
