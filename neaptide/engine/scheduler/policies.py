"""Every scheduling policy by its name."""

from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.packing import NeaptideScheduler

POLICIES: dict[str, type[Scheduler]] = {
    "neaptide": NeaptideScheduler,
}
