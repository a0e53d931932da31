"""What the application on Ray does by itself; Ray is asked in ``tests/cluster/e2e/on_ray/test_ray.py``."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from neaptide.cluster.launch.process import ReplicaProcess, replica_settings
from neaptide.server.settings import Settings
from tests.kills import signal_all
from tests.patience import PATIENCE_S, until
from tests.postgres import PostgresServer
from tests.server.asgi import Exchange

on_ray = pytest.importorskip("neaptide.cluster.ray.application", reason="Ray is not installed", exc_type=ImportError)


def test_replicas_of_a_node_have_places_that_are_free_again_when_they_end(tmp_path: Path) -> None:
    first, first_lock = on_ray.take_place(str(tmp_path))
    second, second_lock = on_ray.take_place(str(tmp_path))
    assert (first, second) == ("replica-1", "replica-2")
    first_lock.close()
    again, again_lock = on_ray.take_place(str(tmp_path))
    assert again == "replica-1"
    again_lock.close()
    second_lock.close()


def test_a_replica_is_started_from_the_event_loop_that_ray_gives_its_actors(tmp_path: Path) -> None:
    import uvloop

    async def status() -> int:
        settings = Settings(executor="none", data_dir=str(tmp_path))
        replica = await ReplicaProcess.start(replica_settings(settings, "replica-1", "127.0.0.1"))
        return await replica.process.wait()

    # It has said that there is no such executor, so it has had its settings.
    assert uvloop.run(status()) == 1


async def test_the_application_comes_up_in_serves_own_test_mode(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """No cluster of Ray's, but its deployments, handles and broadcasts, and a real process pair."""
    from ray import serve

    arguments = {
        "store": postgres_server.url(postgres_server.new_database()),
        "blobs": (tmp_path / "blobs").as_uri(),
        "data_dir": str(tmp_path / "data"),
        "executor": "sim",
        "shadow": "off",
    }
    before = set(psutil.Process().children(recursive=True))
    try:
        handle = serve.run(on_ray.build(arguments), _local_testing_mode=True)
        app = await getattr(handle, "__serve_build_asgi_app__").remote()  # noqa: B009

        async def is_ready() -> bool:
            exchange = Exchange(app, "/cluster", None, method="GET")
            await exchange.task
            found = json.loads(exchange.text)["replicas"]
            return [(one["name"].endswith("-replica-1"), one["state"]) for one in found] == [(True, "ready")]

        await until(is_ready)
        assert (tmp_path / "data" / "replica-1").is_dir()
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        signal_all(started, signal.SIGTERM)
        psutil.wait_procs(started, timeout=PATIENCE_S)
