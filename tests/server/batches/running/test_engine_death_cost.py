"""What engine deaths cost a batch, counted in steps of the real engine (simulated executor, virtual clock)."""

import asyncio
from pathlib import Path

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.row_id import RowId
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimExecutor
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.deaths import Evidence
from tests.server.batches.fakes import READY, Server, jsonl, line

NUM_LINES, MAX_TOKENS, SEATS = 300, 40, 256
BLOCKS_EACH = 4


class Planned(EngineObserver):
    """Keeps the requests of the last step that was planned."""

    def __init__(self, request_ids: list[str]) -> None:
        self._request_ids = request_ids

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._request_ids[:] = step.plan.request_ids


class CoreLink:
    """One life of the engine, in this process: no socket, no thread."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        config = EngineConfig(
            cache=CacheConfig(block_size=16),
            scheduler=SchedulerConfig(max_model_len=256, max_num_seqs=SEATS, offline_max_kv_ratio=1.0),
        )
        clock, cost_model, num_blocks = VirtualClock(), ConstantCostModel(0.01), SEATS * BLOCKS_EACH
        executor = SimExecutor(num_blocks, cost_model, clock, vocab_size=256, first_token_id=32)
        self.in_step: list[str] = []
        headroom = FixedHeadroom(num_blocks, 0.0)
        self._core = EngineCore(config, executor, cost_model, headroom, clock, observers=[Planned(self.in_step)])

    def send(self, message: ToEngine) -> None:
        self._core.handle(message)

    def step(self) -> bool:
        """Whether there was a step."""
        outputs = self._core.step()
        self._client.on_message(outputs)
        return bool(outputs.stats)


class Run:
    """A batch on engines that die after certain steps, or of certain lines."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.num_steps = 0
        self.num_deaths = 0

    async def batch(
        self, kills: dict[int, Evidence] | None = None, culprits: frozenset[int] = frozenset()
    ) -> BatchRecord:
        kills = kills or {}
        self._attach()
        lines = [line(f"c{i}", "x" * 20, max_tokens=MAX_TOKENS) for i in range(NUM_LINES)]
        record = await self._server.create(jsonl(lines))
        while not (record := await self._server.get(record.id)).is_terminal:
            if not self.engine.step():
                await asyncio.sleep(0.001)  # the batch plane's turn: a thread that assembles lines, a commit
                continue
            self.num_steps += 1
            in_step = {row.row for name in self.engine.in_step if (row := RowId.parse(name)) is not None}
            evidence = kills.get(self.num_steps) or (Evidence.STRONG if culprits & in_step else None)
            if evidence is not None:
                self.num_deaths += 1
                self._server.client.detach(self.engine.in_step, evidence)
                self._attach()
            # An event of its own: its turn comes after everything that this step brought.
            await self._server.service._machine._runner.close_job("nobody")
        return record

    def _attach(self) -> None:
        self.engine = CoreLink(self._server.client)
        self._server.client.attach(self.engine, READY)


async def run_batch(
    directory: Path, kills: dict[int, Evidence] | None = None, culprits: frozenset[int] = frozenset()
) -> tuple[Run, set[str]]:
    """The run, and the custom_ids of the lines that failed."""
    async with Server(directory, engine=False) as server:
        run = Run(server)
        record = await run.batch(kills, culprits)
        _, errors = server.results(record)
        return run, set(errors)


async def undisturbed_steps(directory: Path) -> int:
    run, failed = await run_batch(directory)
    assert (run.num_deaths, failed) == (0, set())
    return run.num_steps


@pytest.mark.acceptance("A3", "an engine that dies at a quarter of a batch of 300 lines")
@pytest.mark.parametrize(("evidence", "most"), [(Evidence.WEAK, 1.5), (Evidence.STRONG, 3.0)])
async def test_one_death_at_a_quarter_costs_little(tmp_path: Path, evidence: Evidence, most: float) -> None:
    undisturbed = await undisturbed_steps(tmp_path / "undisturbed")
    run, failed = await run_batch(tmp_path / "disturbed", {undisturbed // 4: evidence})
    assert (run.num_deaths, failed) == (1, set())
    assert run.num_steps <= most * undisturbed


@pytest.mark.acceptance("A3", "an engine that is killed twice in a batch of 300 lines")
@pytest.mark.parametrize("steps", [pytest.param((5, 10), marks=pytest.mark.full), (20, 50), (39, 41)])
async def test_two_kills_fail_no_line(tmp_path: Path, steps: tuple[int, int]) -> None:
    run, failed = await run_batch(tmp_path, dict.fromkeys(steps, Evidence.WEAK))
    assert (run.num_deaths, failed) == (2, set())


@pytest.mark.acceptance("A3", "two lines of 300 of which every engine dies", count=2)
async def test_culprits_alone_fail_and_are_found_by_halves(tmp_path: Path) -> None:
    run, failed = await run_batch(tmp_path, culprits=frozenset({17, 270}))
    assert failed == {"c17", "c270"}
    assert run.num_deaths <= 2 * (8 + 2)  # log2 of the seats, and the first and the last death
