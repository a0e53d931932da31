"""Two real servers, four processes, on one PostgreSQL: one is killed, one is frozen and wakes when it is too late."""

from collections.abc import Iterator

import pytest

from tests.cluster.e2e.shared import SharedServers, completed, freeze, submit, wake
from tests.e2e.server import RunningServer, get_batch, result_lines, wait_terminal
from tests.postgres import PostgresServer

NUM_LINES = 600


@pytest.fixture(scope="module")
def shared(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    with SharedServers(tmp_path_factory.mktemp("shared"), postgres_server) as servers:
        yield servers


def switch(server: RunningServer, state: str) -> None:
    server.http.post("/admin/offline", json={"state": state}).raise_for_status()


def at_work_in_second(shared: SharedServers) -> str:
    """A batch that the second server has in hand, for the first one has let it: which of two leases when, machines
    decide."""
    first = shared.servers[0]
    switch(first, "paused")
    batch_id = submit(first, NUM_LINES, 24)
    first.wait_for(lambda: shared.holders(batch_id) and completed(first, batch_id) > 0)
    return batch_id


def check_all_there(server: RunningServer, batch_id: str, num_lines: int = NUM_LINES) -> None:
    done = get_batch(server, batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", num_lines)
    assert [line["custom_id"] for line in result_lines(server, done)] == [f"c{i}" for i in range(num_lines)]


def started(server: RunningServer, batch_id: str) -> set[str]:
    """Rows of a batch that the server's engine has begun."""
    ids = {event["id"] for event in server.request_log() if event["event"] == "start"}
    return {name.rpartition(":")[2] for name in ids if name.startswith(batch_id)}


@pytest.mark.full
def test_frozen_past_its_lease_a_server_wakes_and_writes_nothing(shared: SharedServers) -> None:
    first, second = shared.servers
    batch_id = at_work_in_second(shared)
    frozen = freeze(second)
    try:
        switch(first, "running")
        wait_terminal(first, batch_id)
    finally:
        before = shared.results(batch_id)
        wake(frozen)
    assert len(before) == NUM_LINES
    second.wait_for(lambda: "a lease is lost" in second.log)
    assert shared.results(batch_id) == before
    for server in shared.servers:
        check_all_there(server, batch_id)


@pytest.mark.full
def test_what_a_killed_server_had_is_done_by_the_other(shared: SharedServers) -> None:
    first, second = shared.servers
    batch_id = at_work_in_second(shared)
    second.kill_both()
    finished = set(shared.results(batch_id))
    switch(first, "running")
    wait_terminal(first, batch_id)
    check_all_there(first, batch_id)
    again = {f"c{row}" for row in started(first, batch_id) & started(second, batch_id)}
    assert not again & finished
    # It comes back with what it has, and answers for the batch.
    second.start()
    check_all_there(second, batch_id)
