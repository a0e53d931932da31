"""The process that checks a file may die of it, or be killed for reasons of others."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from neaptide.server.batches.checking import worker
from neaptide.server.batches.checking.validate import (
    MAX_TRIES,
    Check,
    CheckerDiedError,
    CheckReport,
    FileLimits,
    Keep,
    Validator,
)
from neaptide.server.batches.checking.worker import WorkerChecker
from neaptide.server.batches.lines import CompiledLine, Recipe
from neaptide.server.batches.storing.models import BatchRecord, NewLine
from neaptide.server.http.errors import UnavailableError
from neaptide.server.subprocesses.frames import read_frame
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import CHAT, Server, ThreadChecker, jsonl, line, numbered

VALIDATION = "neaptide.server.batches.checking.validation"


class MortalChecker(ThreadChecker):
    """Dies at its first tries, behind the first lines: by itself where the plan says so, else killed. None: it lives,
    and the machine is too busy."""

    def __init__(self, *deaths_by_itself: bool | None) -> None:
        super().__init__(FakeCompiler())
        self._deaths = list(deaths_by_itself)
        self.checked: list[str] = []

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        report = await super().check(check, keep)
        self.checked.append(Path(check.stem).name)
        if self._deaths:
            by_itself = self._deaths.pop(0)
            raise UnavailableError("busy") if by_itself is None else CheckerDiedError("gone", by_itself=by_itself)
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


async def test_a_busy_machine_never_fails_a_batch(tmp_path: Path, no_delay: None) -> None:
    checker = MortalChecker(*[None] * 5)
    assert (await ended(tmp_path, checker)).status == "completed"
    assert len(checker.checked) == 6


class BusyCompiler(FakeCompiler):
    """Too busy for so many tries of the lines that have a schema."""

    def __init__(self, num_tries: int) -> None:
        super().__init__()
        self._num_left = num_tries

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        if "response_format" in body and self._num_left:
            self._num_left -= 1
            raise UnavailableError("The grammar could not be checked in time.")
        return super().compile(endpoint, body)


def two_lines(directory: Path) -> Check:
    path = directory / "input.jsonl"
    path.write_bytes(jsonl([line("a"), line("b", response_format={"type": "json_object"})]))
    return Check(CHAT, str(path), str(directory / "job"), FileLimits())


def test_a_line_that_meets_a_busy_machine_is_tried_again_and_then_the_file_has_to_wait(tmp_path: Path) -> None:
    check = two_lines(tmp_path)
    kept: list[NewLine] = []
    Validator(check, BusyCompiler(MAX_TRIES - 1), kept.extend).run()
    assert [(one.num_rows, one.result) for one in kept] == [(1, None), (1, None)]
    with pytest.raises(UnavailableError):
        Validator(replace(check, stem=str(tmp_path / "other")), BusyCompiler(MAX_TRIES), kept.extend).run()
    assert not list(tmp_path.glob("other*"))


async def test_the_process_that_checks_says_so(tmp_path: Path) -> None:
    check, said = two_lines(tmp_path), io.BytesIO()
    worker._check(check, BusyCompiler(MAX_TRIES), said)
    checker = WorkerChecker(Recipe(**dict.fromkeys(Recipe.__struct_fields__)))  # type: ignore[arg-type]
    child = checker._child = AsyncMock()  # type: ignore[assignment]
    child.wake.return_value = False
    child.send = child.rest = lambda *_: None
    child.receive.return_value = read_frame(io.BytesIO(said.getvalue()))
    with pytest.raises(UnavailableError, match="in time"):
        await checker.check(check, AsyncMock())
    assert child.close.called


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

    # In that module alone: others rest, too.
    monkeypatch.setattr(f"{VALIDATION}.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": note}))
    await ended(tmp_path, MortalChecker(*[False] * 8))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
