"""Two servers whose clocks differ by five minutes: leases are by the database's clock, and nobody takes another's."""

from pathlib import Path

from tests.cluster.batches.pair import answered_to_the_end, executed, given, machine_of, shared_server
from tests.patience import until
from tests.server.batches.fakes import FakeClock, numbered

NUM_LINES = 300
LEASE_S, AHEAD_S = 200.0, 300.0
"""By its own clock the second server would find every lease of the first one over."""


async def test_a_clock_that_is_ahead_ends_no_lease(tmp_path: Path, postgres_url: str) -> None:
    a = shared_server(tmp_path, "a", postgres_url, LEASE_S)
    b = shared_server(tmp_path, "b", postgres_url, LEASE_S, FakeClock(FakeClock().now_s + AHEAD_S))
    async with a, b:
        batch = await a.create(numbered(NUM_LINES))
        await until(lambda: bool(given(a, batch.id)) and bool(given(b, batch.id)))
        for server in (a, b):
            await machine_of(server).chunks._renew()
        record = await answered_to_the_end([a, b], batch.id)
        assert record.status == "completed"
        assert sorted(executed(a.engine) + executed(b.engine)) == list(range(NUM_LINES))
        assert [machine_of(server).chunks.num_lost for server in (a, b)] == [0, 0]
