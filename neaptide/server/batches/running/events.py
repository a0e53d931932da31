"""Events of running jobs, which are handled in order."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from neaptide.server.batches.running.job import Job
from neaptide.server.engine_client.events import BatchOutputs, EngineLost, RowOutput


@dataclass(slots=True, eq=False)
class Running:
    """A job of the runner."""

    job: Job
    commits: "set[asyncio.Task[None]]" = field(default_factory=set)
    unfed: deque[RowOutput] = field(default_factory=deque)
    """Engine outputs that the job has not processed, in order."""
    waits: bool = False
    """Whether it waits for its input file, which cannot be read at the moment."""


@dataclass(frozen=True, slots=True)
class FeedAgain:
    running: Running


@dataclass(frozen=True, slots=True)
class NewEngine:
    epoch: int


@dataclass(frozen=True, slots=True)
class Add:
    job: Job


@dataclass(frozen=True, slots=True)
class Close:
    job_id: str
    closed: "asyncio.Future[None]"


Event = BatchOutputs | FeedAgain | EngineLost | NewEngine | Add | Close


async def settle(commits: "set[asyncio.Task[None]]", closed: "asyncio.Future[None]") -> None:
    """Completes a close once all commits of its job are done."""
    if commits:
        await asyncio.wait(commits)
    if not closed.done():
        closed.set_result(None)
