"""Real servers on one PostgreSQL that have other contexts, or other models, than their neighbours."""

from pathlib import Path

import pytest

from tests.cluster.e2e.shared import SharedServers
from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal
from tests.postgres import PostgresServer

pytestmark = pytest.mark.full
TINY = {"model": "neaptide-tiny", "max_tokens": 2, "ignore_eos": True}
SHORT, LONG = TINY | {"prompt": "2+2="}, TINY | {"prompt": [5] * 2_000}
NUM_LONG = 20


def serve_with(server: RunningServer, *flags: str) -> None:
    """At its next start."""
    server._command += flags


@pytest.mark.parametrize("creator", [0, 1], ids=["short", "long"])
def test_lines_beyond_a_servers_context_are_another_servers(
    postgres_server: PostgresServer, tmp_path: Path, creator: int
) -> None:
    """200 lines, 20 of which a context of 1,024 tokens does not hold."""
    servers = SharedServers(tmp_path, postgres_server)
    serve_with(servers.servers[0], "--max-model-len", "1024")
    with servers:
        bodies = [LONG if n % 10 == 3 else SHORT for n in range(10 * NUM_LONG)]
        batch_id = submit_batch(servers.servers[creator], bodies, "/v1/completions")
        done = wait_terminal(servers.servers[creator], batch_id)
        lines = result_lines(servers.servers[creator], done)
    assert (done["status"], done["request_counts"]["failed"]) == ("completed", 0)
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(10 * NUM_LONG)]
    usage = [line["response"]["body"]["usage"] for line in lines]
    assert sum(one["prompt_tokens"] == 2_000 for one in usage) == NUM_LONG


def test_each_batch_is_answered_by_the_model_that_it_names(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Two models on one database, and four batches of each, created on either server."""
    servers = SharedServers(tmp_path, postgres_server)
    serve_with(servers.servers[1], "--served-model-name", "new")
    with servers:
        asked = [(server, model) for server in servers.servers for model in ("neaptide-tiny", "new") * 2]
        ids = [submit_batch(server, [SHORT | {"model": model}] * 5, "/v1/completions") for server, model in asked]
        for (_, model), batch_id in zip(asked, ids, strict=True):
            done = wait_terminal(servers.servers[0], batch_id)
            assert (done["status"], done["request_counts"]["completed"]) == ("completed", 5), done["errors"]
            answered = {line["response"]["body"]["model"] for line in result_lines(servers.servers[0], done)}
            assert answered == {model}
        logs = [{event["id"].partition(".")[0] for event in server.request_log()} for server in servers.servers]
    for (_, model), batch_id in zip(asked, ids, strict=True):
        assert [batch_id in log for log in logs] == [model != "new", model == "new"]


def test_a_start_with_the_wrong_model_keeps_a_batch_and_the_right_one_ends_it(tmp_path: Path) -> None:
    flags = ("--executor", "sim", "--shadow", "off")
    with RunningServer(tmp_path, *flags, env={"NEAPTIDE_SIM_STEP_MS": "50"}) as server:
        batch_id = submit_batch(server, [SHORT | {"max_tokens": 20}] * 400, "/v1/completions")
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] > 0)
    with RunningServer(tmp_path, *flags, "--served-model-name", "wrong") as server:
        waits = get_batch(server, batch_id)
        assert (waits["status"], waits["request_counts"]["failed"]) == ("in_progress", 0)
        assert waits["neaptide"]["waits_for"] == "No server has the model 'neaptide-tiny' for which the batch was made."
        assert server.log.count("batches that wait for another server: 1.") == 1
        assert 'neaptide_batches_waiting{reason="model"} 1.0' in server.http.get("/metrics").text
    with RunningServer(tmp_path, *flags) as server:
        done = wait_terminal(server, batch_id)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 400)
