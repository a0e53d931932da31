"""What the server does besides: it forgets old keys and expired files, and what it is told late does no harm."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from neaptide.engine.messages import AddBatch
from neaptide.server.batches.running.job import Job
from neaptide.server.batches.running.machine import Machine
from neaptide.server.batches.storing.files import DAY_S
from neaptide.server.batches.storing.tables import idempotency_keys
from tests.server.batches.fakes import CHAT, FakeClock, Server, numbered

BODY = {"endpoint": CHAT, "completion_window": "24h"}


def num_keys(conn: sa.Connection) -> int:
    return int(conn.execute(sa.select(sa.func.count()).select_from(idempotency_keys)).scalar_one())


async def create_with_key(server: Server, file_id: str) -> str:
    body = {"input_file_id": file_id, **BODY}
    return (await server.service.create_batch("", body, idempotency_key="key")).id


async def sweep(server: Server) -> None:
    """Waits for one round of housekeeping: an expired file that nobody reads is gone after it."""
    victim = await server.upload(b"x\n")
    path = server.service.files.path(victim.id)
    server.service.store.write_blocking(
        lambda conn: conn.exec_driver_sql("update files set expires_at = 1 where id = ?", (victim.id,)).close()
    )
    for _ in range(1_000):
        if not path.exists() and not await server.service.store.read(num_old_keys, server.clock):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing is swept")


def num_old_keys(conn: sa.Connection, clock: FakeClock) -> int:
    old = idempotency_keys.c.created_at < int(clock.now_s) - 7 * DAY_S
    return int(conn.execute(sa.select(sa.func.count()).where(old)).scalar_one())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.machine.SWEEP_PERIOD_S", 0.0)


async def test_an_idempotency_key_lives_for_seven_days(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        file = await server.upload(numbered(1))
        first = await create_with_key(server, file.id)
        clock.now_s += 7 * DAY_S - 60
        await sweep(server)
        assert await create_with_key(server, file.id) == first
        clock.now_s += 120
        await sweep(server)
        assert await server.service.store.read(num_keys) == 0
        assert await create_with_key(server, file.id) != first


async def test_expired_files_are_swept_now_and_then(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        kept = await server.upload(b"x\n")
        await sweep(server)
        await sweep(server)
        assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]


@pytest.mark.acceptance("A20", "cancel while a batch is loaded")
async def test_a_batch_that_is_cancelled_while_it_is_loaded_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = threading.Event(), threading.Event()
    read_job = Machine._read_job

    def read_late(machine: Machine, *args: Any) -> Job:
        job = read_job(machine, *args)
        loading.set()
        assert go_on.wait(5)
        return job

    added: list[str] = []
    monkeypatch.setattr(Machine, "_read_job", read_late)
    async with Server(tmp_path) as server:
        runner = server.service._machine._runner
        monkeypatch.setattr(runner, "add_job", lambda job: added.append(job.batch_id))
        batch = await server.create(numbered(2))
        assert await asyncio.to_thread(loading.wait, 5)
        await server.service.cancel_batch(batch.id, "")
        go_on.set()
        server.results(await server.until_status(batch.id, "cancelled"))
    assert added == []
    assert not [message for message in server.engine.sent if isinstance(message, AddBatch)]


@pytest.mark.parametrize("salt", [b"", b"\x00tenant\xff"])
async def test_the_owners_cache_salt_goes_with_the_rows_and_survives_a_restart(tmp_path: Path, salt: bytes) -> None:
    async with Server(tmp_path) as server:
        body = {"input_file_id": (await server.upload(numbered(2))).id, **BODY}
        batch = await server.service.create_batch("", body, salt=salt)
        await server.until_given(batch.id)
    async with Server(tmp_path) as again:
        await again.until_given(batch.id)
    for engine in (server.engine, again.engine):
        assert [message.salt for message in engine.sent if isinstance(message, AddBatch)] == [salt]
