"""Random histories of a batch server: clients, engines, clocks, restarts and crashes in any order.

After every step: states move along legal edges, counts never go back, acknowledged decisions hold. At the
end: every batch is terminal and every custom_id stands exactly once in its files.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from neaptide.server.batches.storing.models import TERMINAL, BatchRecord
from neaptide.server.http.errors import ConflictError
from tests.postgres import PostgresServer
from tests.server.batches.fakes import FakeClock, Server, jsonl, line
from tests.server.batches.invariants import durable_rows

T = TypeVar("T")

LEGAL = {
    "validating": {"validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired"},
    "in_progress": {"in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired"},
    "finalizing": {"finalizing", "completed"},
    "cancelling": {"cancelling", "cancelled"},
    "completed": {"completed"},
    "cancelled": {"cancelled"},
    "expired": {"expired"},
}


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="neaptide-test-"))
        self.lives = 0
        self.clock = FakeClock()
        self.seen: dict[str, BatchRecord] = {}
        self.lines: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.choices: dict[str, int] = {}
        self.executions: Counter[str] = Counter()
        self.durable: set[str] = set()
        """Rows of lines whose result was committed before the present server started."""
        self.crashes = self.restarts = 0
        self.store_url = self.new_database()
        self.server = self.run(self.start(self.root / "0"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def start(self, data_dir: Path) -> Server:
        server = Server(data_dir, clock=self.clock, store_url=self.store_url)
        await server.__aenter__()
        return server

    def leave_engine(self) -> None:
        executed = self.server.engine.executed
        assert not self.durable & set(executed), "a durable result was computed again"
        self.executions.update(executed)
        self.server.engine.executed = []

    def start_again(self, data_dir: Path) -> None:
        self.durable = self.durable_rows(data_dir)
        self.server = self.run(self.start(data_dir))

    @rule(num_lines=st.integers(1, 4), n=st.integers(1, 2), hot=st.booleans())
    def create(self, num_lines: int, n: int, hot: bool) -> None:
        lines = [line(f"c{i}", n=n) for i in range(num_lines)]
        if hot:
            lines.append(line("hot", temperature=9))
        record = self.run(self.server.create(jsonl(lines), completion_window="1h"))
        self.seen[record.id] = record
        self.lines[record.id] = len(lines)
        self.choices[record.id] = n

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), count=st.integers(1, 3))
    def answer(self, data: st.DataObject, count: int) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.seen)))

        async def answer() -> None:
            if batch_id in self.server.engine.waiting:
                self.server.engine.answer(batch_id, count)

        self.run(answer())

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.seen)))
        try:
            assert self.run(self.server.service.cancel_batch(batch_id, "")).status in ("cancelling", "cancelled")
            self.cancelled.add(batch_id)
        except ConflictError:
            assert batch_id not in self.cancelled

    @rule(turns=st.integers(1, 10))
    def let_it_work(self, turns: int) -> None:
        self.run(asyncio.sleep(0.003 * turns))

    @rule(minutes=st.sampled_from([-120, 1, 35, 65]))
    def move_clock(self, minutes: int) -> None:
        self.clock.now_s += 60 * minutes

    @rule()
    def lose_engine(self) -> None:
        async def lose() -> None:
            self.leave_engine()
            self.server.new_engine()

        self.crashes += 1
        self.run(lose())

    @rule()
    def restart(self) -> None:
        self.restarts += 1
        self.run(self.server.__aexit__())
        self.leave_engine()
        self.start_again(self.server.service.settings.data_dir)

    @rule()
    def crash(self) -> None:
        """The directory as a kill -9 between two commits leaves it; the killed server writes into the void."""
        old = self.server
        self.lives += 1
        copy = self.root / str(self.lives)
        if not self.snapshot(copy):
            return
        self.crashes += 1
        self.leave_engine()
        self.run(old.__aexit__())
        self.start_again(copy)

    # ---- what the database decides ----

    def new_database(self) -> str | None:
        """The address of a blank one."""
        return None

    def durable_rows(self, data_dir: Path) -> set[str]:
        return durable_rows(data_dir)

    def snapshot(self, copy: Path) -> bool:
        """What a successor will find; False for a moment of which there is none."""

        def take(conn: object) -> None:
            shutil.copytree(self.server.service.settings.data_dir, copy, ignore_dangling_symlinks=True)

        try:
            self.server.service.store.write_blocking(take)
        except shutil.Error:
            # A file that was renamed under the copy's hands. Try another moment.
            shutil.rmtree(copy)
            return False
        return True

    @invariant()
    def nothing_goes_back(self) -> None:
        for batch_id, before in self.seen.items():
            now = self.run(self.server.get(batch_id))
            assert now.status in LEGAL[before.status], (before.status, now.status)
            assert (now.num_completed, now.num_failed) >= (before.num_completed, 0)
            assert now.num_failed >= before.num_failed
            assert now.num_completed + now.num_failed <= now.num_total
            for name in ("in_progress_at", "finalizing_at", "completed_at", "cancelling_at", "cancelled_at"):
                earlier, later = getattr(before, name), getattr(now, name)
                assert earlier is None or earlier == later
                assert later is None or later >= now.created_at
            if batch_id in self.cancelled:
                assert now.status in ("cancelling", "cancelled")
            self.seen[batch_id] = now

    def teardown(self) -> None:
        async def finish() -> None:
            for batch_id in self.seen:
                self.server.engine.answer(batch_id)
                while (record := await self.server.get(batch_id)).status not in TERMINAL:
                    await asyncio.sleep(0.005)
                    self.server.engine.answer(batch_id)
                found, errors = self.server.results(record)
                if record.in_progress_at is not None:
                    assert len(found) + len(errors) == self.lines[batch_id]

        try:
            self.run(finish())
            self.leave_engine()
            # Only a death can lose a result that was on its way; an orderly restart loses choices of half a line.
            for row, times in self.executions.items():
                losses = self.crashes + (self.restarts if self.choices[row.partition(":")[0]] > 1 else 0)
                assert times <= 1 + losses, f"{row} ran {times} times"
        finally:
            self.run(self.server.__aexit__())
            self.run(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.root)


class HistoryOnPostgres(History):
    """A crash cuts the server off from its database; its successor has a copy."""

    postgres: PostgresServer
    database: str

    def new_database(self) -> str | None:
        self.database = self.postgres.new_database()
        return self.postgres.url(self.database)

    def durable_rows(self, data_dir: Path) -> set[str]:
        query = "SELECT batch_id, first_row, num_rows FROM batch_lines WHERE state IN ('completed', 'failed')"
        with self.postgres.connect(self.database) as connection:
            lines = connection.execute(query).fetchall()
        return {f"{batch_id}:{row}" for batch_id, first, count in lines for row in range(first, first + count)}

    def snapshot(self, copy: Path) -> bool:
        self.postgres.cut_off(self.database)
        while True:
            try:
                shutil.copytree(self.server.service.settings.data_dir, copy)
                break
            except shutil.Error:  # what threads had begun goes on for a moment
                shutil.rmtree(copy)
        self.database = self.postgres.new_database(template=self.database)
        self.store_url = self.postgres.url(self.database)
        return True


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.acceptance("A20", "random histories of creates, cancels, clocks, restarts and crashes", count=6)
@pytest.mark.acceptance("A21", "random histories of creates, cancels, clocks, restarts and crashes", count=6)
def test_random_histories() -> None:
    run_state_machine_as_test(
        History, settings=settings(max_examples=6, stateful_step_count=14, suppress_health_check=CHECKS)
    )


def histories_on(postgres_server: PostgresServer) -> type[History]:
    return type("HistoryOnThisPostgres", (HistoryOnPostgres,), {"postgres": postgres_server})


def test_random_histories_on_postgres(postgres_server: PostgresServer) -> None:
    run_state_machine_as_test(
        histories_on(postgres_server),
        settings=settings(max_examples=2, stateful_step_count=12, suppress_health_check=CHECKS),
    )


@pytest.mark.full
def test_many_random_histories_on_postgres(postgres_server: PostgresServer) -> None:
    run_state_machine_as_test(
        histories_on(postgres_server),
        settings=settings(max_examples=40, stateful_step_count=30, suppress_health_check=CHECKS),
    )


@pytest.mark.full
@pytest.mark.acceptance("A20", "random histories of creates, cancels, clocks, restarts and crashes", count=60)
@pytest.mark.acceptance("A21", "random histories of creates, cancels, clocks, restarts and crashes", count=60)
def test_many_random_histories() -> None:
    run_state_machine_as_test(
        History,
        settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=CHECKS),
    )
