"""What happens to running jobs, in the order in which it is dealt with."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from neaptide.engine.messages import RequestOutput
from neaptide.server.batches.running.job import Job
from neaptide.server.link.events import BatchOutputs, EngineLost


@dataclass(slots=True, eq=False)
class Running:
    """A job that the runner has."""

    job: Job
    commits: "set[asyncio.Task[None]]" = field(default_factory=set)
    unfed: deque[RequestOutput] = field(default_factory=deque)
    """What the engine said and the job has not taken: none of it before what came first."""
    waits: bool = False
    """For its input file, which cannot be read just now."""


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
    """Answers a close when all commits of its job are over."""
    if commits:
        await asyncio.wait(commits)
    if not closed.done():
        closed.set_result(None)
