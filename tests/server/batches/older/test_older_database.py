"""An older database is put back beside newer files: results that were shown stay as they were, and work goes on."""

import logging
import shutil
from pathlib import Path

import pytest

from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.data_dir import DATABASE_NAME
from neaptide.server.batches.storing.models import BatchRecord
from tests.server.batches.fakes import Server, jsonl, line, numbered

NUM_LINES = 40


async def half_done(data_dir: Path) -> str:
    """Stopped in mid-batch."""
    async with Server(data_dir) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, NUM_LINES // 2)
        await server.until(batch.id, lambda record: record.num_completed == NUM_LINES // 2)
    return batch.id


async def completed(data_dir: Path, batch_id: str) -> tuple[BatchRecord, bytes]:
    """The batch at its end, after a start; and its output file."""
    server = Server(data_dir)
    server.engine.auto = True
    async with server:
        record = await server.until_terminal(batch_id)
        found, errors = server.results(record)
        assert (len(found), errors) == (NUM_LINES, {})
        return record, server.bytes_of(record.output_file_id)


async def test_a_result_that_was_shown_outlives_an_older_database(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_dir = tmp_path / "data"
    batch_id = await half_done(data_dir)
    shutil.copy(data_dir / DATABASE_NAME, tmp_path / "older")
    shutil.copytree(data_dir / "jobs", tmp_path / "jobs")
    shown, content = await completed(data_dir, batch_id)
    shutil.copy(tmp_path / "older", data_dir / DATABASE_NAME)
    shutil.copytree(tmp_path / "jobs", data_dir / "jobs", dirs_exist_ok=True)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    again, other = await completed(data_dir, batch_id)
    # Request ids differ, so the bytes do: they need a name of their own.
    assert other != content
    assert again.output_file_id not in (None, shown.output_file_id)
    assert (data_dir / "files" / str(shown.output_file_id)).read_bytes() == content
    assert any(str(shown.output_file_id) in text and batch_id in text for text in caplog.messages)
    async with Server(data_dir) as server:
        (aside,) = (data_dir / "moved-aside").rglob(str(shown.output_file_id))
        assert aside.read_bytes() == content
        assert server.bytes_of(again.output_file_id) == other


async def test_files_that_were_published_and_not_committed_keep_their_names(tmp_path: Path) -> None:
    """What a crash in finalizing leaves is the same that finalizing writes again."""
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2) + jsonl([line("refused", temperature=9)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        before = {file_id: server.bytes_of(file_id) for file_id in (record.output_file_id, record.error_file_id)}

        def uncommit(conn: object) -> None:
            execute = conn.exec_driver_sql  # type: ignore[attr-defined]
            execute("update batches set status = 'finalizing', output_file_id = null, error_file_id = null").close()
            execute("delete from files where purpose = 'batch_output'").close()

        await server.service.store.write(uncommit)
    inode = (tmp_path / "files" / str(record.output_file_id)).stat().st_ino
    async with Server(tmp_path) as server:
        again = await server.until_terminal(batch.id)
        assert (again.output_file_id, again.error_file_id) == (record.output_file_id, record.error_file_id)
        assert {file_id: server.bytes_of(file_id) for file_id in before} == before
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == sorted([record.input_file_id, *before])
    assert (tmp_path / "files" / str(record.output_file_id)).stat().st_ino == inode
    assert not (tmp_path / "moved-aside").exists()


@pytest.mark.parametrize("kind", ["output", "error"])
async def test_whatever_lies_under_a_planned_name_is_not_written_over(tmp_path: Path, kind: str) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2) + jsonl([line("refused", temperature=9)]))
        await server.until_given(batch.id)
        taken = getattr(batch, f"planned_{kind}_file_id")
        (tmp_path / "files" / taken).write_bytes(b"another")
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        found, errors = server.results(record)
        assert (sorted(found), sorted(errors)) == (["c0", "c1"], ["refused"])
        assert (tmp_path / "files" / taken).read_bytes() == b"another"
        # Durable before the file has it: a crash in between leaves no file that nobody knows.
        planned = await server.service.store.read(batch_rows.require_batch, batch.id)
        assert (planned.output_file_id, planned.error_file_id) == (
            planned.planned_output_file_id,
            planned.planned_error_file_id,
        )
        assert getattr(planned, f"{kind}_file_id") != taken
    assert not list((tmp_path / "files").glob("*.tmp"))
