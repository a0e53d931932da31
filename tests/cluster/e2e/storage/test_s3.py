"""Two real servers on one PostgreSQL and one bucket, with a passage between them and the bucket that can be shut."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from neaptide.cluster.storage import blobs as blobs_module
from neaptide.cluster.storage.blobs import Blobs, BlobsUnavailableError
from tests.cluster.e2e.shared import SharedServers, submit
from tests.e2e.server import RunningServer, get_batch, result_lines, wait_terminal
from tests.postgres import PostgresServer
from tests.s3 import BUCKET, Passage

pytestmark = pytest.mark.full

PREFIX = "of-two-servers"
NUM_LINES = 100
CONTENT = b'{"custom_id": "a"}\n'
MAX_TRIES = 2
"""Of a request to the bucket, as its operator may say."""
NUM_HANGING = 9
"""Uploads: no more than a server opens connections to a bucket, and more than it has threads for everything that blocks
on two processors."""


@pytest.fixture(scope="module")
def shared(
    postgres_server: PostgresServer, passage: Passage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", passage.url)
        patch.setenv("AWS_MAX_ATTEMPTS", str(MAX_TRIES))
        root = tmp_path_factory.mktemp("on-a-bucket")
        servers = SharedServers(root, postgres_server, blobs=f"s3://{BUCKET}/{PREFIX}")
    with servers:
        yield servers


@pytest.fixture(autouse=True)
def opened(passage: Passage) -> Iterator[None]:
    yield
    passage.open()


def upload(server: RunningServer) -> httpx.Response:
    files = {"file": ("lines.jsonl", CONTENT, "application/jsonl")}
    return server.http.post("/v1/files", files=files, data={"purpose": "batch"})


def num_files(server: RunningServer) -> int:
    return len(server.http.get("/v1/files", params={"limit": 100}).raise_for_status().json()["data"])


def chats(server: RunningServer) -> None:
    body = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": 2}
    server.http.post("/v1/completions", json=body).raise_for_status()


def check_output(server: RunningServer, batch_id: str) -> None:
    done = wait_terminal(server, batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
    assert [line["custom_id"] for line in result_lines(server, done)] == [f"c{i}" for i in range(NUM_LINES)]


def check_unfinished(shared: SharedServers, batch_id: str) -> None:
    """Every line is done, and nobody says that the batch is."""
    for server in shared.servers:
        server.wait_for(lambda server=server: get_batch(server, batch_id)["status"] != "in_progress")
        found = get_batch(server, batch_id)
        assert (found["status"], found["output_file_id"]) == ("finalizing", None)
        assert found["request_counts"]["completed"] == NUM_LINES


def test_what_one_takes_the_other_runs_and_answers_for(shared: SharedServers) -> None:
    first, second = shared.servers
    first.http.post("/admin/offline", json={"state": "paused"}).raise_for_status()
    batch_id = submit(first, NUM_LINES, 4)
    check_output(second, batch_id)
    check_output(first, batch_id)
    first.http.post("/admin/offline", json={"state": "running"}).raise_for_status()
    # What the bucket holds is what the clients were told.
    output = get_batch(first, batch_id)["output_file_id"]
    both = [server.http.get(f"/v1/files/{output}/content").raise_for_status().content for server in shared.servers]
    assert both[0] == both[1]


@pytest.mark.parametrize("reply", [False, True], ids=["before", "after"])
def test_a_server_that_is_killed_while_it_puts_the_output_loses_nothing(
    shared: SharedServers, passage: Passage, reply: bool
) -> None:
    held = passage.hold(f"PUT /{BUCKET}/{PREFIX}/batch_".encode(), reply=reply)
    # Nobody has put a plan yet: the first that comes is one, and is let go.
    batch_id = submit(shared.servers[0], NUM_LINES, 4)
    while True:
        shared.servers[0].wait_for(held.is_here.is_set)
        if get_batch(shared.servers[0], batch_id)["status"] == "finalizing":
            break
        following = passage.hold(held.needle, reply=reply)
        held.goes_on.set()
        held = following
    check_unfinished(shared, batch_id)
    (dead,) = (server for server in shared.servers if held.port in ports_of(server))
    (other,) = (server for server in shared.servers if server is not dead)
    dead.kill_both()
    held.goes_on.set()
    check_output(other, batch_id)
    dead.start()
    check_output(dead, batch_id)


def ports_of(server: RunningServer) -> list[int]:
    return [one.laddr.port for one in psutil.Process(server.process.pid).net_connections("tcp") if one.laddr]


def test_a_bucket_that_is_away_is_503_and_no_batch_is_said_to_be_done_before_it_is_back(
    shared: SharedServers, passage: Passage
) -> None:
    first, second = shared.servers
    batch_id = submit(first, NUM_LINES, 100)
    first.wait_for(lambda: get_batch(first, batch_id)["request_counts"]["completed"] > 0)
    files_before = num_files(first)
    passage.shut()
    refused = upload(second)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
    assert refused.headers["retry-after"]
    assert num_files(first) == files_before
    for server in shared.servers:
        chats(server)
    check_unfinished(shared, batch_id)
    passage.open()
    check_output(second, batch_id)
    assert upload(second).status_code == 200


def test_a_request_that_fails_is_tried_as_often_as_its_operator_says(shared: SharedServers, passage: Passage) -> None:
    passage.shut()
    assert upload(shared.servers[0]).status_code == 503
    # Of a connection that ends without a reply its library opens another one by itself.
    assert 0 < passage.num_refused <= 2 * MAX_TRIES


def test_while_a_bucket_is_silent_everything_else_is_answered(shared: SharedServers, passage: Passage) -> None:
    first, second = shared.servers
    batch_id = submit(first, NUM_LINES, 4)
    check_output(second, batch_id)
    files_before = num_files(first)
    passage.silence()
    with ThreadPoolExecutor(NUM_HANGING) as clients:
        uploads = [clients.submit(upload, first) for _ in range(NUM_HANGING)]
        first.wait_for(lambda: passage.num_waiting >= NUM_HANGING)
        assert get_batch(first, batch_id)["status"] == "completed"
        chats(first)
        assert not any(one.done() for one in uploads)
        passage.open()
        replies = [one.result() for one in uploads]
    # On a machine that took longer than the bucket is given, some were refused.
    assert {reply.status_code for reply in replies} <= {200, 503}
    taken = [reply.json()["id"] for reply in replies if reply.status_code == 200]
    assert num_files(first) == files_before + len(taken)
    for file_id in taken:
        assert second.http.get(f"/v1/files/{file_id}/content").raise_for_status().content == CONTENT


def test_no_server_starts_without_its_bucket_and_says_so(shared: SharedServers, passage: Passage) -> None:
    _, second = shared.servers
    second.kill_both()
    passage.shut()
    with pytest.raises(AssertionError, match="the server ended"):
        second.start()
    assert second.log.splitlines()[-1].startswith("neaptide serve: the blobs cannot be used: s3://")
    passage.open()
    second.start()
    chats(second)


def test_a_bucket_that_takes_a_request_and_says_nothing_is_away_after_a_while(
    passage: Passage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", passage.url)
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    blobs = Blobs(f"s3://{BUCKET}/alone")
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    blobs.put(source, "files/file-1")
    monkeypatch.setattr(blobs_module, "PUT_S", 0.1)
    passage.silence()
    with pytest.raises(BlobsUnavailableError, match="TimeoutError"):
        blobs.put(source, "files/file-2")
    passage.open()
    monkeypatch.undo()
    blobs.put(source, "files/file-3")
    blobs.fetch("files/file-3", tmp_path / "target", tmp_path)
    assert (tmp_path / "target").read_bytes() == CONTENT
