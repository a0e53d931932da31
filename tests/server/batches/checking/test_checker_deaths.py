"""The process that checks a file may die of it, or be killed for reasons of others."""

import asyncio
from pathlib import Path

import pytest

from neaptide.server.batches.checking.validate import Check, CheckerDiedError, Keep, Report
from neaptide.server.batches.storing.models import BatchRecord
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import Server, ThreadChecker, numbered

VALIDATION = "neaptide.server.batches.checking.validation"


class MortalChecker(ThreadChecker):
    """Dies at its first tries, behind the first lines: by itself where the plan says so, else killed."""

    def __init__(self, *deaths_by_itself: bool) -> None:
        super().__init__(FakeCompiler())
        self._deaths = list(deaths_by_itself)
        self.checked: list[str] = []

    async def check(self, check: Check, keep: Keep) -> Report:
        report = await super().check(check, keep)
        self.checked.append(Path(check.stem).name)
        if self._deaths:
            raise CheckerDiedError("gone", by_itself=self._deaths.pop(0))
        return report


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{VALIDATION}.FIRST_DELAY_S", 0.0)


async def ended(directory: Path, checker: MortalChecker) -> BatchRecord:
    async with Server(directory, checker=checker) as server:
        server.engine.auto = True
        batch = await server.create(numbered(3))
        record = await server.until_terminal(batch.id)
        assert record.status == "failed" or len(server.results(record)[0]) == 3
        return record


@pytest.mark.acceptance("A1", "the process that checks a batch file is killed", count=20)
async def test_kills_never_fail_a_batch(tmp_path: Path, no_delay: None) -> None:
    checker = MortalChecker(*[False] * 20)
    assert (await ended(tmp_path, checker)).status == "completed"
    assert len(checker.checked) == 21


async def test_two_deaths_by_itself_fail_the_batch_whatever_kills_are_between(tmp_path: Path, no_delay: None) -> None:
    record = await ended(tmp_path, MortalChecker(False, True, False, True))
    assert (record.status, record.num_total) == ("failed", 0)
    assert [error["code"] for error in record.errors or ()] == ["internal_error"]


async def test_other_files_are_checked_while_one_waits_for_its_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{VALIDATION}.FIRST_DELAY_S", 60.0)
    checker = MortalChecker(False)
    async with Server(tmp_path, checker=checker) as server:
        first, second = [await server.create(numbered(3)) for _ in range(2)]
        await server.until_status(second.id, "in_progress")
        assert (await server.get(first.id)).status == "validating"
        await server.service.cancel_batch(first.id, "")
        await server.until_status(first.id, "cancelled")


async def test_it_waits_longer_after_every_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        if delay_s >= 1.0:
            delays.append(delay_s)
            delay_s = 0.0
        await sleep(delay_s)

    monkeypatch.setattr(f"{VALIDATION}.asyncio.sleep", note)
    await ended(tmp_path, MortalChecker(*[False] * 8))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
