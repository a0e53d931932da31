"""What a start names and cannot mend, and what ``neaptide data check --repair`` does to it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main
from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.mending.repair import repair
from neaptide.server.batches.storing import offline
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import Store
from neaptide.server.http.errors import ApiError, NotFoundError
from tests.cluster.batches.pair import answered_to_the_end, shared_server
from tests.server.batches.fakes import Server, jsonl, line, numbered

NUM_LINES = 6


def check(capsys: pytest.CaptureFixture[str], data_dir: Path, *flags: str) -> tuple[int, Any]:
    status = main(["data", "check", "--data-dir", str(data_dir), "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


async def lived(data_dir: Path) -> dict[str, str]:
    """Two batches, one complete and one half done; ids by what they are of."""
    async with Server(data_dir) as server:
        done = await server.create(numbered(NUM_LINES) + jsonl([line("refused", temperature=9)]))
        await server.until_given(done.id)
        server.engine.answer(done.id)
        record = await server.until_terminal(done.id)
        half = await server.create(numbered(NUM_LINES))
        await server.until_given(half.id)
        server.engine.answer(half.id, 2)
        await server.until(half.id, lambda found: found.num_completed == 2)
        return {
            "done": done.id,
            "done input": done.input_file_id,
            "output": str(record.output_file_id),
            "errors": str(record.error_file_id),
            "half": half.id,
            "input": half.input_file_id,
        }


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def moved_aside(root: Path, name: str) -> list[Path]:
    return [path for path in root.rglob(name) if "moved-aside" in path.parts]


HARMS = [Path.unlink, cut, flip]


# ---- the start -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["input", "done input", "output"])
@pytest.mark.parametrize("harm", [Path.unlink, cut])
async def test_a_start_names_files_that_are_missing_or_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: Callable[[Path], None]
) -> None:
    ids = await lived(tmp_path)
    size = (tmp_path / "files" / ids[name]).stat().st_size
    harm(tmp_path / "files" / ids[name])
    caplog.set_level(logging.WARNING)
    async with Server(tmp_path, engine=False):
        fault = "it is missing" if harm is Path.unlink else f"it has 100 bytes, and {size} were stored"
        remedy = "put it back, or drop it with neaptide data check --repair"
        wanted = f"files/{ids[name]}: {fault}; {remedy}"
        assert [text for text in caplog.messages if text.startswith("files/")] == [wanted]


async def test_a_sound_start_names_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await lived(tmp_path)
    caplog.set_level(logging.WARNING)
    async with Server(tmp_path):
        assert caplog.messages == []


# ---- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["output", "errors"])
async def test_a_result_is_made_again_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], None]
) -> None:
    ids = await lived(tmp_path)
    path = tmp_path / "files" / ids[name]
    content = path.read_bytes()
    harm(path)
    harmed = path.read_bytes() if path.exists() else None
    status, found = check(capsys, tmp_path)
    assert (status, len(found["problems"]), found["repairs"]) == (1, 1, [])
    assert (path.read_bytes() if path.exists() else None) == harmed
    status, found = check(capsys, tmp_path, "--repair")
    assert (status, found["problems"]) == (0, [])
    assert found["repairs"][-1] == f"files/{ids[name]}: written again from the results of its batch"
    assert path.read_bytes() == content
    aside = [copy.read_bytes() for copy in moved_aside(tmp_path, ids[name])]
    assert aside == ([] if harmed is None else [harmed])


async def test_a_result_whose_rows_have_changed_too_is_dropped_and_its_rows_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await lived(tmp_path)
    (tmp_path / "files" / ids["output"]).unlink()
    async with Server(tmp_path) as server:
        change = f"update batch_lines set request_id = 'x' where line_no = 2 and batch_id = '{ids['done']}'"
        await server.service.store.write(lambda conn: conn.exec_driver_sql(change).close())
    _, found = check(capsys, tmp_path, "--repair")
    assert found["repairs"] == [f"files/{ids['output']}: dropped (No such file or directory)"]
    assert found["results"] == NUM_LINES + 1 + 2
    async with Server(tmp_path) as server:
        with pytest.raises(NotFoundError):
            await server.service.files.get(ids["output"], "")
        await server.keep_house()
    assert check(capsys, tmp_path)[1]["results"] == NUM_LINES + 1 + 2


# ---- inputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", HARMS)
async def test_a_batch_whose_input_is_dropped_ends_and_keeps_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: Callable[[Path], None]
) -> None:
    ids = await lived(tmp_path)
    harm(tmp_path / "files" / ids["input"])
    status, found = check(capsys, tmp_path, "--repair")
    assert (status, found["problems"]) == (0, [])
    reason = "No such file or directory" if harm is Path.unlink else "its bytes differ from the stored ones"
    assert found["repairs"][-2:] == [
        f"files/{ids['input']}: dropped ({reason})",
        f"{ids['half']}: its input was dropped; its open lines have failed",
    ]
    async with Server(tmp_path) as server:
        record = await server.until_terminal(ids["half"])
        results, errors = server.results(record)
        assert (record.status, sorted(results)) == ("completed", ["c0", "c1"])
        assert [error["error"]["code"] for error in errors.values()] == ["input_file_lost"] * (NUM_LINES - 2)
        assert server.engine.sent == []
        with pytest.raises(NotFoundError):
            await server.service.files.get(ids["input"], "")


async def test_a_batch_that_was_not_checked_fails_when_its_input_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Server(tmp_path) as server:
        file = await server.upload(numbered(2))
        # As if the server had been killed before the file was checked.
        server.service._machine.begin = lambda record: None  # type: ignore[method-assign]
        batch = await server.create(input_file_id=file.id)
    (tmp_path / "files" / file.id).unlink()
    _, found = check(capsys, tmp_path, "--repair")
    assert len(found["repairs"]) == 2
    async with Server(tmp_path) as server:
        record = await server.get(batch.id)
        assert (record.status, record.num_total) == ("failed", 0)
        assert record.errors is not None
        assert record.errors[0]["code"] == "input_file_lost"


async def test_the_input_of_a_batch_that_has_ended_is_dropped_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = await lived(tmp_path)
    (tmp_path / "files" / ids["done input"]).unlink()
    _, found = check(capsys, tmp_path, "--repair")
    assert found["repairs"] == [f"files/{ids['done input']}: dropped (No such file or directory)"]
    async with Server(tmp_path) as server:
        assert (await server.get(ids["done"])).num_failed == 1
        await server.until_given(ids["half"])


async def test_what_cannot_be_read_now_is_not_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await lived(tmp_path)
    path = tmp_path / "files" / ids["input"]
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # nothing that a root's process cannot read is simpler
    status, found = check(capsys, tmp_path, "--repair")
    assert (status, found["repairs"]) == (1, [])
    assert found["problems"] == [f"files/{ids['input']}: Is a directory"]
    path.rmdir()
    path.write_bytes(content)
    async with Server(tmp_path) as server:
        await server.until_given(ids["half"])
        server.engine.answer(ids["half"])
        assert (await server.until_terminal(ids["half"])).num_completed == NUM_LINES


async def test_a_dropped_file_is_gone_for_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = await lived(tmp_path)
    flip(tmp_path / "files" / ids["done input"])
    check(capsys, tmp_path, "--repair")
    async with Server(tmp_path) as server:
        with pytest.raises(ApiError):
            await server.service.files.get(ids["done input"], "")
    assert check(capsys, tmp_path, "--repair")[1]["repairs"] == []


# ---- on shared storage -----------------------------------------------------------------------------------


def blobs_of(root: Path, prefix: str) -> list[Path]:
    return sorted(
        path for path in (root / "blobs").rglob("*") if path.is_file() and path.parent.name.startswith(prefix)
    )


def repaired(root: Path) -> tuple[list[str], list[str]]:
    """What was done, and what is wrong afterwards."""
    store = Store(root / "one", sharing_of(None, f"file://{root}/blobs"))
    store.open(create=False)
    try:
        return list(repair(store)), offline.check(store).problems
    finally:
        store.close()


async def complete_shared(root: Path) -> BatchRecord:
    async with shared_server(root, "one", None) as server:
        batch = await server.create(numbered(NUM_LINES))
        return await answered_to_the_end([server], batch.id)


@pytest.mark.parametrize("harm", HARMS)
async def test_a_result_blob_is_made_again_and_an_input_blob_is_dropped(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    record = await complete_shared(tmp_path)
    (output,), (source,) = blobs_of(tmp_path, "batch_"), blobs_of(tmp_path, "files")
    content = output.read_bytes()
    harm(output)
    harm(source)
    repairs, problems = repaired(tmp_path)
    assert problems == []
    named = [text for text in repairs if "moved" not in text]
    assert len(named) == 2
    assert named[0].startswith(f"files/{record.input_file_id}: dropped (")
    assert named[1] == f"{record.id}/{output.name}: written again from the results of its batch"
    assert output.read_bytes() == content
    assert len(moved_aside(tmp_path, "*.jsonl")) == (harm is not Path.unlink)


async def test_nothing_is_dropped_while_the_shared_storage_is_away(tmp_path: Path) -> None:
    await complete_shared(tmp_path)
    store = Store(tmp_path / "one", sharing_of(None, f"file://{tmp_path}/blobs"))
    store.open(create=False)
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    assert list(repair(store)) == []
    store.close()
    (tmp_path / "elsewhere").rename(tmp_path / "blobs")
    assert repaired(tmp_path) == ([], [])
