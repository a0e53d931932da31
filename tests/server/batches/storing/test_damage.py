"""Bytes that changed while the server was down: refused at start in one line, or found by their hash; never served."""

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neaptide.server.batches.storing.data_dir import DATABASE_NAME, StoreError
from neaptide.server.batches.storing.faults import FileAwayError, storage_faults
from neaptide.server.batches.storing.models import TERMINAL
from neaptide.server.batches.storing.store import Store
from neaptide.server.http.errors import ApiError, NotFoundError
from tests.patience import Stopwatch, until
from tests.server.batches.fakes import Server, numbered

SEED = 10
MAX_START_S = 5.0
NUM_LINES = 40


@dataclass
class Original:
    """One batch done, one half done: as a ``kill -9`` leaves it, with a write-ahead log, and as a stop does."""

    data_dir: Path
    stopped: Path
    done: str
    half: str


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    root = tmp_path_factory.mktemp("original")

    async def make() -> Original:
        async with Server(root / "live") as server:
            done = await server.create(numbered(NUM_LINES))
            await server.until_given(done.id)
            server.engine.answer(done.id)
            await server.until_status(done.id, "completed")
            half = await server.create(numbered(NUM_LINES))
            await server.until_given(half.id)
            server.engine.answer(half.id, NUM_LINES // 2)
            await server.until(half.id, lambda record: record.num_completed == NUM_LINES // 2)
            shutil.copytree(root / "live", root / "copy", ignore=shutil.ignore_patterns("lock", "*-shm"))
        (root / "live" / "lock").unlink()
        return Original(root / "copy", root / "live", done.id, half.id)

    yield asyncio.run(make())
    shutil.rmtree(root)


def flip(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


async def wrong_answers(original: Original, data_dir: Path) -> list[dict[str, Any]]:
    """Starts on the directory, finishes what is left, and returns every served result that is not the right one."""
    async with Server(data_dir) as server:
        wrong: list[dict[str, Any]] = []
        for batch_id in (original.done, original.half):
            try:
                record = await server.get(batch_id)
            except (NotFoundError, ValueError):
                continue
            # A batch whose input is damaged waits for the right one.
            while record.status not in TERMINAL and record.input_file_id not in server.service.health.away:
                server.engine.answer(batch_id)
                await asyncio.sleep(0.005)
                record = await server.get(batch_id)
            for file_id in (record.output_file_id, record.error_file_id):
                wrong += [] if file_id is None else await wrong_lines(server, file_id)
        return wrong


async def wrong_lines(server: Server, file_id: str) -> list[dict[str, Any]]:
    try:
        await server.service.files.verify(await server.service.files.get(file_id, ""))
    except (ApiError, FileAwayError):
        return []
    lines = [json.loads(line) for line in server.bytes_of(file_id).splitlines()]
    return [line for line in lines if line["error"] is None and not is_right(line)]


def is_right(line: dict[str, Any]) -> bool:
    choices = line["response"]["body"].get("choices", [{}])
    return bool(choices[0].get("text") == f"text of {line['custom_id']}"[::-1])


def flips(count: int) -> pytest.MarkDecorator:
    return pytest.mark.acceptance("A10", "flipped bits of database, log, files and plans at start, seeded", count=count)


@pytest.mark.parametrize(
    "num_flips", [pytest.param(20, marks=flips(20)), pytest.param(50, marks=[flips(50), pytest.mark.full])]
)
def test_flipped_bits_are_refused_or_found_and_never_served(tmp_path: Path, original: Original, num_flips: int) -> None:
    generator = random.Random(SEED)
    refused = 0
    for number in range(num_flips):
        source = (original.data_dir, original.stopped)[number % 2]
        data_dir = Path(shutil.copytree(source, tmp_path / str(number)))
        paths = sorted(path for path in data_dir.rglob("*") if path.is_file())
        # Half of them into the database or its log.
        path = generator.choice(paths if number % 4 < 2 else [path for path in paths if ".db" in path.name])
        flip(path, generator)
        watch = Stopwatch()
        refusal = None
        try:
            wrong = asyncio.run(wrong_answers(original, data_dir))
            assert wrong == [], path.name
        except StoreError as error:
            refusal = str(error)
        if refusal is not None:
            refused += 1
            assert "\n" not in refusal
            assert watch.seconds < MAX_START_S
        shutil.rmtree(data_dir)
    assert 0 < refused < num_flips


@pytest.mark.acceptance("A10", "an input file, a result file or a plan that has changed")
@pytest.mark.parametrize("suffix", [".tokens", ".offsets", ".plan", ".sha256"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_plan_that_is_changed_or_gone_is_made_again(
    tmp_path: Path, original: Original, suffix: str, is_gone: bool
) -> None:
    data_dir = Path(shutil.copytree(original.data_dir, tmp_path / "data"))
    path = data_dir / "jobs" / f"{original.half}{suffix}"
    before = path.read_bytes()
    if is_gone:
        path.unlink()
    else:
        flip(path, random.Random(SEED))

    async def restart() -> None:
        async with Server(data_dir) as server:
            await server.until_given(original.half)
            assert path.read_bytes() == before
            server.engine.answer(original.half)
            found, _ = server.results(await server.until_status(original.half, "completed"))
            assert [entry for entry in found.values() if not is_right(entry)] == []
            assert len(found) == NUM_LINES

    asyncio.run(restart())


@pytest.mark.acceptance("A10", "an input file, a result file or a plan that has changed")
def test_a_changed_file_is_not_served_and_not_run_until_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.FIRST_DELAY_S", 0.01)

    async def life() -> None:
        async with Server(tmp_path) as server:
            file = await server.upload(numbered(3))
            flip(server.service.files.path(file.id), random.Random(SEED))
            with pytest.raises(ApiError) as error, storage_faults(server.service.health):
                await server.service.files.verify(file)
            assert (error.value.status, error.value.code) == (500, "file_damaged")
            batch = await server.create(input_file_id=file.id)
            await until(lambda: server.service._machine.waits_for_disk)
            assert server.engine.sent == []
            assert server.service.storage_failing
            server.service.files.path(file.id).write_bytes(numbered(3))
            await server.until_given(batch.id)
            server.engine.answer(batch.id)
            server.results(await server.until_status(batch.id, "completed"))
            await until(lambda: not server.service.storage_failing)

    asyncio.run(life())


@pytest.mark.acceptance("A10", "a result row that has changed")
async def test_a_changed_result_fails_its_line_and_is_not_served(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 2)
        await server.until(batch.id, lambda record: record.num_completed == 2)
        change = "update batch_lines set result = replace(result, 'txet', 'text') where line_no = 2"
        await server.service.store.write(lambda conn: conn.exec_driver_sql(change).close())
        server.engine.answer(batch.id)
        found, errors = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["c0", "c2"]
        assert errors["c1"]["error"]["code"] == "result_damaged"
        assert errors["c1"]["response"] is None


@pytest.mark.acceptance("A10", "a database too large to be checked whole at start")
def test_the_check_at_start_takes_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.open()
    store.write_blocking(lambda conn: conn.exec_driver_sql("create table t (x)").close())
    store.write_blocking(
        lambda conn: conn.exec_driver_sql(
            "insert into t with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) "
            "select hex(randomblob(40)) from n"
        ).close()
    )
    store.close()
    monkeypatch.setattr("neaptide.server.batches.storing.databases.sqlite.CHECK_TIME_S", -1.0)
    store.open()
    store.close()
    assert (tmp_path / DATABASE_NAME).stat().st_size > 1_000_000
