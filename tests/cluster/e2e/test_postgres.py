"""A whole server on PostgreSQL, the real ``openai`` client before it, and a database that goes away and comes back."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer, get_batch, lines_run_again, result_lines, wait_terminal
from tests.postgres import PostgresServer

NUM_LINES = 400


@pytest.fixture(scope="module")
def database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture(scope="module")
def server(
    postgres_server: PostgresServer, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    flags = ["--store", postgres_server.url(database), "--shadow", "off"]
    with RunningServer(tmp_path_factory.mktemp("on-postgres"), *flags, env=SIM) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def create_batch(client: openai.OpenAI, num_lines: int, max_tokens: int) -> str:
    body = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": max_tokens, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(num_lines)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def durable_lines(postgres_server: PostgresServer, database: str, batch_id: str) -> set[str]:
    query = "SELECT custom_id FROM batch_lines WHERE batch_id = %s AND state = 'completed'"
    with postgres_server.connect(database) as connection:
        return {row[0] for row in connection.execute(query, (batch_id,))}


def test_a_batch_from_upload_to_results(server: RunningServer, client: openai.OpenAI) -> None:
    batch_id = create_batch(client, 20, 4)
    wait_terminal(server, batch_id)
    done = client.batches.retrieve(batch_id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (20, 20)
    assert done.output_file_id is not None
    output = [json.loads(line) for line in client.files.content(done.output_file_id).iter_lines()]
    assert [line["custom_id"] for line in output] == [f"c{i}" for i in range(20)]
    assert batch_id in [batch.id for batch in client.batches.list(limit=5)]
    assert not list(server.data_dir.glob("*.db*"))


def test_another_batch_can_be_cancelled_and_its_input_deleted(server: RunningServer, client: openai.OpenAI) -> None:
    batch_id = create_batch(client, NUM_LINES, 512)
    input_file_id = client.batches.retrieve(batch_id).input_file_id
    server.wait_for(lambda: client.batches.retrieve(batch_id).status == "in_progress")
    with pytest.raises(openai.ConflictError):
        client.files.delete(input_file_id)
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    done = wait_terminal(server, batch_id)
    assert len(result_lines(server, done)) == done["request_counts"]["total"] == NUM_LINES
    assert client.files.delete(input_file_id).deleted


@pytest.mark.parametrize("name", ["file-a%00b", "file-nothing"])
def test_ids_that_nobody_has_are_not_found(server: RunningServer, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/batches/{name}", f"/v1/files/{name}/content"):
        assert server.http.get(path).status_code == 404
    assert server.http.delete(f"/v1/files/{name}").status_code == 404
    assert server.http.get("/v1/files", params={"after": "a\0b"}).status_code == 400


def test_a_database_that_goes_away_is_503_and_the_batch_goes_on_when_it_is_back(
    postgres_server: PostgresServer, database: str, server: RunningServer, client: openai.OpenAI
) -> None:
    batch_id = create_batch(client, NUM_LINES, 24)
    server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] > NUM_LINES // 8)
    executed_before = len(server.request_log())
    postgres_server.stop()
    try:
        for refused in (
            lambda: client.batches.retrieve(batch_id),
            lambda: client.files.create(file=("in.jsonl", b"{}"), purpose="batch"),
        ):
            with pytest.raises(openai.InternalServerError) as raised:
                refused()
            assert (raised.value.status_code, raised.value.code) == (503, "storage_unavailable")
            assert raised.value.response.headers["retry-after"]
        # Online work needs no database.
        assert client.completions.create(model="neaptide-tiny", prompt="2+2=", max_tokens=2).choices[0].text
    finally:
        postgres_server.start()
    finished = durable_lines(postgres_server, database, batch_id)
    done = wait_terminal(server, batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
    assert sorted(line["custom_id"] for line in result_lines(server, done)) == sorted(f"c{i}" for i in range(NUM_LINES))
    assert not lines_run_again(server, batch_id, executed_before) & finished


def test_a_store_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, "--store", "postgresql://me:secret@/d?host=/none", env=SIM)
    with pytest.raises(AssertionError, match="the server ended"), server:
        pass
    assert re.fullmatch(r"neaptide serve: .*cannot be used.*", server.log.splitlines()[-1])
    assert "secret" not in server.log
