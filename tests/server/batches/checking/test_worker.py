"""The process that checks files: what it finds is what the validator finds, and it may die of a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import read_plan
from neaptide.server.batches.checking.validate import Check, Checker, CheckerDiedError, FileLimits, Validator
from neaptide.server.batches.checking.worker import NICENESS, CheckerPool, ValidationError, WorkerChecker
from neaptide.server.batches.lines import Recipe
from neaptide.server.batches.storing.models import TERMINAL, BatchRecord, NewLine
from neaptide.server.context import GenerationDefaults
from tests.patience import until
from tests.server.batches.checking.hostile_worker import count
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import CHAT, FakeClock, Server, jsonl, line

LEAST_PRIORITY = 19


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker imports nothing from the working directory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))


def recipe_of(marks: Path) -> Recipe:
    return Recipe(
        tokenizer_dir=str(marks),
        model_id="m",
        created=0,
        max_model_len=1,
        vocab_size=1,
        eos_token_ids=(),
        model_aliases=(),
        generation_defaults=GenerationDefaults(),
        ttft_slo_s=1.0,
        tpot_slo_s=1.0,
    )


def pool_of(worker: "Worker") -> CheckerPool:
    return CheckerPool(lambda: hostile_checker(worker.marks))


def hostile_checker(marks: Path, idle_s: float = 60.0) -> WorkerChecker:
    """The compiler leaves its marks in a directory."""
    return WorkerChecker(recipe_of(marks), idle_s, module="tests.server.batches.checking.hostile_worker")


async def ended(server: Server, batch_id: str) -> BatchRecord:
    """The batch at its end. A worker takes a second to start, more on a machine that has other things to do."""
    return await server.until_terminal(batch_id)


class Worker:
    """A checker, and where its compiler leaves its marks."""

    def __init__(self, directory: Path) -> None:
        self.marks = directory / "marks"
        self.marks.mkdir(exist_ok=True)
        self.data = directory / "data"
        self.checker = hostile_checker(self.marks)

    def count(self, name: str) -> int:
        return count(self.marks, name)

    def server(self, checker: Checker | None = None, clock: FakeClock | None = None) -> Server:
        return Server(self.data, clock=clock, checker=checker or self.checker)

    async def hanging_batch(self, server: Server) -> tuple[BatchRecord, psutil.Process]:
        """A batch in the middle of its validation, some lines of which are stored already, and the process."""
        lines = [line(f"c{i}") for i in range(300)]
        batch = await server.create(jsonl([*lines, line("x", "hang")]))
        await until(lambda: self.count("hang"))
        assert self.checker.pid is not None
        return batch, psutil.Process(self.checker.pid)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def files_of_job(directory: Path) -> list[Path]:
    return list(directory.glob("job.*"))


def number_of_lines(server: Server) -> int:
    def count(conn: Any) -> int:
        found: int = conn.exec_driver_sql("select count(*) from batch_lines").scalar_one()
        return found

    return server.service.store.read_blocking(count)


# ---- alone ----------------------------------------------------------------------------------------------


async def test_it_finds_what_the_validator_finds(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([line(f"c{i}", n=1 + i % 3) for i in range(600)] + [line("hot", temperature=9)]))
    here: list[NewLine] = []
    there: list[NewLine] = []

    async def keep(lines: Sequence[NewLine]) -> None:
        there.extend(lines)

    expected = Validator(
        Check(CHAT, str(path), str(tmp_path / "here"), FileLimits()), FakeCompiler(), here.extend
    ).run()
    checker = hostile_checker(tmp_path)
    try:
        report = await checker.check(Check(CHAT, str(path), str(tmp_path / "there"), FileLimits()), keep)
        assert report == expected
        assert checker.pid is not None
        assert psutil.Process(checker.pid).nice() == min(psutil.Process().nice() + NICENESS, LEAST_PRIORITY)
    finally:
        await checker.close()
    assert checker.pid is None
    assert here[-1].result is not None
    assert there[-1].result is not None
    assert there[:-1] == here[:-1]
    assert (there[-1].custom_id, there[-1].result.body) == ("hot", here[-1].result.body)
    assert read_plan(tmp_path / "there") == read_plan(tmp_path / "here")
    assert TokenFile(tmp_path / "there").prompt(7) == TokenFile(tmp_path / "here").prompt(7)


async def test_what_goes_wrong_in_it_is_told_and_leaves_no_plan(tmp_path: Path) -> None:
    checker = hostile_checker(tmp_path)

    async def keep(lines: Sequence[NewLine]) -> None:
        raise AssertionError("no line is good")

    try:
        for text, error in (("raise", ValidationError), ("eat", ValidationError), ("die", CheckerDiedError)):
            path = tmp_path / f"{text}.jsonl"
            path.write_bytes(jsonl([line("a", text)]))
            with pytest.raises(error) as found:
                await checker.check(Check(CHAT, str(path), str(tmp_path / "job"), FileLimits()), keep)
            assert "secret" not in str(found.value)
            assert not files_of_job(tmp_path)
            assert getattr(found.value, "by_itself", None) == (True if text == "die" else None)
        with pytest.raises(FileNotFoundError):
            await checker.check(Check(CHAT, str(path), str(tmp_path / "nowhere" / "job"), FileLimits()), keep)
    finally:
        await checker.close()


async def test_a_worker_that_was_killed_says_so(tmp_path: Path) -> None:
    checker = WorkerChecker(recipe_of(tmp_path), module="tests.server.batches.checking.killed_worker")

    async def keep(lines: Sequence[NewLine]) -> None:
        raise AssertionError("no line is read")

    with pytest.raises(CheckerDiedError, match="ended with status -9") as found:
        await checker.check(Check(CHAT, str(tmp_path / "input"), str(tmp_path / "job"), FileLimits()), keep)
    assert not found.value.by_itself


async def test_an_idle_worker_ends_and_the_next_file_starts_another(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([line("a")]))
    checker = hostile_checker(tmp_path, idle_s=0.05)

    async def keep(lines: Sequence[NewLine]) -> None:
        pass

    try:
        for _ in range(2):
            report = await checker.check(Check(CHAT, str(path), str(tmp_path / "job"), FileLimits()), keep)
            assert report.errors == []
            await until(lambda: checker.pid is None)
    finally:
        await checker.close()


async def test_a_slice_that_does_not_end_holds_up_its_own_key_only(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.checking.worker.MAX_TURN_S", 0.05)
    async with worker.server(pool_of(worker)) as server:
        hanging = await server.create(jsonl([line("x", "hang")]), owner="one")
        await until(lambda: worker.count("hang"))
        batch = await server.create(jsonl([line("a")]), owner="two")
        await server.until(batch.id, lambda record: record.status == "in_progress", owner="two")
        assert (await server.get(hanging.id, "one")).status == "validating"


# ---- keys by turns --------------------------------------------------------------------------------------


async def test_a_small_file_is_checked_before_the_end_of_another_keys_large_one(worker: Worker) -> None:
    async with worker.server(pool_of(worker)) as server:
        large = await server.create(jsonl(line(f"c{i}", "rest") for i in range(20_000)), owner="one")
        await until(lambda: number_of_lines(server))
        small = await server.create(jsonl(line(f"c{i}") for i in range(200)), owner="two")
        await server.until(small.id, lambda record: record.status == "in_progress", owner="two")
        record = await server.get(large.id, "one")
        assert record.status == "validating"  # it takes minutes
        await server.service.cancel_batch(large.id, "one")


async def test_files_of_one_key_are_checked_one_after_another(worker: Worker) -> None:
    pool = pool_of(worker)
    async with worker.server(pool) as server:
        server.engine.auto = True
        batches = [await server.create(jsonl([line("a")])) for _ in range(3)]
        for batch in batches:
            assert (await ended(server, batch.id)).status == "completed"
        assert len(pool._all) == 1


async def test_a_file_that_kills_its_process_ends_no_other_keys_check(worker: Worker) -> None:
    pool = pool_of(worker)
    async with worker.server(pool) as server:
        server.engine.auto = True
        good = await server.create(jsonl(line(f"c{i}", "rest") for i in range(100)), owner="one")
        await until(lambda: pool._all and pool._all[0].pid is not None)
        pid = pool._all[0].pid
        bad = await server.create(jsonl([line("x", "die")]), owner="two")
        assert (await server.until(bad.id, lambda record: record.status in TERMINAL, owner="two")).status == "failed"
        record = await server.until(good.id, lambda record: record.status in TERMINAL, owner="one")
        assert (record.status, record.num_completed, pool._all[0].pid) == ("completed", 100, pid)
        assert worker.count("die") == 2


# ---- through the service --------------------------------------------------------------------------------


@pytest.mark.acceptance("A1", "the process that checks a batch file dies", count=2)
async def test_a_file_that_kills_the_worker_twice_fails_its_batch_only(worker: Worker) -> None:
    async with worker.server() as server:
        server.engine.auto = True
        batch = await server.create(jsonl([*(line(f"c{i}") for i in range(300)), line("x", "die")]))
        record = await ended(server, batch.id)
        assert record.status == "failed"
        assert record.errors is not None
        assert [(e["code"], e["line"]) for e in record.errors] == [("internal_error", None)]
        assert worker.count("die") == 2
        assert number_of_lines(server) == 0
        assert not list((worker.data / "jobs").iterdir())
        after = await server.create(jsonl([line("a")]))
        assert (await ended(server, after.id)).status == "completed"


@pytest.mark.acceptance("A1", "the process that checks a batch file dies", count=1)
async def test_a_worker_that_dies_once_is_replaced_and_the_batch_runs(worker: Worker) -> None:
    async with worker.server() as server:
        server.engine.auto = True
        batch = await server.create(jsonl([*(line(f"c{i}") for i in range(300)), line("x", "die once")]))
        record = await ended(server, batch.id)
        assert (record.status, record.num_completed) == ("completed", 301)
        assert worker.count("die once") == 1
        assert len(server.results(record)[0]) == 301


@pytest.mark.acceptance("A20", "cancel while the file is checked", count=1)
async def test_cancel_while_validating_kills_the_worker(worker: Worker) -> None:
    async with worker.server() as server:
        batch, process = await worker.hanging_batch(server)
        await server.service.cancel_batch(batch.id, "")
        record = await ended(server, batch.id)
        assert (record.status, record.num_total, record.output_file_id) == ("cancelled", 0, None)
        assert not process.is_running()
        assert number_of_lines(server) == 0
        assert not list((worker.data / "jobs").iterdir())
        assert server.engine.sent == []


async def test_a_batch_that_waits_for_its_validation_is_cancelled_at_once(worker: Worker) -> None:
    async with worker.server() as server:
        first, process = await worker.hanging_batch(server)
        second = await server.create(jsonl([line("a")]))
        await server.service.cancel_batch(second.id, "")
        assert (await ended(server, second.id)).status == "cancelled"
        assert (await server.get(first.id)).status == "validating"
        assert process.is_running()


async def test_expiry_while_validating_kills_the_worker(worker: Worker) -> None:
    clock = FakeClock()
    async with worker.server(clock=clock) as server:
        batch, process = await worker.hanging_batch(server)
        clock.now_s += 25 * 3600
        record = await ended(server, batch.id)
        assert (record.status, record.num_total) == ("expired", 0)
        assert not process.is_running()


async def test_a_restart_while_validating_begins_the_validation_anew(worker: Worker) -> None:
    async with worker.server() as server:
        batch, process = await worker.hanging_batch(server)
    assert not process.is_running()
    async with Server(worker.data) as server:
        server.engine.auto = True
        record = await ended(server, batch.id)
        assert (record.status, record.num_completed) == ("completed", 301)
        assert len(server.results(record)[0]) == 301
