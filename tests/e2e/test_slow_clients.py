"""Sockets that are slow on purpose, of every kind at once, against the real server beside healthy clients."""

import asyncio
import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord
from tests.e2e.server import RunningServer
from tests.e2e.slow_sockets import KINDS, Ending, healthy, one_slow_socket
from tests.patience import Stopwatch

SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "10", "NEAPTIDE_LOG_LEVEL": "warning"}
REASONS = {"header": "header", "body": "body", "silent": "request", "reader": "slow_reader"}


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def besiege(
    server: RunningServer, sockets: int, opening_s: float, healthy_s: float
) -> tuple[list[Ending], list[ChatRecord]]:
    """All slow sockets open at once, each until the server ends it."""

    async def one(kind: str, number: int) -> Ending:
        rng = random.Random(f"{kind} {number}")
        await asyncio.sleep(rng.uniform(0, opening_s))
        return await one_slow_socket(server.port, kind, rng)

    slow = [asyncio.ensure_future(one(kind, number)) for kind in KINDS for number in range(sockets)]
    records = await healthy(f"http://127.0.0.1:{server.port}", healthy_s, seed=1)
    return list(await asyncio.gather(*slow)), records


def besieged(sockets: int) -> list[pytest.MarkDecorator]:
    return [
        pytest.mark.acceptance("A13", "stalled readers at once", count=sockets),
        pytest.mark.acceptance("A14", "slow headers, slow bodies and silent sockets at once", count=3 * sockets),
    ]


@pytest.mark.parametrize(
    ("sockets", "opening_s", "header_s", "body_s"),
    [
        pytest.param(50, 1.0, 1.5, 2.5, id="short", marks=besieged(50)),
        pytest.param(500, 5.0, 10.0, 30.0, id="long", marks=[*besieged(500), pytest.mark.full]),
    ],
)
def test_slow_sockets_of_every_kind_are_ended_in_time_and_healthy_clients_served(
    tmp_path: Path,
    sockets: int,
    opening_s: float,
    header_s: float,
    body_s: float,
    many_descriptors: None,
) -> None:
    deadlines = {"NEAPTIDE_HEADER_TIMEOUT_S": header_s, "NEAPTIDE_BODY_TIMEOUT_S": body_s}
    env = SIM | {name: str(value) for name, value in deadlines.items()} | {"NEAPTIDE_SEND_TIMEOUT_S": str(body_s)}
    with RunningServer(tmp_path, env=env) as server:
        watch = Stopwatch()
        endings, records = asyncio.run(besiege(server, sockets, opening_s, healthy_s=body_s))
        held_up_s = watch.held_up_s
        # A body that trickles gains a little time with every byte; a machine at its limit is late everywhere.
        limits_s = {"header": header_s, "silent": header_s, "body": body_s + 1, "reader": body_s + 1}
        assert Counter((ending.kind, ending.how) for ending in endings) == {
            ("header", "408"): sockets,
            ("silent", "408"): sockets,
            ("body", "408"): sockets,
            ("reader", "cut"): sockets,
        }
        for kind, limit_s in limits_s.items():
            seconds = [ending.seconds for ending in endings if ending.kind == kind]
            assert len(seconds) == sockets
            assert 0.9 * min(header_s, limit_s) <= min(seconds) + held_up_s
            assert max(seconds) <= limit_s + 5 + held_up_s, kind
        assert len(records) > 5 * body_s
        assert [record.error for record in records if record.error is not None] == []
        server.wait_for(lambda: scrape(server).sum("neaptide_connections") == 1)
        samples = scrape(server)
        assert {
            kind: samples.sum("neaptide_connections_ended_total", reason=reason) for kind, reason in REASONS.items()
        } == dict.fromkeys(KINDS, sockets)
        assert samples.sum("neaptide_requests_in_flight") == 0


def scrape(server: RunningServer) -> Samples:
    return Samples(server.http.get("/metrics").text)
