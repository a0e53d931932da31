"""Random histories of an engine: what is asked of it does not depend on how it answers."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from neaptide.engine.clock import Clock
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import AbortRequest, AddBatch, AddRequest, CancelBatch, SetOffline
from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from tests.engine.harness import Harness

EOS_TOKEN_IDS = frozenset(range(6, 36))
"""Three of a hundred tokens that the simulated executor makes."""
SMALL_POOL: dict[str, object] = {
    "num_blocks": 24,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "headroom_ratio": 0.1,
    "eos_token_ids": EOS_TOKEN_IDS,
}
"""Of a harness in which requests push each other out."""
TIERS = (Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX)


class Played(Protocol):
    """An engine that histories are played on."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def clock(self) -> Clock: ...


@dataclass
class History:
    """Hands in requests, batches and the rest, a few with every turn."""

    seed: int
    directory: Path
    interrupts: bool = True
    """Aborts, cancels and pauses as well."""
    scale: int = 1
    """Of the prompts' lengths: 1 suits blocks of four tokens."""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Of every request and row."""
    cut_short: set[str] = field(default_factory=set)
    """Requests that were aborted, and batches that were cancelled, perhaps after their end."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._num_requests = self._num_jobs = 0

    def turn(self, harness: Played) -> None:
        """What comes between two steps."""
        rng = self._random
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            harness.core.handle(self._request(harness.clock.now()))
        if rng.random() < 0.03:
            harness.core.handle(self._batch())
        if not self.interrupts:
            return
        if rng.random() < 0.1 and self._num_requests:
            request_id = f"r{rng.randrange(self._num_requests)}"
            self.cut_short.add(request_id)
            harness.core.handle(AbortRequest([request_id]))
        if rng.random() < 0.01 and self._num_jobs:
            job = f"job{rng.randrange(self._num_jobs)}"
            self.cut_short.add(job)
            harness.core.handle(CancelBatch(job))
        if rng.random() < 0.03:
            harness.core.handle(SetOffline(rng.random() < 0.5))

    def play(self, harness: Harness, num_turns: int) -> None:
        """So many turns with a step each, then steps until everything has ended."""
        for _ in range(num_turns):
            self.turn(harness)
            harness.step()
            harness.clock.sleep_until(harness.clock.now() + self._random.choice([0.0, 0.001]))
        harness.core.handle(SetOffline(False))
        harness.run()

    def is_cut_short(self, request_id: str) -> bool:
        return bool({request_id, request_id.partition(":")[0]} & self.cut_short)

    def _request(self, now_s: float) -> AddRequest:
        rng = self._random
        request_id = f"r{self._num_requests}"
        self._num_requests += 1
        prompt = self.prompts[request_id] = self._prompt()
        slos = rng.choice([0.01, 0.2, 1.0]), rng.choice([0.005, 0.05])
        return AddRequest(request_id, prompt, self._params(), rng.choice(TIERS), now_s, *slos)

    def _batch(self) -> AddBatch:
        rng = self._random
        job = f"job{self._num_jobs}"
        self._num_jobs += 1
        rows = list(range(8))
        with TokenFileWriter(self.directory / job, is_durable=False) as writer:
            for row in rows:
                prompt = self.prompts[f"{job}:{row}"] = self._prompt()
                writer.append(prompt)
        write_prefixes(self.directory / job, is_durable=False)
        streams = [row for row in rows if rng.random() < 0.3]
        table = [self._params() for _ in range(3)]
        return AddBatch(job, str(self.directory / job), rows, table, [rng.randrange(3) for _ in rows], streams, 1e9)

    def _prompt(self) -> list[int]:
        """Few distinct prefixes, so that blocks are shared; up to half of the small pool."""
        rng = self._random
        prefix = [rng.randrange(3)] * (self.scale * rng.choice([0, 4, 9, 16]))
        return prefix + [rng.randrange(6, 50) for _ in range(rng.randrange(1, 24 * self.scale))]

    def _params(self) -> SamplingParams:
        rng = self._random
        return SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 5, 17, 30]),
            min_tokens=rng.choice([0, 0, 2]),
            stop_token_ids=rng.choice([(), (), tuple(range(100, 150))]),
            ignore_eos=rng.random() < 0.3,
        )
