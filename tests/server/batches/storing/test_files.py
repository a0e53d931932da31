"""Files on disk: nothing torn, nothing orphaned, no other owner's."""

import asyncio
import threading
from pathlib import Path

import pytest

from neaptide.durations import DAY_S
from neaptide.engine.private_files import private_opener
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.http.errors import ConflictError, InvalidRequestError, NotFoundError, PayloadTooLargeError
from tests.patience import PATIENCE_S, until
from tests.server.batches.fakes import FakeClock, Server, numbered

FORM = UploadForm("input.jsonl", "batch")


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "files").iterdir())


async def test_an_upload_is_kept_byte_for_byte(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        content = bytes(range(256)) * 20_000
        async with server.service.files.upload() as upload:
            for start in range(0, len(content), 65_536):
                await upload.write(memoryview(content)[start : start + 65_536])
            record = await server.service.files.commit(upload, FORM, "")
        assert server.bytes_of(record.id) == content
        assert record.num_bytes == len(content)
        assert record.expires_at == record.created_at + 30 * DAY_S
        assert on_disk(tmp_path) == [record.id]
    async with Server(tmp_path) as again:
        assert await again.service.files.get(record.id, "") == record


async def test_a_torn_upload_leaves_nothing(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        begun = asyncio.Event()

        async def receive() -> None:
            async with server.service.files.upload() as upload:
                await upload.write(b"x" * 3_000_000)
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(receive())
        await begun.wait()
        assert len(on_disk(tmp_path)) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert on_disk(tmp_path) == []
        assert await server.service.files.list_page("", purpose=None, limit=9, after=None, ascending=True) == (
            [],
            False,
        )


async def test_an_upload_that_is_cancelled_while_its_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow_opener(path: str, flags: int) -> int:
        fd = private_opener(path, flags)
        begun.set()
        go_on.wait(PATIENCE_S)
        return fd

    async with Server(tmp_path) as server:
        monkeypatch.setattr("neaptide.server.batches.storing.files.private_opener", slow_opener)
        task = asyncio.create_task(server.upload(numbered(1)))
        await until(begun.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        await until(lambda: on_disk(tmp_path) == [])


async def test_a_crash_in_the_middle_is_tidied_at_the_next_start(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        record, ended = await server.upload(b"kept\n"), await server.create(numbered(1))
        await server.until_given(ended.id)
        server.engine.answer(ended.id)
        await server.until_terminal(ended.id)
        kept = on_disk(tmp_path)
    (tmp_path / "files" / f"upload-{'0' * 16}.tmp").write_bytes(b"torn")
    (tmp_path / "jobs" / f"{ended.id}.tokens").write_bytes(b"1234")
    async with Server(tmp_path):
        assert record.id in kept
        assert on_disk(tmp_path) == kept
        assert not list((tmp_path / "jobs").iterdir())
        assert not (tmp_path / "moved-aside").exists()


async def test_an_upload_that_the_database_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object) -> None:
        raise StoreUnavailableError("full")

    async with Server(tmp_path) as server:
        monkeypatch.setattr(server.service.store, "write", refuse)
        with pytest.raises(StoreUnavailableError):
            await server.upload(b"x\n")
        assert on_disk(tmp_path) == []


async def test_too_large(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        with pytest.raises(PayloadTooLargeError):
            async with server.service.files.upload() as upload:
                await upload.write(b"x" * (server.service.files.max_file_bytes + 1))
        assert on_disk(tmp_path) == []


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (UploadForm("input.txt", "batch"), "file"),
        (UploadForm("input.jsonl", "fine-tune"), "purpose"),
        (UploadForm("", "user_data"), "file"),
        (UploadForm("a\nb.jsonl", "batch"), "file"),
        (UploadForm("x" * 300 + ".jsonl", "batch"), "file"),
        (UploadForm("input.jsonl", "batch", 3599), "expires_after[seconds]"),
        (UploadForm("input.jsonl", "batch", 30 * DAY_S + 1), "expires_after[seconds]"),
    ],
)
async def test_unacceptable_forms(tmp_path: Path, form: UploadForm, param: str | None) -> None:
    async with Server(tmp_path) as server:
        with pytest.raises(InvalidRequestError) as error:
            async with server.service.files.upload() as upload:
                await server.service.files.commit(upload, form, "")
        assert error.value.param == param
        assert on_disk(tmp_path) == []


async def test_delete_waits_for_the_batch(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        file = await server.upload(numbered(2))
        batch = await server.create(input_file_id=file.id)
        await server.until_given(batch.id)
        with pytest.raises(ConflictError):
            await server.service.files.delete(file.id, "")
        assert server.bytes_of(file.id)
        server.engine.answer(batch.id)
        await server.until_status(batch.id, "completed")
        await server.service.files.delete(file.id, "")
        assert file.id not in on_disk(tmp_path)
        for call in (server.service.files.get, server.service.files.delete):
            with pytest.raises(NotFoundError):
                await call(file.id, "")


async def test_owners_do_not_see_each_other(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        mine, theirs = await server.upload(b"a\n", owner="me"), await server.upload(b"b\n", owner="them")
        assert await server.service.files.get(mine.id, "me") == mine
        for call in (server.service.files.get, server.service.files.delete):
            with pytest.raises(NotFoundError):
                await call(theirs.id, "me")
        page, _ = await server.service.files.list_page("me", purpose=None, limit=9, after=None, ascending=True)
        assert page == [mine]
        with pytest.raises(InvalidRequestError):
            await server.service.files.list_page("me", purpose=None, limit=9, after=theirs.id, ascending=True)


async def test_pages(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        ids = [(await server.upload(b"x\n", purpose=p)).id for p in ("batch", "user_data", "batch", "batch")]
        files = server.service.files

        async def page(after: str | None, ascending: bool, purpose: str | None = None) -> tuple[list[str], bool]:
            found, more = await files.list_page("", purpose=purpose, limit=2, after=after, ascending=ascending)
            return [record.id for record in found], more

        assert await page(None, ascending=False) == (ids[:1:-1], True)
        assert await page(ids[2], ascending=False) == (ids[1::-1], False)
        assert await page(None, ascending=True) == (ids[:2], True)
        assert await page(None, ascending=True, purpose="batch") == ([ids[0], ids[2]], True)


async def test_expired_files_are_gone_and_swept_except_under_a_live_batch(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Server(tmp_path, clock=clock) as server:
        used, idle = await server.upload(numbered(1)), await server.upload(numbered(1))
        for_ever = await server.upload(b"x\n", purpose="user_data")
        clock.now_s += 30 * DAY_S - 10
        batch = await server.create(input_file_id=used.id)
        await server.until_given(batch.id)
        clock.now_s += 20
        with pytest.raises(NotFoundError):
            await server.service.files.get(idle.id, "")
        await server.keep_house()
        assert on_disk(tmp_path) == sorted([used.id, for_ever.id])
        server.engine.answer(batch.id)
        record = await server.until_status(batch.id, "completed")
        server.results(record)


async def test_the_same_idempotency_key_gives_the_same_file(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:

        async def upload(content: bytes, owner: str = "") -> str:
            async with server.service.files.upload() as upload:
                await upload.write(content)
                return (await server.service.files.commit(upload, FORM, owner, "key")).id

        first = await upload(b"a\n")
        assert await upload(b"a\n") == first
        assert await upload(b"a\n", owner="other") != first
        with pytest.raises(ConflictError):
            await upload(b"b\n")
        await server.service.files.delete(first, "")
        again = await upload(b"a\n")
        assert again != first
        assert len(on_disk(tmp_path)) == 2
