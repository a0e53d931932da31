"""Counts that outlive a server, and counts that several servers share, on a database and a virtual clock."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from neaptide.durations import DAY_S
from neaptide.server.batches.storing import usage_rows
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.batches.storing.tables import key_usage
from neaptide.server.limits.counts import OwnCounts, Taken
from neaptide.server.limits.leased_counts import ALONE_S, REFUSED_S, LeasedCounts
from neaptide.server.limits.usage import Excess, KeyLimits, LimitName
from tests.patience import PATIENCE_S
from tests.postgres import PostgresServer

RPM, TPM, TPD = LimitName
NOON_S = 20_000 * DAY_S + DAY_S / 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def steady(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return NOON_S + self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    # A machine that is too busy to write within a second is no database that is away.
    monkeypatch.setattr("neaptide.server.limits.leased_counts.ASK_S", PATIENCE_S)
    # The database's own clock is the test's, too.
    monkeypatch.setattr(usage_rows, "database_now_ms", lambda _: sa.literal(int(found.wall() * 1e3), sa.BigInteger))
    return found


async def take(counts: Any, limits: KeyLimits, tokens: int = 0, tenant: str = "a") -> Taken | Excess:
    found: Taken | Excess = await counts.take(tenant, limits, {RPM: 1, TPM: tokens, TPD: tokens})
    return found


async def admitted(counts: Any, limits: KeyLimits, count: int, tokens: int = 0) -> int:
    found = await asyncio.gather(*(take(counts, limits, tokens) for _ in range(count)))
    return sum(isinstance(one, Taken) for one in found)


# ---- one server ------------------------------------------------------------------------------------------


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_the_count_of_a_day_outlives_a_restart_and_that_of_a_minute_does_not(
    data_dir: Path, clock: Clock
) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_day=100)
    for number, expected in enumerate((60, 30)):
        store = Store(data_dir, limit_s=PATIENCE_S)
        store.open()
        counts = OwnCounts(clock.steady, clock.wall, store)
        await counts.start()
        assert isinstance(await take(counts, limits, expected), Taken)
        refused = await take(counts, KeyLimits(tokens_per_day=100), 41)
        assert refused == Excess(TPD, 100, (60, 90)[number], 41, DAY_S / 2 - 1_000.0)
        await counts.stop()
        store.close()


async def test_counts_are_stored_while_the_server_runs(
    data_dir: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.limits.counts.STORE_EVERY_S", 0.0)
    store, stored = Store(data_dir, limit_s=PATIENCE_S), asyncio.Event()
    store.open()
    write = store.write_beside

    async def write_and_say(*arguments: Any) -> Any:
        await write(*arguments)
        stored.set()

    monkeypatch.setattr(store, "write_beside", write_and_say)
    counts = OwnCounts(clock.steady, clock.wall, store)
    await counts.start()
    await take(counts, KeyLimits(tokens_per_day=100), 70)
    await stored.wait()
    # As after a kill: nothing was stopped.
    again = OwnCounts(clock.steady, clock.wall, store)
    await again.start()
    assert again.levels("a", KeyLimits(tokens_per_day=100))[TPD].used == 70
    for one in (again, counts):
        await one.stop()
    store.close()


# ---- several servers --------------------------------------------------------------------------------------


class Shared:
    """Two servers on one database."""

    def __init__(self, clock: Clock, stores: list[Store]) -> None:
        self.stores = stores
        self.servers = [LeasedCounts(store, clock.steady, OwnCounts(clock.steady, clock.wall)) for store in stores]
        self.num_writes = 0
        for store in set(stores):
            self._count_writes(store)

    def _count_writes(self, store: Store) -> None:
        write = store.write_beside

        async def counted(*arguments: Any) -> Any:
            self.num_writes += 1
            return await write(*arguments)

        store.write_beside = counted  # type: ignore[method-assign]

    def used(self, name: LimitName, limits: KeyLimits) -> list[int]:
        return [server.levels("a", limits)[name].used for server in self.servers]


@pytest.fixture
def shared(clock: Clock, data_dir: Path) -> Any:
    """On SQLite: one store for both, whose writer takes turns as a row's lock does on PostgreSQL."""
    store = Store(data_dir, limit_s=PATIENCE_S)
    store.open()
    yield Shared(clock, [store, store])
    store.close()


async def test_two_servers_admit_together_what_one_key_may(shared: Shared, clock: Clock) -> None:
    limits = KeyLimits(requests_per_minute=20)
    one, other = shared.servers
    assert await admitted(one, limits, 8) + await admitted(other, limits, 30) + await admitted(one, limits, 30) == 20
    clock.now_s += 59.0
    assert await admitted(one, limits, 5) + await admitted(other, limits, 5) == 0
    clock.now_s += 3.0  # the minute, and the time of a lease
    now = await admitted(one, limits, 15) + await admitted(other, limits, 15)
    # What one has leased and not used is free for the other when the lease is over.
    clock.now_s += 2.0
    await one._settle_now()
    assert (now <= 20, now + await admitted(other, limits, 15)) == (True, 20)


async def test_a_busy_key_is_not_a_write_for_each_request(shared: Shared, clock: Clock) -> None:
    limits = KeyLimits(requests_per_minute=10_000)
    for _ in range(100):
        assert isinstance(await take(shared.servers[0], limits), Taken)
        clock.now_s += 0.01
    # Leases grow with what was used of the last one: 1, 3, 7, 15, 31, 63.
    assert shared.num_writes == 6


async def test_what_a_server_has_leased_and_not_used_comes_back(shared: Shared, clock: Clock) -> None:
    limits = KeyLimits(requests_per_minute=100)
    one, other = shared.servers
    assert await admitted(one, limits, 40) == 40
    clock.now_s += 2.1
    await one._settle_now()
    assert await admitted(other, limits, 100) == 60


async def test_tokens_that_were_not_used_come_back(shared: Shared) -> None:
    limits = KeyLimits(tokens_per_minute=100, tokens_per_day=1_000)
    one, other = shared.servers
    taken = await take(one, limits, 100)
    assert isinstance(taken, Taken)
    assert isinstance(await take(other, limits, 70), Excess)
    one.give_back("a", {TPM: 70, TPD: 70}, taken.place)
    one.add("a", {TPM: 5, TPD: 5})
    await one._settle_now()
    assert await take(other, limits, 66) == Excess(TPM, 100, 35, 66, 62.0)
    assert isinstance(await take(other, limits, 65), Taken)


async def test_a_refusal_is_not_a_write_for_each_request(shared: Shared, clock: Clock) -> None:
    limits = KeyLimits(requests_per_minute=1)
    server = shared.servers[0]
    assert await admitted(server, limits, 50) == 1
    assert shared.num_writes == 2
    assert server.refusal("a", limits) == Excess(RPM, 1, 1, 1, 62.0)
    clock.now_s += REFUSED_S
    assert server.refusal("a", limits) is None
    assert await admitted(server, limits, 50) == 0
    assert shared.num_writes == 3


async def test_while_the_database_is_away_each_server_counts_for_itself(
    shared: Shared, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any) -> None:
        raise StoreUnavailableError("away")

    limits, (one, other) = KeyLimits(requests_per_minute=4), shared.servers
    with monkeypatch.context() as patched:
        patched.setattr(shared.stores[0], "write_beside", away)
        assert [await admitted(server, limits, 9) for server in (one, other)] == [4, 4]
    # It is asked again after a while, and has heard of nothing.
    clock.now_s += ALONE_S
    assert await admitted(one, limits, 9) == 4
    assert await admitted(other, limits, 9) == 0


async def test_the_day_of_a_shared_key_is_stored_with_each_lease(shared: Shared, clock: Clock) -> None:
    limits = KeyLimits(tokens_per_day=100)
    assert isinstance(await take(shared.servers[0], limits, 60), Taken)
    after = LeasedCounts(shared.stores[0], clock.steady, OwnCounts(clock.steady, clock.wall))
    assert await take(after, limits, 41) == Excess(TPD, 100, 60, 41, DAY_S / 2 - 1_000.0)


async def test_servers_on_postgresql_wait_for_each_others_row(
    tmp_path: Path, clock: Clock, postgres_server: PostgresServer
) -> None:
    from neaptide.cluster.sharing import sharing_of

    database = await asyncio.to_thread(postgres_server.new_database)
    url, blobs = postgres_server.url(database), f"file://{tmp_path}/blobs"
    stores = [Store(tmp_path / name, sharing_of(url, blobs), PATIENCE_S) for name in ("one", "other")]
    for store in stores:
        await asyncio.to_thread(store.open)
    limits, shared = KeyLimits(requests_per_minute=50, tokens_per_minute=400), Shared(clock, stores)
    try:
        counts = await asyncio.gather(*(admitted(server, limits, 60, 10) for server in shared.servers))
        with postgres_server.connect(database) as connection:
            stored = connection.execute("SELECT count(*) FROM key_usage").fetchall()
        assert (sum(counts), stored) == (40, [(1,)])
    finally:
        for store in stores:
            await asyncio.to_thread(store.close)


async def test_keys_that_nobody_uses_are_forgotten(data_dir: Path, clock: Clock) -> None:
    store = Store(data_dir, limit_s=PATIENCE_S)
    store.open()
    await store.write_beside(usage_rows.store, {"old": "{}"})
    clock.now_s += 3 * DAY_S + 1.0
    await store.write_beside(usage_rows.store, {"new": "{}"})
    found = await store.read(lambda conn: list(conn.execute(sa.select(key_usage.c.tenant)).scalars()))
    assert found == ["new"]
    store.close()
