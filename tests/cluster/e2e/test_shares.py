"""Shares between keys hold over all servers: one that submits much leaves the other its half of what all of them do."""

from pathlib import Path

import pytest

from tests.cluster.e2e.shared import SharedServers, submit
from tests.e2e.server import wait_terminal
from tests.postgres import PostgresServer

GREEDY, MODEST = "key-of-greedy", "key-of-modest"
NUM_GREEDY, NUM_MODEST = 3_000, 800
LINE_TOKENS = 96
"""So that an engine turns from one key to the other some dozen times."""


def submit_as(shared: SharedServers, key: str, num_lines: int) -> str:
    server = shared.servers[0]
    server.http.headers["authorization"] = f"Bearer {key}"
    return submit(server, num_lines, LINE_TOKENS)


@pytest.mark.full
def test_a_greedy_key_leaves_the_other_its_half_of_what_both_servers_do(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    flags = ("--api-key", GREEDY, "--api-key", MODEST)
    with SharedServers(tmp_path, postgres_server, flags=flags) as shared:
        server = shared.servers[0]
        greedy = submit_as(shared, GREEDY, NUM_GREEDY)
        server.wait_for(lambda: shared.num_done(greedy) > 100)
        modest = submit_as(shared, MODEST, NUM_MODEST)
        # From when its first lines are done, so that both servers have had time to claim some, almost to their end.
        server.wait_for(lambda: shared.num_done(modest) >= 160)
        greedy_before, modest_before = shared.num_done(greedy), shared.num_done(modest)
        server.wait_for(lambda: shared.num_done(modest) >= 640)
        greedy_lines = shared.num_done(greedy) - greedy_before
        modest_lines = shared.num_done(modest) - modest_before
        assert shared.num_done(greedy) < NUM_GREEDY, "one of them had nothing to do"
        assert 0.6 < greedy_lines / modest_lines < 1.6, (greedy_lines, modest_lines)
        # Both servers ran lines of both.
        for batch_id in (greedy, modest):
            for one in shared.servers:
                assert any(event["id"].startswith(batch_id) for event in one.request_log())
        assert wait_terminal(server, modest)["request_counts"]["completed"] == NUM_MODEST
