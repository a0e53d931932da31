"""What differs from replica to replica on one machine; and one as a child, from its start to its end."""

import json
from pathlib import Path

import httpx
import pytest

from neaptide.cluster.launch.fleet import ReplicaPlace
from neaptide.cluster.launch.process import ReplicaProcess, devices_of, replica_settings
from neaptide.launch.serve import LaunchError
from neaptide.server.settings import Settings
from tests.cluster.gateway.conftest import Cluster


@pytest.mark.parametrize(
    ("listed", "count", "own"),
    [
        ("0,1", 2, ["0", "1"]),
        ("3,1,2,0", 2, ["3,1", "2,0"]),
        ("0,1,2", 2, ["0", "1"]),
        ("0", 2, ["0", "0"]),
        ("GPU-a,GPU-b", 1, ["GPU-a,GPU-b"]),
    ],
)
def test_gpus_that_are_listed_are_dealt_out(listed: str, count: int, own: list[str]) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": listed, "HOME": "/root"}
    found = [devices_of(number, count, environment) for number in range(count)]
    assert found == [{"CUDA_VISIBLE_DEVICES": one, "HOME": "/root"} for one in own]


def test_without_a_list_of_gpus_nothing_is_said_of_them() -> None:
    assert devices_of(1, 2, {"HOME": "/root"}) == {"HOME": "/root"}


def test_each_replica_has_files_of_its_own() -> None:
    settings = Settings(data_dir="/data", step_log="/logs/steps.jsonl.gz", port=8000, host="0.0.0.0")
    own = replica_settings(settings, "replica-2", "127.0.0.1")
    assert (own.host, own.port, own.data_dir) == ("127.0.0.1", 0, "/data/replica-2")
    assert own.step_log == "/logs/replica-2-steps.jsonl.gz"


async def test_a_replica_takes_work_until_it_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    """A real one, with SQLite: a replica need not know that it is one."""
    settings = Settings(executor="sim", data_dir=str(tmp_path), shadow="off", sim_step_ms=0.0)
    replica = await ReplicaProcess.start(replica_settings(settings, "replica-1", "127.0.0.1"))
    try:
        await replica.until_ready()
        cluster.gateway.replicas.join("replica-1", replica.url)
        await cluster.gateway.replicas.until_ready(1)
        body = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": 3, "ignore_eos": True}
        exchange = cluster.request("/v1/completions", body)
        await exchange.task
        assert (exchange.status, exchange.headers["x-neaptide-replica"]) == (200, "replica-1")
        async with httpx.AsyncClient() as http:
            direct = (await http.post(f"{replica.url}/v1/completions", json=body)).json()
        assert json.loads(exchange.text)["choices"] == direct["choices"]
    finally:
        await replica.stop()
    assert replica.process.returncode == 0
    assert (tmp_path / "replica-1").is_dir()


async def test_a_replica_that_cannot_start_is_said_to_have_ended(tmp_path: Path) -> None:
    settings = Settings(executor="none", data_dir=str(tmp_path))
    replica = await ReplicaProcess.start(replica_settings(settings, "replica-1", "127.0.0.1"))
    with pytest.raises(LaunchError, match="the server ended with status 1 before it was ready"):
        await replica.until_ready()


async def test_a_replica_that_cannot_be_started_for_a_moment_is_tried_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if it has never served: then what is wrong will not pass."""
    num_tries = 0

    async def start(*_: object) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 3:
            place.dismiss()
        raise OSError("too many open files")

    monkeypatch.setattr(ReplicaProcess, "start", start)
    monkeypatch.setattr("neaptide.cluster.launch.fleet.FIRST_BACKOFF_S", 0.0)
    place = ReplicaPlace("replica-1", Settings(), {}, cluster.gateway.replicas)
    with pytest.raises(LaunchError, match="could not be started: too many open files before it was ready"):
        await place.keep(must_serve=True)
    await place.keep(must_serve=False)
    assert num_tries == 3
