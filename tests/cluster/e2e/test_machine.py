"""Two real replicas behind one address: a kill costs what the replica had, and nothing else."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.cluster.e2e.machine import RunningCluster, is_gone, on_both, streaming
from tests.cluster.e2e.shared import LEASE_S, submit
from tests.e2e.conftest import SIM
from tests.e2e.server import get_batch, result_lines, wait_terminal
from tests.patience import PATIENCE_S, until_here
from tests.postgres import PostgresServer

FLAGS = ("--chunk-lease-s", str(LEASE_S), "--shadow", "off", "--max-num-seqs", "32")
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
NUM_LINES = 600


@pytest.fixture(scope="module")
def cluster(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    store = ("--store", postgres_server.url(postgres_server.new_database()))
    with RunningCluster(tmp_path_factory.mktemp("cluster"), *store, *FLAGS, env=SIM) as cluster:
        yield cluster


def test_events_come_while_the_answer_is_being_made(cluster: RunningCluster) -> None:
    with streaming(cluster) as stream:
        stream.read(4)
        log = cluster.request_log(stream.replica)
    started = [event["id"] for event in log if event["event"] == "start"]
    assert started
    assert started[-1] not in {event["id"] for event in log if event["event"] == "end"}


def test_a_kill_fails_what_the_replica_had_and_nothing_else(cluster: RunningCluster) -> None:
    batch_id = submit(cluster, NUM_LINES, 24)
    with ExitStack() as stack:
        streams = on_both(stack, cluster)
        cluster.kill("replica-1")
        # From now on until it is back, every chat is answered.
        answered = 0
        while answered < 20 or [one["state"] for one in cluster.shown()] != ["ready", "ready"]:
            reply = cluster.http.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, f"{reply.text}\n{cluster.log[-3000:]}"
            answered += 1
        (error, end) = streams["replica-1"].rest()[-2:]
        assert (json.loads(error)["error"]["code"], end) == ("replica_lost", "[DONE]")
        last, end = streams["replica-2"].rest()[-2:]
        assert (json.loads(last)["choices"][0]["finish_reason"], end) == ("length", "[DONE]")
    wait_terminal(cluster, batch_id)
    # Whoever is asked, the batch is there as a whole.
    for _ in range(cluster.num_replicas):
        done = get_batch(cluster, batch_id)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
    assert [line["custom_id"] for line in result_lines(cluster, done)] == [f"c{i}" for i in range(NUM_LINES)]


def test_the_operators_switch_is_every_replicas(cluster: RunningCluster) -> None:
    cluster.wait_all_ready()
    for state, value in (("paused", 1.0), ("running", 0.0)):
        cluster.http.post("/admin/offline", json={"state": state}).raise_for_status()
        for one in cluster.shown():
            text = cluster.http.get(f"{one['url']}/metrics").text
            assert f"neaptide_besteffort_paused {value}" in text.splitlines()


def test_a_stop_lets_streams_end_and_leaves_no_process(postgres_server: PostgresServer, tmp_path: Path) -> None:
    store = ("--store", postgres_server.url(postgres_server.new_database()))
    with RunningCluster(tmp_path, *store, *FLAGS, env=SIM) as cluster:
        processes = psutil.Process(cluster.process.pid).children(recursive=True)
        with streaming(cluster, max_tokens=100) as stream:
            stream.read(2)
            cluster.process.terminate()
            assert stream.rest()[-1] == "[DONE]"
        assert cluster.process.wait(PATIENCE_S) == 0
        until_here(lambda: all(map(is_gone, processes)))


@pytest.mark.full
def test_a_cluster_that_is_killed_takes_its_replicas_along(postgres_server: PostgresServer, tmp_path: Path) -> None:
    store = ("--store", postgres_server.url(postgres_server.new_database()))
    with RunningCluster(tmp_path, *store, *FLAGS, env=SIM) as cluster:
        processes = psutil.Process(cluster.process.pid).children(recursive=True)
        cluster.process.kill()
        cluster.process.wait()
        until_here(lambda: all(map(is_gone, processes)))


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ((), 2, "replicas share their batches in a database: set --store postgresql://USER@HOST/DATABASE"),
        (("--store", "postgresql://me:secret@/d?host=/none"), 1, r"replica-\d ended with status 1 before it was ready"),
    ],
)
def test_a_cluster_that_cannot_start_says_why_and_ends(
    tmp_path: Path, flags: tuple[str, ...], status: int, said: str
) -> None:
    cluster = RunningCluster(tmp_path, *flags, env=SIM)
    with pytest.raises(AssertionError, match="the server ended"), cluster:
        pass
    assert cluster.process.returncode == status
    assert "secret" not in cluster.log
    assert re.fullmatch(f"neaptide cluster: {said}", cluster.log.splitlines()[-1])
