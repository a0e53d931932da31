"""Two servers in one process on one PostgreSQL: what either does the other sees, and every line ends once."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from neaptide.cluster.batches import plans
from neaptide.cluster.sharing import sharing_of
from neaptide.cluster.storage.blobs import Blobs
from neaptide.engine.messages import StepOutputs
from neaptide.server.batches.checking.job_files import SealedPlan
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.store import Store
from neaptide.server.engine_client.engine_state import NOTHING
from tests.cluster.batches.pair import (
    answer_all,
    answered_to_the_end,
    executed,
    given,
    lease_again,
    let_lease_end,
    machine_of,
    num_given,
    pending,
    shared_server,
    stop_leasing,
)
from tests.patience import PATIENCE_S, until
from tests.server.batches.fakes import Server, numbered
from tests.server.fake_engine import some_stats

Pair = tuple[Server, Server]
NUM_LINES = 300


@pytest.fixture
async def pair(tmp_path: Path, postgres_url: str) -> AsyncIterator[Pair]:
    async with shared_server(tmp_path, "a", postgres_url) as a, shared_server(tmp_path, "b", postgres_url) as b:
        yield a, b


async def both_at_work(pair: Pair, batch_id: str) -> None:
    a, b = pair
    await until(lambda: bool(given(a, batch_id)) and bool(given(b, batch_id)))


async def test_both_servers_run_a_batch_and_every_line_ends_once(pair: Pair) -> None:
    a, b = pair
    batch = await a.create(numbered(NUM_LINES))
    await both_at_work(pair, batch.id)
    record = await answered_to_the_end([a, b], batch.id)
    assert record.status == "completed"
    assert sorted(executed(a.engine) + executed(b.engine)) == list(range(NUM_LINES))
    assert record.output_file_id is not None
    for server in pair:
        file = await server.service.files.get(record.output_file_id, "")
        await server.service.files.verify(file)
        output, error = server.results(record)
        assert list(output) == [f"c{n}" for n in range(NUM_LINES)]
        assert error == {}
        assert server.compiler.num_prepared_again == 0


async def test_files_and_batches_are_the_same_on_either_server(pair: Pair) -> None:
    a, b = pair
    file = await a.upload(numbered(3))
    batch = await b.create(input_file_id=file.id)
    assert [one.id for one in (await a.service.list_batches("", 9, None))[0]] == [batch.id]
    record = await answered_to_the_end([a, b], batch.id)
    assert record.output_file_id is not None
    await b.service.files.delete(record.output_file_id, "")
    assert await a.service.files.list_page("", purpose=None, limit=9, after=None, ascending=True) == ([file], False)


async def test_a_cancel_by_one_server_stops_the_other(pair: Pair) -> None:
    a, b = pair
    batch = await a.create(numbered(NUM_LINES))
    await both_at_work(pair, batch.id)
    some = next(iter(given(a, batch.id)))
    a.engine.answer(some, 5)
    await until(lambda: pending(a, batch.id) == NUM_LINES - 5)
    await b.service.cancel_batch(batch.id, "")
    record = await b.until_terminal(batch.id)
    assert (record.status, record.num_completed, record.num_failed) == ("cancelled", 5, 0)
    answer_all(a, batch.id)
    await machine_of(a).chunks._renew()
    await until(lambda: not given(a, batch.id))
    assert (await a.get(batch.id)).num_completed == 5
    for server in pair:
        await server.service.files.verify(await server.service.files.get(str(record.output_file_id), ""))
        await server.service.files.verify(await server.service.files.get(str(record.error_file_id), ""))
        server.results(record)


async def test_what_a_lost_server_had_claimed_is_done_by_the_other_and_its_late_results_are_not_taken(
    pair: Pair,
) -> None:
    """The first server falls silent: it renews nothing, and wakes when the other has taken over."""
    a, b = pair
    batch = await a.create(numbered(100))
    await until(lambda: num_given(a, batch.id) + num_given(b, batch.id) == 100)
    silent, other = (a, b) if given(a, batch.id) else (b, a)
    held = dict(given(silent, batch.id))
    await stop_leasing(silent)
    silent.engine.answer(next(iter(held)), 10)
    await until(lambda: pending(a, batch.id) == 90)
    await let_lease_end(other)
    await until(lambda: num_given(other, batch.id) == 90)
    for job_id in list(held):
        silent.engine.answer(job_id)
    await until(lambda: machine_of(silent).chunks.num_chunks == 0)
    assert pending(a, batch.id) == 90
    record = await answered_to_the_end([other], batch.id)
    assert (record.status, record.num_completed) == ("completed", 100)
    assert machine_of(silent).chunks.num_lost > 0


async def test_a_server_that_stops_gives_its_lines_back_at_once(tmp_path: Path, postgres_url: str) -> None:
    async with shared_server(tmp_path, "b", postgres_url) as b:
        async with shared_server(tmp_path, "a", postgres_url) as a:
            batch = await a.create(numbered(NUM_LINES))
            await both_at_work((a, b), batch.id)
        record = await answered_to_the_end([b], batch.id)
    assert (record.status, record.num_completed) == ("completed", NUM_LINES)


async def test_a_drain_gives_lines_back_before_the_end(pair: Pair) -> None:
    a, b = pair
    batch = await a.create(numbered(NUM_LINES))
    await both_at_work(pair, batch.id)
    a.service.suspend()
    record = await answered_to_the_end([b], batch.id)
    assert (record.status, record.num_completed) == ("completed", NUM_LINES)


async def test_rows_that_ran_in_an_engine_that_is_idle_or_gone_are_no_reason_to_lease_more(
    tmp_path: Path, postgres_url: str
) -> None:
    async with shared_server(tmp_path, "a", postgres_url) as a:
        leases = machine_of(a).chunks
        for leave in (lambda: a.client.on_message(StepOutputs([], [], occupancy=NOTHING)), a.client.detach):
            a.client.on_message(StepOutputs([], [some_stats(running_offline=200)]))
            assert leases._running_rows == 200
            leave()
            assert leases._running_rows == 0


async def test_lines_that_were_in_a_dead_engine_are_suspects_on_the_next_server(pair: Pair) -> None:
    a, b = pair
    batch = await a.create(numbered(20))
    await until(lambda: num_given(a, batch.id) + num_given(b, batch.id) == 20)
    first, second = (a, b) if given(a, batch.id) else (b, a)
    job_id = next(iter(given(first, batch.id)))
    first.client.detach([f"{job_id}:7"])
    store = first.service.store

    def attempts() -> list[int]:
        return [line.line_no for line in store.read_blocking(batch_rows.pending_lines, batch.id) if line.attempts]

    await until(lambda: attempts() == [8])
    await let_lease_end(second)
    await until(lambda: num_given(second, batch.id) == 20)
    (other_id,) = given(second, batch.id)
    # Beside unsuspected lines the first time, and not convicted by a first death there.
    assert machine_of(second).chunks._runner._suspects.of_job(other_id)
    record = await answered_to_the_end([second], batch.id)
    assert record.num_completed == 20


async def test_a_batch_of_another_model_waits_for_a_server_of_that_model(tmp_path: Path, postgres_url: str) -> None:
    blobs = f"file://{tmp_path}/blobs"
    async with Server(tmp_path / "a", store_url=postgres_url, blobs_url=blobs, engine=False) as a:
        batch = await a.create(numbered(5))
        await a.until_status(batch.id, "in_progress")
    async with Server(tmp_path / "b", store_url=postgres_url, blobs_url=blobs, fingerprint="other") as b:
        assert not await machine_of(b).chunks._lease_some()
        async with Server(tmp_path / "a", store_url=postgres_url, blobs_url=blobs) as a:
            assert (await answered_to_the_end([a, b], batch.id)).num_completed == 5
            assert b.engine.sent == []


async def test_without_an_engine_for_a_lease_the_lines_are_given_back(tmp_path: Path, postgres_url: str) -> None:
    async with shared_server(tmp_path, "a", postgres_url, lease_s=0.2) as a:
        batch = await a.create(numbered(20))
        await until(lambda: num_given(a, batch.id) == 20)
        a.client.detach()
        await until(lambda: machine_of(a).chunks.num_chunks == 0)
        async with shared_server(tmp_path, "b", postgres_url) as b:
            assert (await answered_to_the_end([b], batch.id)).num_completed == 20


async def test_a_server_without_blobs_is_refused_beside_those_with(
    pair: Pair, tmp_path: Path, postgres_url: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neaptide.cluster.storage.postgres.SERVER_LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(StoreError, match="another neaptide server uses it"):
            await asyncio.to_thread(Store(tmp_path / "c", sharing_of(postgres_url)).open)


async def test_only_who_holds_a_batch_writes_its_end(pair: Pair) -> None:
    """A server that was frozen while it wrote the results, and wakes when another has: one pair of files."""
    a, b = pair
    batch = await a.create(numbered(3))
    await until(lambda: num_given(a, batch.id) + num_given(b, batch.id) == 3)
    holders, woken = list[Server](), asyncio.Event()

    def freeze(server: Server) -> None:
        last_files = machine_of(server)._ending._last_files

        async def frozen(*args: object) -> object:
            files = await last_files(*args)  # type: ignore[arg-type]
            holders.append(server)
            await woken.wait()
            return files

        machine_of(server)._ending._last_files = frozen  # type: ignore[assignment, method-assign]

    for server in pair:
        freeze(server)
        answer_all(server, batch.id)
    # Only now: a server that still has the batch for its check gives it back once more.
    await until(lambda: bool(holders))
    (holder,) = holders
    successor = b if holder is a else a
    del machine_of(successor)._ending._last_files  # the class's own, which does not freeze
    try:
        await let_lease_end(successor)
        record = await successor.until_terminal(batch.id)
    finally:
        woken.set()
    await until(lambda: not machine_of(holder)._cares)
    assert await holder.get(batch.id) == record
    files, _ = await holder.service.files.list_page("", purpose="batch_output", limit=9, after=None, ascending=True)
    assert [file.id for file in files] == [record.output_file_id]


async def test_a_lost_copy_of_a_plan_is_fetched_again_and_a_lost_plan_is_made_again(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.plans.LOOK_S", 0.05)
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(numbered(NUM_LINES))
        await until(lambda: num_given(a, batch.id) > 0)
        copies = [path for path in (tmp_path / "a" / "jobs").iterdir() if path.name.startswith(batch.id)]
        for path in copies:
            path.unlink()
        answer_all(a, batch.id)
        await until(lambda: num_given(a, batch.id) > 0)
        await until(lambda: all(path.exists() for path in copies))
        for path in [*copies, *(tmp_path / "blobs" / batch.id).iterdir()]:
            path.unlink()
        record = await answered_to_the_end([a], batch.id)
    assert (record.status, record.num_completed, record.num_failed) == ("completed", NUM_LINES, 0)


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first load of a plan ends when this is set."""
    go_on, loads = threading.Event(), itertools.count()
    real = plans.copy_of_plan

    def slowly(blobs: Blobs, stem: Path, key: str, scratch: Path) -> SealedPlan:
        if next(loads) == 0:
            assert go_on.wait(PATIENCE_S)
        return real(blobs, stem, key, scratch)

    monkeypatch.setattr(plans, "copy_of_plan", slowly)
    yield go_on
    go_on.set()


async def loading(pair: Pair) -> Pair:
    """The server that loads a plan, and the other one."""
    a, b = pair
    await until(lambda: machine_of(a).chunks._loading or machine_of(b).chunks._loading)
    return (a, b) if machine_of(a).chunks._loading else (b, a)


async def test_a_lease_is_kept_while_its_plan_is_loaded_however_long_that_takes(
    pair: Pair, slow_load: threading.Event
) -> None:
    batch = await pair[0].create(numbered(20))
    holder, other = await loading(pair)
    await stop_leasing(other)
    await let_lease_end(holder)
    await machine_of(holder).chunks._renew()
    lease_again(other)
    slow_load.set()
    await until(lambda: num_given(holder, batch.id) == 20)
    assert (given(other, batch.id), machine_of(holder).chunks.num_lost) == ({}, 0)


async def test_a_lease_that_is_lost_while_its_plan_is_loaded_is_not_begun(
    pair: Pair, slow_load: threading.Event
) -> None:
    batch = await pair[0].create(numbered(20))
    holder, other = await loading(pair)
    await let_lease_end(holder)
    await until(lambda: num_given(other, batch.id) == 20)
    await machine_of(holder).chunks._renew()
    slow_load.set()
    assert (await answered_to_the_end([holder, other], batch.id)).num_completed == 20
    assert (executed(holder.engine), machine_of(holder).chunks.num_lost) == ([], 1)


async def test_results_that_a_server_loses_are_computed_again_when_its_lease_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    batch = await a.create(numbered(NUM_LINES))
    await both_at_work(pair, batch.id)

    async def refuse(*_: object) -> None:
        raise TypeError("what is this?")

    with monkeypatch.context() as refusing:
        refusing.setattr(a.service.store, "write_grouped", refuse)
        first = next(iter(given(a, batch.id)))
        lost = given(a, batch.id)[first]
        a.engine.answer(first)
        await until(lambda: machine_of(a).chunks.num_lost)
    await let_lease_end(b)
    assert (await answered_to_the_end([a, b], batch.id)).num_completed == NUM_LINES
    ran = executed(a.engine) + executed(b.engine)
    assert all(ran.count(row) == 2 for row in lost)
