"""An older database is put back beside newer files: results that were shown stay as they were, and work goes on."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from neaptide.server.batches.running import finalize
from neaptide.server.batches.storing.data_dir import DATABASE_NAME
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import Store
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
    shown, content = await completed(data_dir, batch_id)
    shutil.copy(tmp_path / "older", data_dir / DATABASE_NAME)
    caplog.clear()
    caplog.set_level(logging.WARNING)
    again, other = await completed(data_dir, batch_id)
    # Request ids differ, so the bytes do: they need a name of their own.
    assert other != content
    assert again.output_file_id not in (None, shown.output_file_id)
    (aside,) = (data_dir / "moved-aside").rglob(str(shown.output_file_id))
    assert aside.read_bytes() == content
    assert any(str(shown.output_file_id) in text for text in caplog.messages)
    assert any("lacks its last" in text for text in caplog.messages)


async def test_the_name_of_a_result_is_not_used_again_when_everything_is_put_back_as_it_was(tmp_path: Path) -> None:
    batch_id = await half_done(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "older")
    shown, content = await completed(tmp_path / "data", batch_id)
    again, other = await completed(tmp_path / "older", batch_id)
    assert (again.output_file_id == shown.output_file_id) == (other == content)
    assert other != content


@pytest.mark.parametrize("ends", ["cancelled", "expired"])
async def test_nor_of_a_batch_that_is_cut_short(tmp_path: Path, ends: str) -> None:
    async def cut_short(data_dir: Path) -> BatchRecord:
        async with Server(data_dir) as server:
            await server.until_given(batch_id)
            server.engine.answer(batch_id, 3)
            await server.until(batch_id, lambda record: record.num_completed == NUM_LINES // 2 + 3)
            if ends == "cancelled":
                await server.service.cancel_batch(batch_id, "")
            else:
                server.clock.now_s += 90_000
            return await server.until_status(batch_id, ends)

    batch_id = await half_done(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "older")
    first, second = await cut_short(tmp_path / "data"), await cut_short(tmp_path / "older")
    names = [getattr(r, f"{kind}_file_id") for r in (first, second) for kind in ("output", "error")]
    assert None not in names
    assert len(set(names)) == 4


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
async def test_whatever_lies_under_a_planned_name_is_not_written_over(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files, taken = finalize.write_files, []

    def take_its_name(store: Store, record: BatchRecord, directory: Path, *args: Any) -> Any:
        if not taken:
            taken.append(directory / getattr(record, f"planned_{kind}_file_id"))
            taken[0].write_bytes(b"another")
        return write_files(store, record, directory, *args)

    monkeypatch.setattr(finalize, "write_files", take_its_name)
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2) + jsonl([line("refused", temperature=9)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        found, errors = server.results(record)
        assert (sorted(found), sorted(errors)) == (["c0", "c1"], ["refused"])
        assert taken[0].read_bytes() == b"another"
        assert (record.output_file_id, record.error_file_id) == (
            record.planned_output_file_id,
            record.planned_error_file_id,
        )
        assert getattr(record, f"{kind}_file_id") != taken[0].name
    assert not list((tmp_path / "files").glob("*.tmp"))
