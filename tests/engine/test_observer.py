"""An observer hears of the events that it overrides, in the order in which they come; others cost it no call."""

from typing import Any

import pytest

from neaptide.engine.observer import EVENTS, EngineObserver, Observers
from tests.engine.harness import Harness, online

Heard = list[tuple[str, str, tuple[object, ...]]]
"""Listener, event, arguments."""


def listener(name: str, events: tuple[str, ...], heard: Heard) -> EngineObserver:
    """An observer that overrides these events only."""

    def hearing(event: str) -> Any:
        return lambda self, *args: heard.append((name, event, args))

    made: type[EngineObserver] = type(name, (EngineObserver,), {event: hearing(event) for event in events})
    return made()


def test_there_is_an_event_for_everything_of_the_protocol() -> None:
    assert EVENTS == (
        "warmed_up",
        "message",
        "refused",
        "cancelled",
        "planning",
        "row",
        "idle",
        "planned",
        "executed",
        "undone",
        "given_up",
        "ended",
        "committed",
        "close",
    )


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_those_that_override_it_in_order_of_subscription(event: str) -> None:
    heard: Heard = []
    others = tuple(name for name in EVENTS if name != event)
    observers = Observers([listener("first", (event,), heard), listener("deaf", others, heard)])
    observers.subscribe(listener("second", EVENTS, heard))
    getattr(observers, event)(1, "two")
    assert heard == [("first", event, (1, "two")), ("second", event, (1, "two"))]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_that_no_observer_overrides_is_not_an_error(event: str) -> None:
    observers = Observers([])
    observers.subscribe(listener("deaf", tuple(name for name in EVENTS if name != event), []))
    getattr(observers, event)(1, "two")


def test_a_single_listener_is_called_without_a_detour() -> None:
    heard: Heard = []
    only = listener("only", ("planning",), heard)
    observers = Observers([listener("deaf", ("idle",), heard), only])
    assert observers.planning == only.planning


def test_an_event_overridden_in_a_base_class_is_heard() -> None:
    heard: Heard = []
    base = type(listener("base", ("planning",), heard))
    Observers([type("derived", (base,), {})()]).planning(1.0)
    assert heard == [("base", "planning", (1.0,))]


def test_the_engine_tells_of_a_request_in_the_order_of_its_life() -> None:
    heard: Heard = []
    harness = Harness()
    harness.core.subscribe(listener("all", EVENTS, heard))
    harness.core.handle(online("a", [7, 8, 9], max_tokens=2))
    harness.core.handle(online("never", []))
    harness.run()
    harness.core.close()
    assert [event for _, event, _ in heard] == [
        *("message", "message", "refused"),
        *("planning", "planned", "executed", "committed"),
        *("planning", "planned", "executed", "ended", "committed"),
        "close",
    ]
