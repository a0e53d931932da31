"""What goes in the course of time, and what has to stay."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from neaptide.durations import DAY_S
from neaptide.engine.messages import AddBatch
from neaptide.server.batches.running import expiry
from neaptide.server.batches.storing import housekeeping
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import batch_lines, deleted_files, idempotency_keys
from neaptide.server.http.errors import ConflictError, InvalidRequestError
from tests.server.batches.fakes import CHAT, FakeClock, Server, jsonl, line, numbered

FORM = UploadForm("input.jsonl", "batch")
BODY = {"endpoint": CHAT, "completion_window": "24h"}


async def count(server: Server, table: sa.Table) -> int:
    return await server.service.store.read(
        lambda conn: conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    )


async def ended(server: Server, content: bytes) -> tuple[str | None, str | None]:
    """Output and error file of a batch that has run."""
    batch = await server.create(content)
    await server.until_given(batch.id)
    server.engine.answer(batch.id)
    record = await server.until_terminal(batch.id)
    return record.output_file_id, record.error_file_id


# ---- results ---------------------------------------------------------------------------------------------


async def test_results_go_with_the_file_that_they_were_made_into(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        output, error = await ended(server, jsonl([line("a"), line("b"), line("hot", temperature=9)]))
        assert output is not None
        assert error is not None
        await server.keep_house()
        assert await count(server, batch_lines) == 3
        await server.service.files.delete(output, "")
        await server.keep_house()
        assert await count(server, batch_lines) == 1
        await server.service.files.delete(error, "")
        await server.keep_house()
        assert await count(server, batch_lines) == 0
        (record,), _ = await server.service.list_batches("", 9, None)
        assert (record.num_total, record.num_completed, record.num_failed) == (3, 2, 1)


async def test_results_of_expired_files_go(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        await ended(server, numbered(2))
        clock.now_s += 30 * DAY_S + 1
        await server.keep_house()
        assert await count(server, batch_lines) == 0
        assert list((tmp_path / "files").iterdir()) == []


async def test_files_that_have_not_expired_stay(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        await server.upload(b"old\n")
        clock.now_s += 60
        kept = await server.upload(b"new\n")
        clock.now_s += 30 * DAY_S - 59
        await server.keep_house()
        assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]


async def test_many_results_go_in_small_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "LINES_A_WRITE", 2)
    async with Server(tmp_path) as server:
        output, _ = await ended(server, numbered(5))
        assert output is not None
        await server.service.files.delete(output, "")
        before = server.service.store.num_commits
        await server.keep_house()
        assert await count(server, batch_lines) == 0
        # Three with lines, one that finds none, and one each for expiry, the mark, old deletions and old keys.
        assert server.service.store.num_commits - before >= 8


async def test_bytes_that_the_disk_kept_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server:
        file_id = (await server.upload(b"x\n")).id
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", _refuse)
            await server.service.files.delete(file_id, "")
            await server.keep_house()
        assert (tmp_path / "files" / file_id).exists()
        await server.keep_house()
        assert not (tmp_path / "files" / file_id).exists()


def _refuse(path: Path, missing_ok: bool = False) -> None:
    raise OSError(5, "Input/output error")


def test_results_that_an_earlier_version_left_behind_are_swept(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'neaptide.db'}")
    scripts = Path(housekeeping.__file__).with_name("migrations")
    with engine.begin() as conn:
        config = Config()
        config.set_main_option("script_location", str(scripts))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        command.upgrade(config, "0002")
        conn.execute(
            sa.text(
                "INSERT INTO batches (id, owner, salt, endpoint, input_file_id, completion_window, status,"
                " planned_output_file_id, planned_error_file_id, output_file_id, created_at, expires_at)"
                " VALUES ('batch_1', 'me', '', 'e', 'file-i', '24h', 'completed', 'file-o', 'file-e', 'file-o', 1, 2)"
            )
        )
    engine.dispose()
    store = Store(tmp_path)
    store.open()
    found = store.read_blocking(lambda conn: conn.execute(sa.select(deleted_files)).all())
    store.close()
    assert [tuple(row) for row in found] == [("file-o", "me", 0, 0, False, None)]


# ---- places in lists -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ascending", [False, True])
async def test_paging_goes_on_where_the_cursor_was_deleted(tmp_path: Path, ascending: bool) -> None:
    async with Server(tmp_path) as server:
        ids = [(await server.upload(b"x\n")).id for _ in range(4)]
        files = server.service.files
        await files.delete(ids[1], "")
        await server.keep_house()
        page, more = await files.list_page("", purpose=None, limit=9, after=ids[1], ascending=ascending)
        assert [record.id for record in page] == (ids[2:] if ascending else ids[:1])
        assert not more


async def test_another_owners_deleted_file_is_no_place(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        theirs = await server.upload(b"x\n", owner="them")
        await server.service.files.delete(theirs.id, "them")
        with pytest.raises(InvalidRequestError):
            await server.service.files.list_page("me", purpose=None, limit=9, after=theirs.id, ascending=True)


async def test_deleted_files_are_forgotten_after_a_week(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        await server.service.files.delete((await server.upload(b"x\n")).id, "")
        await server.keep_house()
        clock.now_s += 7 * DAY_S
        await server.keep_house()
        assert await count(server, deleted_files) == 1
        clock.now_s += 1
        await server.keep_house()
        assert await count(server, deleted_files) == 0


# ---- idempotency keys ------------------------------------------------------------------------------------


async def upload(server: Server, content: bytes, form: UploadForm = FORM) -> str:
    async with server.service.files.upload() as part:
        await part.write(content)
        return (await server.service.files.commit(part, form, "", "key")).id


async def test_an_idempotency_key_holds_for_a_week(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        file_id = await upload(server, b"a\n")
        batch = await server.service.create_batch("", {"input_file_id": file_id, **BODY}, idempotency_key="key")
        clock.now_s += 7 * DAY_S
        await server.keep_house()
        assert await upload(server, b"a\n") == file_id
        assert await count(server, idempotency_keys) == 2
        clock.now_s += 1
        await server.keep_house()
        assert await count(server, idempotency_keys) == 0
        assert await upload(server, b"b\n") != file_id
        assert (await server.get(batch.id)).id == batch.id


async def test_a_batch_is_made_again_with_a_key_that_is_forgotten(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        body = {"input_file_id": (await server.upload(numbered(1))).id, **BODY}
        first = (await server.service.create_batch("", body, idempotency_key="key")).id
        clock.now_s += 7 * DAY_S - 60
        await server.keep_house()
        assert (await server.service.create_batch("", body, idempotency_key="key")).id == first
        clock.now_s += 120
        await server.keep_house()
        assert (await server.service.create_batch("", body, idempotency_key="key")).id != first


@pytest.mark.parametrize(
    "form",
    [
        UploadForm("other.jsonl", "batch"),
        UploadForm("input.jsonl", "user_data"),
        UploadForm("input.jsonl", "batch", 3600),
    ],
)
async def test_an_idempotency_key_stands_for_the_whole_upload(tmp_path: Path, form: UploadForm) -> None:
    async with Server(tmp_path) as server:
        await upload(server, b"a\n")
        with pytest.raises(ConflictError):
            await upload(server, b"a\n", form)


# ---- when ------------------------------------------------------------------------------------------------


async def test_the_server_keeps_house_at_start_and_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        first = (await server.upload(b"x\n")).id
    clock.now_s += 30 * DAY_S + 1
    monkeypatch.setattr(expiry, "SWEEP_PERIOD_S", 0.04)
    async with Server(tmp_path, clock=clock) as server:
        await server.until_gone(first)
        second = (await server.upload(b"x\n")).id
        clock.now_s += 30 * DAY_S + 1
        await server.until_gone(second)


# ---- what survives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [b"", b"\x00tenant\xff"])
async def test_the_owners_cache_salt_goes_with_the_rows_and_survives_a_restart(tmp_path: Path, salt: bytes) -> None:
    async with Server(tmp_path) as server:
        body = {"input_file_id": (await server.upload(numbered(2))).id, **BODY}
        batch = await server.service.create_batch("", body, salt=salt)
        await server.until_given(batch.id)
    async with Server(tmp_path) as again:
        await again.until_given(batch.id)
    for engine in (server.engine, again.engine):
        assert [message.salt for message in engine.sent if isinstance(message, AddBatch)] == [salt]
