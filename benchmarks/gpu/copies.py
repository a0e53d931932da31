"""Times a step that copies KV blocks to and from host memory: beside its work, and in line with it."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor as Thread
from concurrent.futures import Future
from statistics import median
from typing import Any

import torch

from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import StepHandle
from neaptide.engine.steps.plan import StepPlan
from neaptide.estimator.calibration.micro_runs import MicroRunner, Parts
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.host_rows import HostRows, _Streams

BLOCKS, DRY_BLOCKS = 64, 4
"""Blocks that a step saves, loads, or both."""


class CopyingExecutor:
    """Adds copies to the steps of a torch executor."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.num_saves = self.num_loads = 0

    @property
    def num_blocks(self) -> int:
        return self._executor.num_blocks

    def submit(self, plan: StepPlan) -> StepHandle:
        if len(plan):
            plan.saves = [(number, number) for number in range(self.num_saves)]
            plan.loads = [(self.num_saves + number, self.num_blocks - 1 - number) for number in range(self.num_loads)]
        return self._executor.submit(plan)

    def close(self) -> None:
        self._executor.close()


class InLine(Thread):
    """Copies at once instead of in a thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def in_line(host: HostRows) -> Iterator[None]:
    """While it is open, copies are part of the device's own work."""
    copier = host._copier
    if isinstance(copier, _Streams):
        aside = copier._out, copier._in
        copier._out = copier._in = torch.cuda.current_stream(copier._device)
        yield
        copier._out, copier._in = aside
    else:
        thread, copier._thread = copier._thread, InLine()
        yield
        copier._thread = thread


def measure_copies(
    executor: TorchExecutor, clock: Clock, steps: dict[str, Parts], repeats: int, count: int
) -> list[dict[str, Any]]:
    """Median seconds from submission to result, by turns: without copies, with them beside the step, and in line.

    Args:
        executor: with host memory for twice ``count`` blocks.
        count: blocks that are saved, loaded, or both.
    """
    copying, rows = CopyingExecutor(executor), []
    runner = MicroRunner(copying, clock, executor._runner.block_size)
    for name, parts in steps.items():
        for saves, loads in ((count, 0), (0, count), (count, count)):
            seconds: dict[str, list[float]] = {"without_s": [], "beside_s": [], "in_line_s": []}
            for _ in range(repeats):
                copying.num_saves = copying.num_loads = 0
                seconds["without_s"].append(runner.run(parts))
                copying.num_saves, copying.num_loads = saves, loads
                seconds["beside_s"].append(runner.run(parts))
                with in_line(executor._runner._host):
                    seconds["in_line_s"].append(runner.run(parts))
            medians = {way: median(times) for way, times in seconds.items()}
            rows.append({"step": name, "saved_blocks": saves, "loaded_blocks": loads} | medians)
    return rows
