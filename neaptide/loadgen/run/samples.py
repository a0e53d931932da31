"""Samples a server's metrics and its batch during a run, about once per second.

Engine figures exist only for a Neaptide server; for others only the clients' own figures are known.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx

from neaptide.loadgen.client.batches import TERMINAL, get_batch
from neaptide.loadgen.client.prometheus import Samples

PERIOD_S = 1.0
LEAST_S = 0.2
"""Shortest sample: steps count when they end, so rates over few of them scatter."""
KV_STATES = ("online", "offline", "cached", "free")
CLASSES = ("online", "offline")
SERIES = ("neaptide_step_tokens_total", "neaptide_step_seconds_", "neaptide_steps_", "neaptide_kv_blocks")


@dataclass(slots=True, frozen=True)
class LoadSample:
    """Figures between the previous sample and this one."""

    at_s: float
    seconds: float
    """Seconds since the previous sample."""
    tokens_per_s: dict[str, float]
    """Tokens computed by the engine, by class."""
    kv_blocks: dict[str, float]
    predicted_step_s: float | None
    measured_step_s: float | None


@dataclass(slots=True)
class Watch:
    """The samples of one run."""

    http: httpx.AsyncClient
    samples: list[LoadSample] = field(default_factory=list)
    batch: dict[str, Any] | None = None
    batch_progress: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, ended lines, all lines."""
    failures: int = 0
    """Failed scrapes."""
    _last: tuple[float, Samples] | None = None
    _start_s: float | None = None

    async def follow(self) -> None:
        """Samples periodically, one period after the first look, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Takes one sample, or counts a failure. Time begins at the first look."""
        now_s = asyncio.get_running_loop().time()
        self._start_s = now_s if self._start_s is None else self._start_s
        try:
            await self._look(now_s - self._start_s)
        except (httpx.HTTPError, ValueError):
            self.failures += 1

    async def _look(self, at_s: float) -> None:
        response = await self.http.get("/metrics")
        if response.is_success:
            self._take(at_s, Samples(response.text, SERIES))
        if self.batch is not None and self.batch["status"] not in TERMINAL:
            self.batch = await get_batch(self.http, self.batch["id"])
            counts = self.batch["request_counts"]
            self.batch_progress.append((at_s, counts["completed"] + counts["failed"], counts["total"]))

    def _take(self, at_s: float, samples: Samples) -> None:
        last = self._last
        if last is not None and at_s - last[0] < LEAST_S:
            return
        self._last = (at_s, samples)
        if not samples.has("neaptide_step_tokens_total") or last is None:
            return
        before = last[1]
        seconds = at_s - last[0]

        def delta(name: str, **labels: str) -> float:
            return samples.sum(name, **labels) - before.sum(name, **labels)

        steps = delta("neaptide_step_seconds_count", phase="total")
        predicted = delta("neaptide_steps_total")
        self.samples.append(
            LoadSample(
                at_s,
                seconds,
                {name: delta("neaptide_step_tokens_total", **{"class": name}) / seconds for name in CLASSES},
                {state: samples.sum("neaptide_kv_blocks", state=state) for state in KV_STATES},
                delta("neaptide_steps_predicted_seconds_total") / predicted if predicted else None,
                delta("neaptide_step_seconds_sum", phase="total") / steps if steps else None,
            )
        )
