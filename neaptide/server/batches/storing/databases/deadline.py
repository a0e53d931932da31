"""The deadline of a call to the database: set around the call, obeyed by whatever waits inside it."""

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
"""A read or a write ends within this time, its wait for its turn included."""
GRACE_S = 2.0
"""A thread that is past its deadline gets this long to end; a name server or a disk may hold it."""

_until_s: ContextVar[float] = ContextVar("until_s", default=math.inf)


class DeadlineError(Exception):
    """The deadline came before the database was asked for anything that lasts: nothing was written."""


class StuckError(Exception):
    """The thread that works on the call does not end; it may still write."""


@contextmanager
def until(until_s: float) -> Iterator[None]:
    """Sets the deadline for what this thread does inside, in seconds of ``time.monotonic``."""
    token = _until_s.set(until_s)
    try:
        yield
    finally:
        _until_s.reset(token)


def left_s() -> float:
    """Until the deadline of the call that this thread works on; infinite where it has none."""
    return _until_s.get() - time.monotonic()


def is_over() -> bool:
    return left_s() <= 0


def check() -> None:
    """Raises DeadlineError."""
    if is_over():
        raise DeadlineError("the database did not answer in time")


async def answer_of(submitted: "Future[T]", limit_s: float) -> T:
    """The result of a call that a thread works on, or will.

    Raises:
        DeadlineError: the thread has not begun, and will not.
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
        raise DeadlineError("the call did not get its turn at the database in time")


def _or_none(limit_s: float) -> float | None:
    return None if limit_s == math.inf else limit_s
