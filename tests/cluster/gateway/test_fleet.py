"""Lives of replicas that cannot begin: the others stay, and it is tried again."""

import asyncio
from pathlib import Path

import pytest

from neaptide.cluster.launch import fleet as fleets
from neaptide.cluster.launch.fleet import Fleet
from neaptide.launch.serve import LaunchError
from neaptide.server.settings import Settings
from tests.cluster.gateway.conftest import Cluster
from tests.patience import until


class FakeProcess:
    """Lives until it is told to end."""

    url = "http://127.0.0.1:9"
    lives: list["FakeProcess"]
    faults: list[Exception | None]
    """Of the next starts."""

    def __init__(self) -> None:
        self.is_told = False
        self._over = asyncio.Event()

    @classmethod
    async def start(cls, *_: object) -> "FakeProcess":
        fault = cls.faults.pop(0) if cls.faults else None
        if fault is not None:
            raise fault
        cls.lives.append(cls())
        return cls.lives[-1]

    def stop_soon(self) -> None:
        self.is_told = True
        self._over.set()

    async def ended(self) -> int:
        await self._over.wait()
        return 1

    async def stop(self) -> None:
        self.stop_soon()


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeProcess.lives, FakeProcess.faults = [], []
    monkeypatch.setattr(fleets, "ReplicaProcess", FakeProcess)
    monkeypatch.setattr(fleets, "FIRST_BACKOFF_S", 0.0)


@pytest.mark.parametrize("fault", [OSError(12, "Cannot allocate memory"), LaunchError("cannot listen")])
async def test_a_replica_that_cannot_be_started_again_takes_no_other_along(
    cluster: Cluster, tmp_path: Path, fault: Exception
) -> None:
    fleet = Fleet(Settings(data_dir=str(tmp_path)), 2, 2, cluster.gateway.replicas)
    running = asyncio.create_task(fleet.run())
    await until(lambda: len(FakeProcess.lives) == 2)
    for place in fleet._places.values():
        place._has_served = True
    FakeProcess.faults = [fault, fault]
    FakeProcess.lives[0].stop_soon()
    await until(lambda: len(FakeProcess.lives) == 3)
    assert (fleet.size, FakeProcess.lives[1].is_told, FakeProcess.faults) == (2, False, [])
    fleet.suspend()
    await running


async def test_one_that_cannot_be_started_at_all_ends_the_start(cluster: Cluster, tmp_path: Path) -> None:
    FakeProcess.faults = [OSError(12, "Cannot allocate memory")]
    with pytest.raises(LaunchError, match=r"replica-1 could not be started: .*Cannot allocate memory"):
        await Fleet(Settings(data_dir=str(tmp_path)), 1, 1, cluster.gateway.replicas).run()
