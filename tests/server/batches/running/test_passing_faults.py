"""Faults of ours that pass: a file that cannot be read now, an event or results that are dropped. No accepted line ends
of one, and none is forgotten.

Replies to lines that an earlier version checked (without ``stores_replies``) need the input file.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from neaptide.engine.messages import AbortRequest, ToEngine
from neaptide.engine.params import FinishReason
from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.running import job
from tests.patience import until
from tests.server.batches.fakes import Server, jsonl, line, numbered, output


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.state_machine.FIRST_RELOAD_DELAY_S", 0.01)
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.RETRY_DELAY_S", 0.01)


def failing(work: Callable[..., Any], *errors: Exception) -> Callable[..., Any]:
    """The same, which raises these first."""
    left = list(errors)

    def tried(*args: Any, **kwargs: Any) -> Any:
        if left:
            raise left.pop(0)
        return work(*args, **kwargs)

    return tried


async def test_results_are_kept_whatever_becomes_of_what_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl(line(f"c{i}", stop="!") for i in range(8)))
        await server.until_given(batch.id)
        engine, send = server.engine, server.engine.send

        def deaf(message: ToEngine) -> None:
            if isinstance(message, AbortRequest):
                raise RuntimeError("nobody is told")
            send(message)

        monkeypatch.setattr(engine, "send", deaf)
        engine.say([output(batch.id, row, b"x!") for row in range(5)])
        await server.until(batch.id, lambda record: record.num_completed == 5)
        await server.until_given(batch.id, 2)  # taken up anew
        assert engine.added(batch.id)[1] == [5, 6, 7]
        engine.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))


async def test_an_event_that_is_dropped_costs_its_lines_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        batch, other = await server.create(numbered(3)), await server.create(numbered(2))
        for one in (batch, other):
            await server.until_given(one.id)
        monkeypatch.setattr(job.Job, "feed", failing(job.Job.feed, RuntimeError("can't start new thread")))
        server.engine.answer(batch.id, 2)
        await server.until_given(batch.id, 2)
        assert server.engine.added(batch.id)[1] == [0, 1, 2]
        for one in (batch, other):
            server.engine.answer(one.id)
            found, _ = server.results(await server.until_status(one.id, "completed"))
            assert found["c0"]["response"]["body"]["choices"][0]["text"] == "text of c0"[::-1]
        assert len(server.engine.added(other.id)) == 1


async def test_results_that_the_database_refuses_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        store = server.service.store
        monkeypatch.setattr(store, "write_grouped", failing(store.write_grouped, TypeError("what is this?")))
        server.engine.answer(batch.id, 2)
        await server.until_given(batch.id, 2)
        server.engine.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))


async def test_a_batch_that_is_cancelled_while_it_is_taken_up_anew_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.state_machine.FIRST_RELOAD_DELAY_S", 1e6)
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        monkeypatch.setattr(job.Job, "feed", failing(job.Job.feed, RuntimeError("can't start new thread")))
        server.engine.answer(batch.id, 2)
        await until(lambda: batch.id not in server.engine.waiting)
        await server.service.cancel_batch(batch.id, "")
        server.results(await server.until_status(batch.id, "cancelled"))


async def test_lines_whose_input_cannot_be_read_for_a_while_end_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path, stores_replies=False) as server:
        batch = await server.create(jsonl([*(line(f"c{i}", n=2) for i in range(3))]))
        await server.until_given(batch.id)
        errors = [OSError(errno.EMFILE, "too many open files"), OSError(errno.EIO, "I/O error")]
        monkeypatch.setattr(job, "read_body", failing(job.read_body, *errors))
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert len(found) == 3
        assert len(server.engine.added(batch.id)) == 1


async def test_a_batch_whose_input_cannot_be_read_can_be_cancelled_and_the_server_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path, stores_replies=False) as server:
        first, second = await server.create(numbered(2)), await server.create(numbered(2))
        for one in (first, second):
            await server.until_given(one.id)
        monkeypatch.setattr(job, "read_body", failing(job.read_body, *[OSError(errno.EIO, "I/O error")] * 10_000))
        server.engine.answer(first.id)
        await server.service.cancel_batch(first.id, "")
        record = await server.until_status(first.id, "cancelled")
        assert (record.num_completed, record.num_failed) == (0, 0)
        server.engine.answer(second.id)
    monkeypatch.undo()
    async with Server(tmp_path, stores_replies=False) as server:
        server.engine.auto = True
        await server.until_given(second.id)
        server.engine.answer(second.id)
        server.results(await server.until_status(second.id, "completed"))


class Unreadable:
    """The input file of one batch, until ``is_back``."""

    def __init__(self, server: Server, file_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_back = False
        self.num_tried = 0
        path, read_body = server.service.files.path(file_id), job.read_body

        def tried(file: BinaryIO, *where: Any) -> Any:
            if Path(file.name) == path and not self.is_back:
                self.num_tried += 1
                raise OSError(errno.EIO, "I/O error")
            return read_body(file, *where)

        monkeypatch.setattr(job, "read_body", tried)


async def test_a_batch_whose_input_cannot_be_read_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path, stores_replies=False) as server:
        broken, whole = await server.create(numbered(2)), await server.create(numbered(3))
        for one in (broken, whole):
            await server.until_given(one.id)
        file = Unreadable(server, broken.input_file_id, monkeypatch)
        server.engine.say([output(broken.id, 0, b"first half"), output(whole.id, 0, b"first half")])
        server.engine.answer(whole.id)
        server.results(await server.until_status(whole.id, "completed"))
        server.engine.say([output(broken.id, 0, b", second half", FinishReason.STOP)])
        server.engine.waiting[broken.id].remove(0)
        tried = file.num_tried
        await until(lambda: file.num_tried > tried)
        file.is_back = True
        server.engine.answer(broken.id)
        found, _ = server.results(await server.until_status(broken.id, "completed"))
        assert found["c0"]["response"]["body"]["choices"][0]["text"] == "first half, second half"
        assert len(server.engine.added(broken.id)) == 1


async def test_what_a_dead_engine_said_of_a_file_that_could_not_be_read_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path, stores_replies=False) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        file = Unreadable(server, batch.input_file_id, monkeypatch)
        server.engine.say([output(batch.id, 0, b"of the old one")])
        await until(lambda: file.num_tried > 0)
        engine = server.new_engine()
        file.is_back = True
        await server.until_given(batch.id)
        engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert found["c0"]["response"]["body"]["choices"][0]["text"] == "text of c0"[::-1]


async def test_a_batch_of_which_too_much_waits_is_taken_from_the_engine_and_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.MAX_UNFED_OUTPUTS", 2)
    async with Server(tmp_path, stores_replies=False) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        file = Unreadable(server, batch.input_file_id, monkeypatch)
        for piece in (b"a", b"b", b"c", b"d"):
            server.engine.say([output(batch.id, 0, piece)])
        await until(lambda: batch.id not in server.engine.waiting)
        server.service._machine._runner.engine_is_empty()  # as after results that waited for the disk
        other = await server.create(numbered(1))
        await server.until_given(other.id)
        assert len(server.engine.added(batch.id)) == 1
        file.is_back = True
        await server.until_given(batch.id, 2)
        assert server.engine.added(batch.id)[1] == [0, 1]
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert found["c0"]["response"]["body"]["choices"][0]["text"] == "text of c0"[::-1]


async def test_lines_whose_input_is_away_wait_until_it_is_back(tmp_path: Path) -> None:
    async with Server(tmp_path, stores_replies=False) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        path = server.service.files.path(batch.input_file_id)
        path.rename(tmp_path / "away")
        server.engine.answer(batch.id)
        await until(lambda: server.service.storage_failing)
        assert (await server.get(batch.id)).num_failed == 0
        (tmp_path / "away").rename(path)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert len(found) == 3
        await until(lambda: not server.service.storage_failing)


async def test_a_batch_whose_check_fails_for_no_known_reason_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        monkeypatch.setattr(Validation, "run", failing(Validation.run, RuntimeError("a bug")))
        batch = await server.create(numbered(2))
        await until(lambda: batch.id not in server.service._machine._validating)
        await server.service.cancel_batch(batch.id, "")
        server.results(await server.until_status(batch.id, "cancelled"))
