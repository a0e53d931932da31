"""Deadline of a database call, set around the call and obeyed by all waits inside."""

import asyncio
import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

CALL_LIMIT_S = 10.0
"""Longest time of a read or a write, including its wait in the queue."""
GRACE_S = 2.0
"""Time for a thread to end after its deadline; a name server or a disk may delay it."""

_until_s: ContextVar[float] = ContextVar("until_s", default=math.inf)


class DeadlineError(Exception):
    """The deadline passed before the database got a lasting request: nothing was written."""


class StuckError(Exception):
    """The thread of the call does not end; it may still write."""


@contextmanager
def until(until_s: float) -> Iterator[None]:
    """Sets the deadline of this thread's work inside the context, in seconds of ``time.monotonic``."""
    token = _until_s.set(until_s)
    try:
        yield
    finally:
        _until_s.reset(token)


def left_s() -> float:
    """Seconds until the deadline of this thread's call; infinite without one."""
    return _until_s.get() - time.monotonic()


def is_over() -> bool:
    return left_s() <= 0


def check() -> None:
    """Raises DeadlineError after the deadline."""
    if is_over():
        raise DeadlineError("the database did not answer in time")


async def answer_of(submitted: "Future[T]", limit_s: float) -> T:
    """The result of a call that a thread has queued or runs.

    Raises:
        DeadlineError: the thread has not started it, and will not.
        StuckError: it does not end.
    """
    try:
        async with asyncio.timeout(_or_none(limit_s)):
            return await asyncio.wrap_future(submitted)
    except TimeoutError:
        _give_up(submitted)
    try:
        async with asyncio.timeout(GRACE_S):
            return await asyncio.wrap_future(submitted)
    except TimeoutError:
        raise StuckError("the call to the database does not end") from None


def wait_for_answer(submitted: "Future[T]", limit_s: float) -> T:
    """``answer_of`` for threads."""
    try:
        return submitted.result(_or_none(limit_s))
    except TimeoutError:
        _give_up(submitted)
    try:
        return submitted.result(GRACE_S)
    except TimeoutError:
        raise StuckError("the call to the database does not end") from None


def _give_up(submitted: "Future[T]") -> None:
    if submitted.cancel():
        raise DeadlineError("the call to the database waited too long for its turn")


def _or_none(limit_s: float) -> float | None:
    return None if limit_s == math.inf else limit_s
