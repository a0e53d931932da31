"""The ring of recorded traffic, and the gauge with its child process."""

import asyncio
import os
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from prometheus_client import CollectorRegistry

from neaptide.engine.messages import StepOutputs, TellTraffic, Traffic
from neaptide.launch import simulating
from neaptide.server.counterfactual.frames import ShadowAnswer, ShadowFigures
from neaptide.server.counterfactual.gauge import ReplayPace
from neaptide.server.counterfactual.ring import MAX_AGE_S, NoAnswerError, TrafficRing
from neaptide.server.counterfactual.service import Shadow
from neaptide.server.engine_client.client import EngineClient, EngineUnavailableError
from neaptide.server.engine_client.supervisor import Supervisor
from tests.patience import PATIENCE_S
from tests.server.conftest import Server
from tests.server.counterfactual.at_once import simulate_at_once
from tests.server.engine_client.test_supervisor import config, request
from tests.server.fake_engine import FakeEngine

QUICK = ReplayPace(warm_s=0.3, window_s=0.6, least_window_s=0.6, least_rest_s=0.1, rest_factor=0.0)
SOME_PIECES = ReplayPace(
    warm_s=0.5, window_s=5.0, least_window_s=5.0, least_requests=1, least_rest_s=0.1, rest_factor=0.0
)
"""An engine tells what it served every two seconds."""


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def ring_of(max_bytes: int = 100) -> tuple[EngineClient, FakeEngine, Clock, TrafficRing]:
    client, clock = EngineClient(), Clock()
    engine = FakeEngine(client)
    ring = TrafficRing(client, clock, max_bytes)
    engine.attach()
    return client, engine, clock, ring


def tell(client: EngineClient, *pieces: bytes, present: bytes | None = None) -> None:
    traffic = [Traffic(piece, False) for piece in pieces]
    client.on_message(StepOutputs([], [], traffic=traffic + ([Traffic(present, True)] if present else [])))


async def answered(ring: TrafficRing, client: EngineClient, since_s: float) -> list[bytes]:
    asked = asyncio.ensure_future(ring.pieces(since_s))
    await asyncio.sleep(0)
    tell(client, present=b"now")
    return await asked


async def test_the_ring_keeps_the_last_pieces_and_asks_for_what_the_engine_has() -> None:
    client, engine, clock, ring = ring_of()
    tell(client, b"a")
    clock.now_s += 10
    tell(client, b"b", b"c")
    assert await answered(ring, client, 1001.0) == [b"b", b"c", b"now"]
    assert await answered(ring, client, 1000.0) == [b"a", b"b", b"c", b"now"]
    assert [type(message) for message in engine.received] == [TellTraffic, TellTraffic]


async def test_the_ring_forgets_what_is_old_or_too_much() -> None:
    client, _, clock, ring = ring_of(max_bytes=10)
    for _ in range(5):
        tell(client, b"four")
    assert ring.num_bytes == 8
    clock.now_s += MAX_AGE_S + 1
    tell(client, b"x")
    assert await answered(ring, client, 0.0) == [b"x", b"now"]
    assert ring.num_bytes == 1


async def test_an_engine_that_goes_away_leaves_no_one_waiting() -> None:
    _, engine, clock, ring = ring_of()
    asked = asyncio.ensure_future(ring.pieces(0.0))
    await asyncio.sleep(0)
    clock.now_s += 5
    engine.die()
    with pytest.raises(NoAnswerError):
        await asked
    assert ring.since_s == 1005.0


async def test_an_engine_that_was_not_there_is_asked_when_it_is() -> None:
    client, engine, _, ring = ring_of()
    engine.die()
    with pytest.raises(EngineUnavailableError):
        await ring.pieces(0.0)
    engine.attach()
    assert await answered(ring, client, 0.0) == [b"now"]
    assert [type(message) for message in engine.received] == [TellTraffic]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"neaptide_shadow_{name}", labels)
    assert found is not None
    return found


def test_what_simulates_stands_behind_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def set_idle_priority(niceness: int, is_idle: bool = False) -> None:
        asked.append((niceness, is_idle))
        raise SystemExit

    monkeypatch.setattr(simulating, "set_idle_priority", set_idle_priority)
    with pytest.raises(SystemExit):
        simulating.main()
    assert asked == [(19, True)]


async def test_a_served_engine_is_compared_with_its_shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: the engine's record, the ring, the child; then the child is gone with its owner."""
    simulate_at_once(monkeypatch)
    began_s = time.monotonic()
    client, registry = EngineClient(), CollectorRegistry()
    supervisor = Supervisor(client, msgspec.structs.replace(config(tmp_path), records_traffic=True))
    shadow = Shadow(client, registry, time.monotonic, SOME_PIECES)
    try:
        await supervisor.start()
        for number in range(1, 400):
            asked = request(f"r{number}", 5)
            # Targets that no machine misses.
            chat = msgspec.structs.replace(
                asked, arrival_s=time.monotonic(), ttft_slo_s=PATIENCE_S, tpot_slo_s=PATIENCE_S
            )
            async for _ in client.generate(chat):
                pass
            if number % 20 == 0:
                await shadow.gauge._round()
            if value(registry, "requests"):  # a window so short may have none
                break
        pid = shadow.gauge.pid
        assert pid is not None
        assert value(registry, "rounds_total", outcome="compared") >= 1
        assert value(registry, "real_attainment_ratio") == 1.0
        assert value(registry, "attainment_ratio", policy="fcfs") == 1.0
        assert value(registry, "saved_targets", policy="priority") == 0
        assert value(registry, "real_offline_tokens_per_second") == 0
        assert value(registry, "won_offline_tokens", policy="priority") == 0
        assert 0 <= value(registry, "age_seconds") < time.monotonic() - began_s
        assert value(registry, "cpu_seconds_total") > 0
    finally:
        await shadow.stop()
        await supervisor.stop()
    assert not psutil.pid_exists(pid)


async def test_the_gauge_waits_until_enough_is_recorded() -> None:
    client, engine, clock, _ = ring_of()
    shadow = Shadow(client, CollectorRegistry(), clock)
    tell(client, b"one")
    clock.now_s += ReplayPace().warm_s + ReplayPace().least_window_s - 1
    tell(client, b"another")
    await shadow.gauge._round()
    assert engine.received == []


async def test_where_nothing_is_served_there_is_no_child(server: Server) -> None:
    registry = CollectorRegistry()
    shadow = Shadow(server.context.client, registry, time.monotonic, QUICK)
    shadow.start()
    await asyncio.sleep(0)
    await shadow.gauge._round()
    assert shadow.gauge.pid is None
    assert server.engine.received == []
    await shadow.stop()


async def test_a_child_that_is_killed_is_replaced_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, clock, _ = ring_of()
    registry = CollectorRegistry()
    shadow = Shadow(client, registry, clock, ReplayPace(fault_rest_s=7.0))
    rests: list[float] = []
    tell(client, b"one")
    clock.now_s += 200
    tell(client, b"another")

    async def note(rest_s: float) -> None:
        rests.append(rest_s)
        raise asyncio.CancelledError

    async def answer(pieces: list[bytes]) -> None:
        await shadow.gauge._child.wake()
        assert shadow.gauge.pid is not None
        os.kill(shadow.gauge.pid, 9)
        await shadow.gauge._child.receive(10.0)

    async def pieces(since_s: float) -> list[bytes]:
        return []

    monkeypatch.setattr(shadow.gauge, "_ask", answer)
    monkeypatch.setattr(shadow.ring, "pieces", pieces)
    with monkeypatch.context() as patched:
        patched.setattr("neaptide.server.counterfactual.gauge.asyncio.sleep", note)
        with pytest.raises(asyncio.CancelledError):
            await shadow.gauge._run()
    assert rests == [7.0]
    assert value(registry, "rounds_total", outcome="failed") == 1
    assert shadow.gauge.pid is None


async def test_a_window_with_few_chats_does_not_replace_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, clock, _ = ring_of()
    registry = CollectorRegistry()
    shadow = Shadow(client, registry, clock)
    tell(client, b"one")
    clock.now_s += 200
    tell(client, b"another")
    figures = ShadowFigures(18, 50.0)
    counts = [20, 19, 0]

    async def answer(pieces: list[bytes]) -> ShadowAnswer:
        return ShadowAnswer(1.0, 0.0, 60.0, counts.pop(0), figures, {"fcfs": figures})

    async def pieces(since_s: float) -> list[bytes]:
        return []

    monkeypatch.setattr(shadow.gauge, "_ask", answer)
    monkeypatch.setattr(shadow.ring, "pieces", pieces)
    for _ in range(3):
        await shadow.gauge._round()
    assert value(registry, "requests") == 20
    assert shadow.gauge.shown is not None
    assert shadow.gauge.shown.requests == 20
    assert [value(registry, "rounds_total", outcome=name) for name in ("compared", "too_few")] == [1, 2]


async def test_a_round_that_worked_in_bursts_rests_the_less(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _, clock, _ = ring_of()
    shadow = Shadow(client, CollectorRegistry(), clock)
    tell(client, b"one")
    clock.now_s += 200
    tell(client, b"another")

    async def answer(pieces: list[bytes]) -> ShadowAnswer:
        clock.now_s += 50
        return ShadowAnswer(cpu_s=2.0)

    async def pieces(since_s: float) -> list[bytes]:
        return []

    monkeypatch.setattr(shadow.gauge, "_ask", answer)
    monkeypatch.setattr(shadow.ring, "pieces", pieces)
    assert await shadow.gauge._round() == 2.0 * ReplayPace().rest_factor - 50


def test_the_rest_is_long_enough_for_two_percent_of_a_core() -> None:
    assert 1 / ReplayPace().rest_factor < 0.02
