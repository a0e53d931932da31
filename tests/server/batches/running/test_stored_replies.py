"""What the reply to a line needs is stored when the line is checked; a line of which nothing usable is stored is
prepared again from the input."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from neaptide.server.batches.checking import job_files, reply_records
from neaptide.server.batches.checking.reply_records import MAX_SHARED_BYTES, ReplyPlaces, ReplyWriter
from neaptide.server.batches.storing.models import BatchRecord
from tests.patience import until
from tests.server.batches.fakes import Server, jsonl, line, numbered

NUM_LINES = 4


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.RETRY_DELAY_S", 0.01)


def reply_file(data_dir: Path, batch: BatchRecord) -> Path:
    return data_dir / "jobs" / f"{batch.id}.replies"


async def ends_well(server: Server, batch: BatchRecord) -> None:
    server.engine.answer(batch.id)
    found, errors = server.results(await server.until_status(batch.id, "completed"))
    texts = {name: entry["response"]["body"]["choices"][0]["text"] for name, entry in found.items()}
    assert (texts, errors) == ({f"c{i}": f"text of c{i}"[::-1] for i in range(NUM_LINES)}, {})


async def test_a_checked_line_is_not_prepared_again_nor_its_input_read(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        server.service.files.path(batch.input_file_id).rename(tmp_path / "away")
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == 0


async def test_a_batch_that_is_resumed_uses_what_was_stored(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
    async with Server(tmp_path) as server:
        await server.until_given(batch.id)
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == 0


def lose(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [lose, flip, cut])
async def test_lines_whose_stored_reply_is_missing_or_damaged_are_prepared_again(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        harm(reply_file(tmp_path, batch))
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == NUM_LINES
    assert caplog.text.count("prepared again") == 1


async def test_lines_of_a_version_with_other_records_are_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(reply_records, "VERSION", 99)
        async with Server(tmp_path) as server:
            batch = await server.create(numbered(NUM_LINES))
            await server.until_given(batch.id)
    async with Server(tmp_path) as server:
        await server.until_given(batch.id)
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == NUM_LINES


async def test_a_record_that_cannot_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server:

        def refuse(reply: bytes) -> None:
            raise ValueError("it is no form of a reply")

        monkeypatch.setattr(server.compiler, "stored_assembler", refuse)
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        await ends_well(server, batch)


async def test_outputs_wait_where_the_folder_of_the_replies_is_away(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        runner = server.service._machine._runner
        (tmp_path / "jobs").rename(tmp_path / "away")
        server.engine.answer(batch.id)
        await until(lambda: runner._jobs[batch.id].waits)
        assert (await server.get(batch.id)).num_completed == 0
        (tmp_path / "away").rename(tmp_path / "jobs")
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == 0


async def test_a_plan_that_is_made_again_brings_its_replies(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
    (tmp_path / "jobs" / f"{batch.id}.tokens").unlink()
    reply_file(tmp_path, batch).unlink()
    async with Server(tmp_path) as server:
        await server.until_given(batch.id)
        await ends_well(server, batch)
        assert server.compiler.num_prepared_again == 0


async def test_each_line_has_its_own_reply(tmp_path: Path) -> None:
    """Lines with several rows, and lines of other forms between them."""
    lines = [line("c0", n=2), line("c1", temperature=9), line("c2", stop="!"), line("c3", n=3)]
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl(lines))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        found, errors = server.results(await server.until_status(batch.id, "completed"))
        counts = {name: len(entry["response"]["body"]["choices"]) for name, entry in found.items()}
        assert (counts, set(errors)) == ({"c0": 2, "c2": 1, "c3": 3}, {"c1"})
        assert server.compiler.num_prepared_again == 0


def test_a_plan_of_an_earlier_version_names_no_records() -> None:
    class Then(msgspec.Struct):
        params_table: list[int]
        params_index: list[int]
        stream_rows: list[int]

    plan = msgspec.msgpack.decode(msgspec.msgpack.encode(Then([], [], [])), type=job_files.JobPlan)
    assert (plan.replies_version, plan.reply_places) == (0, b"")


def test_equal_records_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "job.replies"
    writer = ReplyWriter(path)
    long = b"l" * (MAX_SHARED_BYTES + 1)
    for record, num_rows in ((b"one", 2), (b"two", 1), (b"one", 1), (None, 1), (long, 1), (long, 1)):
        writer.append(record, num_rows)
    writer.close()
    assert path.read_bytes() == b"onetwo" + long + long
    places = ReplyPlaces(writer.places)
    found = [None if (place := places.of(row)) is None else place.read(path) for row in range(8)]
    assert found == [b"one", b"one", b"two", b"one", None, long, long, None]
