"""The state machine with a fake engine behind the real EngineClient."""

import asyncio
from pathlib import Path

import pytest

from neaptide.engine.params import FinishReason
from neaptide.server.batches.objects import batch_object
from neaptide.server.batches.storing import batch_rows, cost_rows
from neaptide.server.batches.storing.models import NewLine
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.http.errors import ConflictError, NotFoundError
from tests.server.batches.fake_compiler import FakeAssembler
from tests.server.batches.fakes import FakeClock, Server, jsonl, line, numbered, output


async def test_a_batch_runs_to_its_end_in_input_order(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.engine.auto = True
        batch = await server.create(numbered(5), metadata={"k": "v"})
        record = await server.until_status(batch.id, "completed")
        found, errors = server.results(record)
        assert list(found) == [f"c{i}" for i in range(5)]
        assert errors == {}
        assert found["c3"]["response"]["status_code"] == 200
        assert found["c3"]["response"]["body"]["choices"][0]["text"] == "text of c3"[::-1]
        assert found["c3"]["error"] is None
        shown = batch_object(record, server.service.outlooks)
        assert shown["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert shown["usage"]["input_tokens"] == shown["usage"]["output_tokens"] == 50
        assert shown["usage"]["input_tokens_details"]["cached_tokens"] == 5
        assert shown["metadata"] == {"k": "v"}
    assert not list((tmp_path / "jobs").iterdir())


async def test_refused_bodies_fail_alone_and_at_once(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("hot", temperature=9), line("fine")]))
        await server.until_given(batch.id)
        assert (await server.get(batch.id)).num_failed == 1
        assert server.engine.added(batch.id) == [[0]]
        server.engine.answer(batch.id)
        found, errors = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["fine"]
        response = errors["hot"]["response"]
        assert response["status_code"] == 400
        assert response["body"]["error"]["param"] == "temperature"
        assert errors["hot"]["error"] is None


async def test_a_batch_of_refused_bodies_completes_without_an_output_file(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a", temperature=9)]))
        record = await server.until_status(batch.id, "completed")
        assert record.output_file_id is None
        assert list(server.results(record)[1]) == ["a"]
        assert server.engine.sent == []


async def test_choices_are_rows_of_one_line(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("three", "abc", n=3), line("one", "xyz")]))
        await server.until_given(batch.id)
        assert server.engine.added(batch.id) == [[0, 1, 2, 3]]
        server.engine.answer(batch.id, 2)
        await asyncio.sleep(0.05)
        assert (await server.get(batch.id)).num_completed == 0
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert [choice["text"] for choice in found["three"]["response"]["body"]["choices"]] == ["cba"] * 3


async def test_a_stop_string_ends_the_row_in_the_engine(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a", stop="!"), line("b")]))
        await server.until_given(batch.id)
        assert [m.stream_rows for m in server.engine.sent if hasattr(m, "stream_rows")] == [[0]]
        server.engine.say([output(batch.id, 0, b"hi")])
        server.engine.say([output(batch.id, 0, b"!")])
        await server.until(batch.id, lambda record: record.num_completed == 1)
        assert server.engine.aborted() == [f"{batch.id}:0"]
        server.engine.say([output(batch.id, 0, b"late", FinishReason.STOP)])
        server.engine.waiting[batch.id] = [1]
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert found["a"]["response"]["body"]["choices"][0]["text"] == "hi!"


async def test_an_engine_error_fails_its_line_only(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a", n=2), line("b"), line("c", "edolpxe")]))
        await server.until_given(batch.id)
        server.engine.say([output(batch.id, 0, [], FinishReason.ERROR, "secret /path")])
        await server.until(batch.id, lambda record: record.num_failed == 1)
        assert server.engine.aborted() == [f"{batch.id}:1"]
        server.engine.waiting[batch.id] = [2, 3]
        server.engine.answer(batch.id)
        found, errors = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["b"]
        assert {errors[key]["response"]["status_code"] for key in errors} == {500}
        assert "secret" not in str(errors)


async def test_the_other_choices_of_a_failed_line_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeAssembler, choice_index: int, output: object) -> None:
        raise RuntimeError("a bug in the assembler")

    monkeypatch.setattr(FakeAssembler, "feed", broken)
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a", n=3)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        await server.until_status(batch.id, "completed")
        assert server.engine.aborted() == [f"{batch.id}:1", f"{batch.id}:2"]


async def test_result_files_live_as_long_as_was_asked(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        expiry = {"anchor": "created_at", "seconds": 7200}
        batch = await server.create(jsonl([line("a"), line("hot", temperature=9)]), output_expires_after=expiry)
        default = await server.create(numbered(1))
        for batch_id in (batch.id, default.id):
            await server.until_given(batch_id)
        clock.now_s += 500
        lives = []
        for batch_id in (batch.id, default.id):
            server.engine.answer(batch_id)
            record = await server.until_status(batch_id, "completed")
            for file_id in filter(None, (record.output_file_id, record.error_file_id)):
                file = await server.service.files.get(file_id, "")
                assert file.created_at == int(clock.now_s)
                assert file.expires_at is not None
                lives.append(file.expires_at - file.created_at)
        assert lives == [7200, 7200, 30 * 86_400]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x1e"])
async def test_readers_that_split_at_any_line_end_see_whole_lines(tmp_path: Path, end: str) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line(f"a{end}b", f"x{end}y"), line(f"hot{end}", temperature=9)]))
        await server.until_given(batch.id)
        # The fake engine makes characters of tokens, and knows bytes only.
        server.engine.say([output(batch.id, 0, map(ord, f"y{end}x"), FinishReason.STOP)])
        record = await server.until_status(batch.id, "completed")
        found, errors = server.results(record)  # split with str.splitlines
        assert found[f"a{end}b"]["response"]["body"]["choices"][0]["text"] == f"y{end}x"
        assert list(errors) == [f"hot{end}"]
        assert server.bytes_of(record.output_file_id).count(b"\n") == 1


async def test_a_restart_runs_a_half_answered_line_again_with_all_its_choices(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("c0", n=2), line("c1", n=2)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 3)
    assert server.engine.executed == [f"{batch.id}:{row}" for row in range(3)]
    async with Server(tmp_path) as again:
        await again.until_given(batch.id)
        assert again.engine.added(batch.id) == [[2, 3]]
        again.engine.answer(batch.id)
        found, _ = again.results(await again.until_status(batch.id, "completed"))
        assert [len(entry["response"]["body"]["choices"]) for entry in found.values()] == [2, 2]


async def test_a_restart_runs_only_what_is_left(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line(f"c{i}", n=2) for i in range(4)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 5)  # two lines and one choice of the third
    async with Server(tmp_path) as again:
        assert (await again.get(batch.id)).num_completed == 2
        await again.until_given(batch.id)
        assert again.engine.added(batch.id) == [[4, 5, 6, 7]]
        again.engine.answer(batch.id)
        found, _ = again.results(await again.until_status(batch.id, "completed"))
        assert list(found) == [f"c{i}" for i in range(4)]


async def test_a_restart_validates_again_what_had_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server:
        gate = asyncio.Event()
        monkeypatch.setattr(server.service._machine, "begin", lambda record: gate.set())
        batch = await server.create(numbered(3))
        await gate.wait()
        # What an interrupted validation leaves behind.
        lines = [NewLine(1, "c0", 0, 10, 0, 1)]
        await server.service.store.write(batch_rows.insert_lines, batch.id, lines)
    async with Server(tmp_path) as again:
        again.engine.auto = True
        again.results(await again.until_status(batch.id, "completed"))


@pytest.mark.acceptance("A22", "restart with another model in the middle of a batch")
async def test_another_model_does_not_answer_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves the batches as they are, whether they were being run or had not been checked; theirs ends them."""
    async with Server(tmp_path) as server:
        running = await server.create(numbered(3))
        await server.until_given(running.id)
        server.engine.answer(running.id, 1)
        with monkeypatch.context() as stopping:
            stopping.setattr(server.service._machine, "begin", lambda record: None)
            unchecked = await server.create(numbered(2))
    why = "No server has the model 'm' for which the batch was made."
    async with Server(tmp_path, fingerprint="another") as wrong:
        assert caplog.messages.count(f"batches that wait for another server: 2. {why}") == 1
        own = await wrong.create(numbered(1))
        await wrong.until_given(own.id)
        wrong.engine.answer(own.id)
        await wrong.until_status(own.id, "completed")
        shown = await wrong.service.shown(await wrong.get(running.id), await wrong.get(unchecked.id))
        assert [one["status"] for one in shown] == ["in_progress", "validating"]
        assert [one["neaptide"] and one["neaptide"]["waits_for"] for one in shown] == [why, why]
        assert shown[0]["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
        assert wrong.engine.executed == [f"{own.id}:0"]
    async with Server(tmp_path) as again:
        again.engine.auto = True
        found, errors = again.results(await again.until_status(running.id, "completed"))
        assert (list(found), errors) == (["c0", "c1", "c2"], {})
        assert (await again.until_status(unchecked.id, "completed")).num_completed == 2
        assert (await again.service.shown(await again.get(running.id)))[0]["neaptide"] is None


async def test_a_batch_whose_model_does_not_come_expires_and_says_for_what_it_waited(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        batch = await server.create(numbered(3), completion_window="1h")
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
    clock.now_s += 3601
    async with Server(tmp_path, clock=clock, fingerprint="another") as wrong:
        record = await wrong.until_status(batch.id, "expired")
        found, errors = wrong.results(record)
    assert list(found) == ["c0"]
    assert {(entry["error"]["code"], entry["error"]["message"]) for entry in errors.values()} == {
        (
            "batch_expired",
            "This request could not be executed before the completion window expired. "
            "No server has the model 'm' for which the batch was made.",
        )
    }


async def test_lines_that_a_restarted_server_is_too_short_for_wait_for_a_longer_one(tmp_path: Path) -> None:
    lines = jsonl([line("short", "four"), line("long", "x" * 100), line("wordy", "four", max_tokens=100)])
    async with Server(tmp_path, max_model_len=1000, engine=False) as server:
        batch = await server.create(lines)
        await server.until_status(batch.id, "in_progress")
    async with Server(tmp_path, max_model_len=50) as short:
        await short.until_given(batch.id)
        assert short.engine.added(batch.id) == [[0]]
        short.engine.answer(batch.id)
        record = await short.until(batch.id, lambda record: record.num_completed == 1)
        assert record.status == "in_progress"
    async with Server(tmp_path, max_model_len=1000) as long:
        long.engine.auto = True
        found, errors = long.results(await long.until_status(batch.id, "completed"))
        assert (list(found), errors) == (["short", "long", "wordy"], {})


async def test_a_line_that_no_server_has_the_context_for_fails_at_the_check(tmp_path: Path) -> None:
    async with Server(tmp_path, max_model_len=50) as server:
        server.engine.auto = True
        batch = await server.create(jsonl([line("short", "four"), line("long", "x" * 100)]))
        found, errors = server.results(await server.until_status(batch.id, "completed"))
    assert list(found) == ["short"]
    assert errors["long"]["response"]["status_code"] == 400


async def test_counts_never_run_ahead_and_never_go_back(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(40))
        await server.until_given(batch.id)
        seen = []
        for _ in range(20):
            server.engine.answer(batch.id, 2)
            record = await server.get(batch.id)
            durable = await server.service.store.read(batch_rows.ended_lines, batch.id, 0, 100)
            assert record.num_completed <= sum(entry.state == "completed" for entry in durable)
            seen.append(record.num_completed)
            await asyncio.sleep(0.01)
        assert seen == sorted(seen)
        assert (await server.until_status(batch.id, "completed")).num_completed == 40


# ---- cancel ---------------------------------------------------------------------------------------------


@pytest.mark.acceptance("A20", "cancel while running, twice")
async def test_cancel_keeps_what_is_done(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(5))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 2)
        record = await server.service.cancel_batch(batch.id, "")
        assert record.status == "cancelling"
        assert record.cancelling_at is not None
        record = await server.until_status(batch.id, "cancelled")
        assert (record.num_total, record.num_completed, record.num_failed) == (5, 2, 0)
        found, errors = server.results(record)
        assert list(found) == ["c0", "c1"]
        assert {entry["error"]["code"] for entry in errors.values()} == {"batch_cancelled"}
        assert all(entry["response"] is None for entry in errors.values())
        assert batch.id not in server.engine.waiting
        again = await server.service.cancel_batch(batch.id, "")
        assert again == record


@pytest.mark.acceptance("A20", "cancel while validating")
async def test_cancel_while_validating(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2000))
        assert (await server.service.cancel_batch(batch.id, "")).status in ("cancelling", "cancelled")
        record = await server.until_status(batch.id, "cancelled")
        server.results(record)
        assert server.engine.sent == []
    assert not list((tmp_path / "jobs").iterdir())


@pytest.mark.acceptance("A20", "cancel after the end")
async def test_cancel_of_an_ended_batch_is_a_conflict(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.engine.auto = True
        batch = await server.create(numbered(1))
        record = await server.until_status(batch.id, "completed")
        with pytest.raises(ConflictError, match="'completed'") as error:
            await server.service.cancel_batch(batch.id, "")
        assert error.value.headers["x-should-retry"] == "false"
        assert await server.get(batch.id) == record
        with pytest.raises(NotFoundError):
            await server.service.cancel_batch(batch.id, "somebody else")


@pytest.mark.acceptance("A20", "cancel after every few turns of the event loop", count=24)
async def test_cancel_races_every_moment_of_a_short_batch(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        server.engine.auto = True
        ids = []
        for turns in range(24):
            batch = await server.create(numbered(2))
            for _ in range(turns * 5):
                await asyncio.sleep(0)
            try:
                assert (await server.service.cancel_batch(batch.id, "")).status in ("cancelling", "cancelled")
                ids.append((batch.id, "cancelled"))
            except ConflictError:
                ids.append((batch.id, "completed"))
        for batch_id, status in ids:
            server.results(await server.until_status(batch_id, status))


@pytest.mark.acceptance("A20", "restart between a cancel and its end")
async def test_cancelling_is_finished_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(4))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        await server.until(batch.id, lambda record: record.num_completed == 1)
        monkeypatch.setattr(server.service._machine, "end", lambda batch_id: None)
        await server.service.cancel_batch(batch.id, "")
    async with Server(tmp_path) as again:
        found, errors = again.results(await again.until_status(batch.id, "cancelled"))
        assert (len(found), len(errors)) == (1, 3)
        assert again.engine.sent == []


# ---- expiry ---------------------------------------------------------------------------------------------


@pytest.mark.acceptance("A21", "two hours back, over the window, 25 hours back")
async def test_expiry_keeps_what_is_done_and_stays_when_the_clock_steps_back(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        batch = await server.create(numbered(3), completion_window="1h")
        assert batch.expires_at == batch.created_at + 3600
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        await server.until(batch.id, lambda record: record.num_completed == 1)
        clock.now_s -= 7200
        await asyncio.sleep(0.05)
        assert (await server.get(batch.id)).status == "in_progress"
        clock.now_s += 7200 + 3600
        record = await server.until_status(batch.id, "expired")
        assert (record.num_total, record.num_completed, record.num_failed) == (3, 1, 0)
        clock.now_s -= 25 * 3600
        found, errors = server.results(record)
        assert list(found) == ["c0"]
        assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}
        assert record.expired_at is not None
        assert record.expired_at >= record.expires_at
        with pytest.raises(ConflictError, match="'expired'"):
            await server.service.cancel_batch(batch.id, "")


@pytest.mark.acceptance("A21", "25 hours forward while the server is down")
async def test_overdue_batches_expire_at_start(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
    clock.now_s += 25 * 3600
    async with Server(tmp_path, clock=clock) as again:
        server.results(await again.until_status(batch.id, "expired"))


@pytest.mark.acceptance("A21", "deadlines on the monotonic clock")
async def test_the_engine_is_told_the_deadline_on_its_own_clock(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        batch = await server.create(numbered(1))
        await server.until_given(batch.id)
        deadlines = [m.deadline_s for m in server.engine.sent if hasattr(m, "deadline_s")]
        assert deadlines == [clock.clocks().monotonic() + 86_400]


# ---- faults ---------------------------------------------------------------------------------------------


async def test_finalizing_twice_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        write = server.service.store.write
        crashed = asyncio.Event()

        async def crash_before_the_last_commit(operation: object, *args: object, **kwargs: object) -> object:
            if operation is cost_rows.finish_batch:
                crashed.set()
                await asyncio.Event().wait()
            return await write(operation, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(server.service.store, "write", crash_before_the_last_commit)
        batch = await server.create(jsonl([line("a"), line("hot", temperature=9), line("b")]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await crashed.wait()
        record = await server.get(batch.id)
        assert record.status == "finalizing"
        assert record.output_file_id is None
        before = [server.bytes_of(i) for i in (record.planned_output_file_id, record.planned_error_file_id)]
        assert all(before)
        for task in list(server.service._machine._background._tasks):
            if task.get_coro().cr_frame is not None and not task.done():  # type: ignore[union-attr]
                task.cancel()
        await asyncio.gather(*server.service._machine._background._tasks, return_exceptions=True)
    clock.now_s += 600
    async with Server(tmp_path, clock=clock) as again:
        record = await again.until_status(batch.id, "completed")
        assert record.output_file_id == record.planned_output_file_id
        assert [again.bytes_of(i) for i in (record.output_file_id, record.error_file_id)] == before
        again.results(record)


async def test_results_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.RETRY_DELAY_S", 0.01)
    async with Server(tmp_path) as server:
        write, full = server.service.store.write_grouped, True

        async def write_grouped(operation: object, rows: int) -> object:
            if full:
                raise StoreUnavailableError("database or disk is full")
            return await write(operation, rows)  # type: ignore[arg-type]

        monkeypatch.setattr(server.service.store, "write_grouped", write_grouped)
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await asyncio.sleep(0.05)
        assert (await server.get(batch.id)).num_completed == 0
        full = False
        server.results(await server.until_status(batch.id, "completed"))
        assert len(server.engine.executed) == 3


async def test_an_input_file_whose_row_was_dropped_fails_the_lines_not_the_server(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        await server.service.store.write(lambda conn: conn.exec_driver_sql("delete from files").close())
    async with Server(tmp_path) as again:
        _, errors = again.results(await again.until_status(batch.id, "completed"))
        assert {entry["error"]["code"] for entry in errors.values()} == {"input_file_lost"}
