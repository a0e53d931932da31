"""``neaptide data`` on directories that a server has left."""

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main
from neaptide.durations import DAY_S
from neaptide.server.batches.storing.data_dir import DATABASE_NAME, DataDir
from tests.server.batches.fakes import FakeClock, Server, jsonl, line, numbered


class Used:
    """A data directory with one batch in it that ended so many days ago."""

    def __init__(self, root: Path, days_ago: float = 0.0, content: bytes = numbered(3)) -> None:
        self.root = root
        self.clock = FakeClock(time.time() - days_ago * DAY_S)
        asyncio.run(self._work(content))

    async def _work(self, content: bytes) -> None:
        async with Server(self.root, clock=self.clock) as server:
            batch = await server.create(content)
            await server.until_given(batch.id)
            server.engine.answer(batch.id)
            record = await server.until_terminal(batch.id)
        self.batch_id, self.output, self.input = record.id, record.output_file_id, record.input_file_id

    def count(self, table: str) -> int:
        connection = sqlite3.connect(self.root / DATABASE_NAME)
        (count,) = connection.execute(f"select count(*) from {table}").fetchone()
        connection.close()
        return int(count)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "files").iterdir())


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    status = main(["data", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


# ---- sizes -----------------------------------------------------------------------------------------------


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = Used(tmp_path)
    (tmp_path / "engine-requests.jsonl").write_bytes(b"x" * 10)
    (tmp_path / "engine-requests.jsonl.1").write_bytes(b"x" * 20)
    (tmp_path / "notes.txt").write_bytes(b"x" * 40)
    status, found = run(capsys, "sizes", "--data-dir", str(tmp_path))
    assert status == 0
    assert found["rows_of"] == {"files": 2, "batches": 1, "batch_lines": 3}
    assert found["bytes_of"]["files"] == sum((tmp_path / "files" / name).stat().st_size for name in used.files)
    assert found["bytes_of"]["logs"] == 30
    assert found["bytes_of"]["other"] > 40
    assert found["bytes_of"]["moved-aside"] == 0
    assert found["bytes_of"]["database"] >= (tmp_path / DATABASE_NAME).stat().st_size


def test_without_json_it_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Used(tmp_path)
    assert main(["data", "sizes", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("database")
    assert lines[-1].split() == ["batch_lines", "3", "rows"]


# ---- check -----------------------------------------------------------------------------------------------


def test_a_sound_directory_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Used(tmp_path)
    sound = {"files": 2, "results": 3, "repairs": [], "problems": []}
    assert run(capsys, "check", "--data-dir", str(tmp_path)) == (0, sound)


def test_everything_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = Used(tmp_path)
    (tmp_path / "files" / used.input).unlink()
    with (tmp_path / "files" / str(used.output)).open("r+b") as f:
        f.write(b"#")
    (tmp_path / "files" / "thesis.txt").touch()
    connection = sqlite3.connect(tmp_path / DATABASE_NAME)
    connection.execute("update batch_lines set result = '{}' where line_no = 2")
    connection.commit()
    connection.close()
    status, found = run(capsys, "check", "--data-dir", str(tmp_path))
    assert status == 1
    assert found["problems"] == [
        f"files/{used.input}: No such file or directory",
        f"files/{used.output}: its bytes differ from the stored ones",
        f"{used.batch_id}, line 2: its stored result is damaged",
        "files/thesis.txt: unknown to the database; a start moves it aside",
    ]
    assert (tmp_path / "files" / "thesis.txt").exists()


# ---- prune -----------------------------------------------------------------------------------------------


def test_prune_removes_what_has_expired_and_gives_its_space_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = Used(tmp_path, days_ago=31, content=jsonl(line(f"c{n}", "long " * 500) for n in range(300)))
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    status, found = run(capsys, "prune", "--data-dir", str(tmp_path))
    assert status == 0
    after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert found["freed_bytes"] > 1_500_000
    assert after < before - 1_500_000
    assert used.files == []
    assert (used.count("files"), used.count("batch_lines"), used.count("batches")) == (0, 0, 1)


def test_prune_keeps_what_has_not_expired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = Used(tmp_path, days_ago=10)
    before = used.files
    run(capsys, "prune", "--data-dir", str(tmp_path), "--batches-older-than", "7")
    assert used.files == before
    assert (used.count("batch_lines"), used.count("batches")) == (3, 1)


@pytest.mark.parametrize(("days", "left"), [(50, 1), (30, 0)])
def test_prune_forgets_batches_that_ended_long_ago(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], days: int, left: int
) -> None:
    used = Used(tmp_path, days_ago=40)
    run(capsys, "prune", "--data-dir", str(tmp_path), "--batches-older-than", str(days))
    assert used.count("batches") == left


def test_a_batch_that_a_client_may_repeat_is_not_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Used(tmp_path)
    assert main(["data", "prune", "--data-dir", str(tmp_path), "--batches-older-than", "6"]) == 2
    assert capsys.readouterr().err.startswith("neaptide data: batches can be forgotten after 7 days")


def test_prune_deletes_what_was_moved_aside_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Used(tmp_path)
    (tmp_path / "files" / "thesis.txt").write_bytes(b"x" * 1000)
    Used(tmp_path)
    run(capsys, "prune", "--data-dir", str(tmp_path))
    assert [path.name for path in (tmp_path / "moved-aside").rglob("*.txt")] == ["thesis.txt"]
    run(capsys, "prune", "--data-dir", str(tmp_path), "--moved-aside")
    assert not (tmp_path / "moved-aside").exists()


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["sizes", "check", "prune"])
def test_it_is_refused_while_a_server_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    Used(tmp_path)
    held = DataDir(tmp_path)
    held.open()
    assert main(["data", action, "--data-dir", str(tmp_path)]) == 2
    held.close()
    err = capsys.readouterr().err
    assert err.startswith("neaptide data: another neaptide process")
    assert len(err.splitlines()) == 1


def test_nothing_is_made_where_there_is_no_data_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "sizes", "--data-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"neaptide data: the data directory {tmp_path / 'none'} does not exist\n"
    assert main(["data", "sizes", "--data-dir", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_directory_is_the_servers_by_its_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Used(tmp_path)
    monkeypatch.setenv("NEAPTIDE_DATA_DIR", str(tmp_path))
    assert run(capsys, "check")[0] == 0


# ---- costs -----------------------------------------------------------------------------------------------


async def _with_costs(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What the command prints while the server runs."""
    clock = FakeClock(time.time())
    async with Server(root, clock=clock) as server:
        server.engine.row_s = 1.5
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await server.until_terminal(batch.id)
        await server.service.costs.store_now()
        status = await asyncio.to_thread(main, ["data", "costs", "--data-dir", str(root)])
    return status, capsys.readouterr().out


def test_costs_are_shown_by_key_and_day_beside_a_running_server_and_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    status, out = asyncio.run(_with_costs(root, capsys))
    assert status == 0
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert [line.split() for line in out.splitlines()[1:]] == [
        [today, "(no", "key)", "batch", "3.0", "100.0%", "14", "2"],
        [today, "all", "3.0"],
    ]
    assert run(capsys, "costs", "--data-dir", str(root)) == (
        0,
        {
            "costs": [
                {"day": today, "key": "", "work": "batch", "device_s": 3.0, "prefill_tokens": 14, "decode_tokens": 2}
            ]
        },
    )
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert run(capsys, "costs", "--data-dir", str(root), "--days", "7") == (0, {"costs": []})
    assert main(["data", "costs", "--data-dir", str(root)]) == 0
    assert capsys.readouterr().out == "no costs are recorded yet\n"


def test_costs_of_no_directory_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "costs", "--data-dir", str(tmp_path / "none")]) == 2
    assert "there is no database" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "costs", "--days", "0"])
