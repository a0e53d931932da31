"""Servers in this process that share one database and one directory of blobs, each with an engine of its own."""

import asyncio
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from neaptide.cluster.batches.state_machine import SharedStateMachine
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.tables import batch_chunks, batches
from tests.patience import until
from tests.server.batches.fakes import FakeClock, FakeEngine, Server

LONG_S = 600.0
"""A lease that does not end while a test runs."""


def shared_server(
    root: Path, name: str, url: str | None, lease_s: float = LONG_S, clock: FakeClock | None = None, **fields: Any
) -> Server:
    blobs_url = f"file://{root}/blobs"
    return Server(root / name, clock=clock, store_url=url, blobs_url=blobs_url, lease_s=lease_s, **fields)


def machine_of(server: Server) -> SharedStateMachine:
    machine = server.service._machine
    assert isinstance(machine, SharedStateMachine)
    return machine


def given(server: Server, batch_id: str) -> dict[str, list[int]]:
    """The rows that the server's engine has and has not answered, by the name of the chunk."""
    return {job_id: rows for job_id, rows in server.engine.waiting.items() if job_id.startswith(batch_id) and rows}


def num_given(server: Server, batch_id: str) -> int:
    return sum(map(len, given(server, batch_id).values()))


def answer_all(server: Server, batch_id: str) -> None:
    for job_id in given(server, batch_id):
        server.engine.answer(job_id)


async def answered_to_the_end(servers: list[Server], batch_id: str) -> BatchRecord:
    """Every engine answers whatever its server has leased, until the batch has ended."""

    async def has_ended() -> bool:
        for server in servers:
            answer_all(server, batch_id)
        return (await servers[0].get(batch_id)).is_terminal

    await until(has_ended)
    return await servers[0].get(batch_id)


async def results(server: Server, record: BatchRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """``Server.results``, of files that another server may have written."""
    for file_id in (record.output_file_id, record.error_file_id):
        if file_id is not None:
            await server.service.files.verify(await server.service.files.get(file_id, record.owner))
    return server.results(record)


async def stop_leasing(server: Server) -> None:
    """The server leases nothing more. Returns when a pass that was under way has ended: it may have asked before."""
    chunks, resting = machine_of(server).chunks, asyncio.Event()
    rest = chunks._rest

    async def rest_and_say() -> None:
        resting.set()
        await rest()

    chunks._rest = rest_and_say  # type: ignore[method-assign]
    chunks._is_suspended = True
    chunks.wake()
    await resting.wait()


def lease_again(server: Server) -> None:
    machine_of(server).chunks._is_suspended = False


async def let_lease_end(server: Server) -> None:
    """As if a lease's time had passed for every chunk and every batch."""
    await server.service.store.write(_end_leases)


def _end_leases(conn: sa.Connection) -> None:
    for table in (batch_chunks, batches):
        conn.execute(table.update().values(leased_until_ms=0))


def executed(engine: FakeEngine) -> list[int]:
    """Rows that the engine has answered."""
    return [int(name.rpartition(":")[2]) for name in engine.executed]


def pending(server: Server, batch_id: str) -> int:
    return len(server.service.store.read_blocking(batch_rows.pending_lines, batch_id))
