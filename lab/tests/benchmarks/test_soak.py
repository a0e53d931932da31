"""How ``lab.benchmarks.soak`` judges, without the server."""

import json
import random
from typing import Any

import httpx
import pytest

from lab.benchmarks.soak.__main__ import BIN_S, SAMPLE_S, Memory, bars, bins, process_name, slope_mb_per_10_min
from lab.benchmarks.soak.load import LINES, MODEL, Clients, Ledger, batch_fault, is_explained, visit
from neaptide.loadgen.client.client import StreamClient
from tests.loadgen.scripted import plain, scripted

SERVER = "http://server"
ERROR = {"error": {"message": "full", "type": "server_error", "code": None}}


def reply(status: int, body: Any, **headers: str) -> httpx.Response:
    return httpx.Response(status, json=body, headers=headers)


def test_the_slope_is_that_of_the_line_whatever_one_spike_does() -> None:
    points = [(60.0 * i, 5e6 + 2_000.0 * 60 * i) for i in range(20)]
    assert slope_mb_per_10_min(points) == pytest.approx(1.2)
    points[7] = (points[7][0], 9e9)
    assert slope_mb_per_10_min(points) == pytest.approx(1.2)
    assert slope_mb_per_10_min(points[:1]) == 0.0


def test_memory_is_judged_by_whole_half_minutes_after_the_warm_up() -> None:
    samples = [(float(at_s), 100.0 if at_s < 60 else 7.0 + (at_s >= 90)) for at_s in range(0, 130, 2)]
    assert bins(samples, 60.0) == [(0.5 * BIN_S, 7.0), (1.5 * BIN_S, 8.0)]


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    memory = Memory()
    for seconds in (2.0, 2.1, 100.0):
        memory.pass_time(seconds)
    assert memory.active_s == pytest.approx(4.1 + SAMPLE_S)
    assert memory.stopped_s == pytest.approx(100.0 - SAMPLE_S)


def test_processes_are_told_apart() -> None:
    assert process_name(["python", "-m", "neaptide", "serve"], is_server=True) == "API"
    assert process_name(["python", "-m", "neaptide.launch.serve", "ipc://x"], is_server=False) == "engine"
    assert process_name(["python", "-m", "neaptide.server.batches.checking.worker"], is_server=False) is None
    assert process_name(["python", "-m", "neaptide.launch.simulating"], is_server=False) is None


def judged(memory: Memory, ledger: Ledger, left: float = 0.0) -> set[str]:
    return {name for name, (_, holds) in bars(memory, ledger, {"x": left}, 0.0).items() if not holds}


def flat() -> Memory:
    steady = [(30.0 * i, 1e8) for i in range(20)]
    return Memory({"API": list(steady), "engine": list(steady)}, engines={1})


def test_every_bar_can_fail() -> None:
    assert judged(flat(), Ledger()) == set()
    leaking = flat()
    leaking.samples["engine"] = [(at_s, value + 2_000 * at_s) for at_s, value in leaking.samples["engine"]]
    leaking.engines.add(2)
    assert judged(leaking, Ledger()) == {"engine: MB more in 10 minutes", "engines"}
    ledger = Ledger(not_refused=1)
    ledger.asked["whole"] += 1
    ledger.unexplained[500] += 1
    failed = {"accepted without an answer", "5xx unexplained", "malformed and not refused", "left in the engine"}
    assert judged(flat(), ledger, left=1.0) == failed


def test_a_refusal_explains_itself_in_words_and_with_a_time() -> None:
    assert is_explained(reply(503, ERROR, **{"retry-after": "1"}))
    assert not is_explained(reply(503, ERROR))
    assert not is_explained(reply(503, {"detail": "x"}, **{"retry-after": "1"}))
    assert not is_explained(reply(500, ERROR, **{"retry-after": "1"}))


def test_replies_are_booked_by_what_they_say() -> None:
    ledger = Ledger()
    assert ledger.take_reply("whole", reply(200, {}))
    for status, headers in ((503, {"retry-after": "1"}), (500, {}), (404, {})):
        assert not ledger.take_reply("whole", reply(status, ERROR, **headers))
    assert (ledger.answered["whole"], dict(ledger.explained), dict(ledger.unexplained)) == (4, {503: 1}, {500: 1})
    assert ledger.wrong["whole"] == 1


def results(ids: range) -> bytes:
    return "\n".join(json.dumps({"custom_id": str(i)}) for i in ids).encode()


def batch(status: str, completed: int, failed: int = 0) -> dict[str, Any]:
    counts = {"total": completed + failed, "completed": completed, "failed": failed}
    return {"status": status, "errors": None, "request_counts": counts}


@pytest.mark.parametrize(
    ("fate", "ended", "found", "is_right"),
    [
        ("worked off", batch("completed", LINES), results(range(LINES)), True),
        ("worked off", batch("completed", LINES), results(range(LINES - 1)), False),
        ("worked off", batch("completed", LINES), results(range(LINES)) + b"\n" + results(range(1)), False),
        ("worked off", batch("completed", LINES - 1, 1), results(range(LINES)), False),
        ("worked off", batch("failed", 0), b"", False),
        ("cancelled", batch("cancelled", 3, LINES - 3), results(range(LINES)), True),
        ("cancelled", batch("cancelled", 0), b"", True),
        ("cancelled", batch("cancelled", 3, LINES - 4), results(range(LINES - 1)), False),
        ("refused", batch("failed", 0), b"", True),
        ("refused", batch("completed", LINES), results(range(LINES)), False),
    ],
)
def test_every_line_of_a_batch_is_accounted_for(fate: str, ended: dict[str, Any], found: bytes, is_right: bool) -> None:
    assert (batch_fault(fate, ended, found) is None) is is_right


@pytest.mark.parametrize(("status", "not_refused"), [(400, 0), (404, 0), (200, 1), (500, 1)])
async def test_nonsense_must_be_refused(status: int, not_refused: int) -> None:
    transport = httpx.MockTransport(lambda request: reply(status, ERROR))
    async with httpx.AsyncClient(transport=transport, base_url=SERVER) as http:
        ledger = Ledger()
        await visit(Clients(http, StreamClient(SERVER, MODEL), ledger, random.Random(0)), Clients.nonsense, "nonsense")
    assert (ledger.not_refused, ledger.lost) == (not_refused, 0)


async def test_a_connection_that_breaks_is_a_loss() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url=SERVER) as http:
        ledger = Ledger()
        await visit(Clients(http, StreamClient(SERVER, MODEL), ledger, random.Random(0)), Clients.whole, "whole")
    assert (ledger.lost, ledger.notes) == (1, ["whole: ReadError: reset"])


@pytest.mark.parametrize(("status", "where"), [(408, "wrong"), (500, "unexplained"), (503, "explained")])
async def test_only_a_5xx_of_a_stream_is_one(status: int, where: str) -> None:
    ledger = Ledger()
    async with scripted(plain(f"{status} No", b"no")) as server, httpx.AsyncClient(base_url=server.url) as http:
        async with StreamClient.beside(http, MODEL) as streams:
            await visit(Clients(http, streams, ledger, random.Random(0)), Clients.streamed, "streamed")
    assert {name for name in ("wrong", "unexplained", "explained") if getattr(ledger, name).total()} == {where}
    assert ledger.lost == 0
