"""What is counted of online requests on their way, and that the loop waits for one that has been sent."""

import ctypes
import os
from collections.abc import Iterator, Sequence

import pytest

from neaptide.engine.messages import AbortRequest, EngineReady, FromEngine, Shutdown, ToEngine
from neaptide.engine.params import FinishReason
from neaptide.engine.process.arrivals import OnlineArrivals, create_arrivals
from neaptide.engine.process.loop import ARRIVAL_S, run_engine
from tests.engine.harness import Harness, flex, online


@pytest.fixture
def descriptor() -> Iterator[int]:
    fd = create_arrivals()
    yield fd
    os.close(fd)


def test_only_online_requests_are_on_their_way_and_only_until_they_are_taken(descriptor: int) -> None:
    server, engine = OnlineArrivals(descriptor), OnlineArrivals(descriptor)
    for message in (flex("row", [7]), AbortRequest(["a"], FinishReason.ABORT)):
        server.note_sent(message)
        assert not engine.are_on_their_way
    server.note_sent(online("chat", [7]))
    assert engine.are_on_their_way
    engine.note_taken(flex("row", [7]))
    assert engine.are_on_their_way
    engine.note_taken(online("chat", [7]))
    assert not engine.are_on_their_way


def test_one_that_is_taken_before_it_is_counted_as_sent_is_nothing_to_wait_for(descriptor: int) -> None:
    arrivals = OnlineArrivals(descriptor)
    arrivals.note_taken(online("chat", [7]))
    assert not arrivals.are_on_their_way
    arrivals.note_sent(online("chat", [7]))
    assert not arrivals.are_on_their_way


def test_kernels_read_what_has_been_sent_before_what_has_been_taken(descriptor: int) -> None:
    arrivals = OnlineArrivals(descriptor)
    arrivals.note_sent(online("a", [7]))
    arrivals.note_sent(online("b", [7]))
    arrivals.note_taken(online("a", [7]))
    assert list((ctypes.c_int64 * 2).from_address(arrivals.address)) == [2, 1]


class Line:
    """Source and sink of the loop: a chat has been sent and is there at the second look."""

    def __init__(self, harness: Harness, arrivals: OnlineArrivals) -> None:
        self._harness, self._arrivals = harness, arrivals
        self.waits_s: list[float] = []

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        self.waits_s.append(timeout_s)
        message: ToEngine = online("chat", [7] * 8, max_tokens=1)
        if len(self.waits_s) == 1:
            self._arrivals.note_sent(message)
            return []
        if len(self.waits_s) == 2:
            return [message]
        return [] if self._harness.core.has_work else [Shutdown()]

    def send(self, message: FromEngine) -> None: ...


def test_the_next_step_is_with_the_request_that_has_been_sent(descriptor: int) -> None:
    arrivals, harness = OnlineArrivals(descriptor), Harness()
    harness.core.handle(flex("row", [8] * 8, max_tokens=3))
    line = Line(harness, arrivals)
    run_engine(harness.core, EngineReady("", "", "", 0, 0, 0, 0, []), line, line, harness.clock, arrivals=arrivals)
    assert line.waits_s[:2] == [0.0, ARRIVAL_S]
    assert harness.log[:2] == [("start", "chat"), ("start", "row")]
    assert not arrivals.are_on_their_way
