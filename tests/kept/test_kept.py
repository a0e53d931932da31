"""What earlier versions have left is read: their batches go on to the right end, their files are as they were."""

import asyncio
import hashlib
import json
import shutil
import sqlite3
import tarfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psycopg
import pytest

from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import Store
from neaptide.server.http.errors import NotFoundError
from tests.cluster.batches.pair import answered_to_the_end, shared_server
from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer
from tests.kept.make import FLAGS, complete_lines, half_lines
from tests.patience import until_here
from tests.postgres import PostgresServer
from tests.server.batches.fakes import FakeClock, Server

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "directory.tar.xz").exists())
MODEL = "neaptide-tiny"


@dataclass
class Kept:
    """What one version left, unpacked, and what its client had been told."""

    root: Path
    facts: dict[str, Any]

    @classmethod
    def unpacked(cls, version: str, form: str, root: Path) -> "Kept":
        root.mkdir()
        # The archives are our own. Python before 3.11.4 has no filters.
        filters: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        with tarfile.open(HERE / version / f"{form}.tar.xz") as tar:
            tar.extractall(root, **filters)
        return cls(root, json.loads((HERE / version / f"{form}.json").read_text()))

    @property
    def clock(self) -> FakeClock:
        """A minute after the kill."""
        return FakeClock(self.facts["half"]["created_at"] + 60.0)

    @property
    def half_id(self) -> str:
        return str(self.facts["half"]["id"])

    @property
    def num_done(self) -> int:
        return int(self.facts["half"]["request_counts"]["completed"])


def serves_its_model(server: Server) -> Server:
    """The engine is a fake one all the same: it answers a prompt with its tokens, backwards."""
    server.compiler.served = msgspec.structs.replace(server.compiler.served, names=(MODEL,))
    return server


async def check_files(server: Server, kept: Kept) -> None:
    for file_id, digest in kept.facts["files"].items():
        record = await server.service.files.get(file_id, "")
        await server.service.files.verify(record)
        assert hashlib.sha256(server.bytes_of(file_id)).hexdigest() == digest == record.sha256
    complete = await server.get(kept.facts["complete"]["id"])
    assert (complete.status, complete.num_completed, complete.num_failed) == ("completed", 16, 1)
    assert (complete.output_file_id, complete.error_file_id) == (
        kept.facts["complete"]["output_file_id"],
        kept.facts["complete"]["error_file_id"],
    )


def check_half(server: Server, kept: Kept, record: BatchRecord, before: dict[str, str], tokens: TokenFile) -> None:
    """Every line has ended well: those of then with their result of then, the others with the fake engine's."""
    found, errors = server.results(record)
    assert (record.status, errors) == ("completed", {})
    lines = {line["custom_id"]: line["body"] for line in half_lines()}
    assert list(found) == list(lines)
    row = 0
    for custom_id, body in lines.items():
        answer = found[custom_id]["response"]["body"]
        if custom_id in before:
            assert answer == json.loads(before[custom_id])
        else:
            prompt = "".join(map(chr, tokens.prompt(row)[::-1]))
            assert [choice["text"] for choice in answer["choices"]] == [prompt] * body.get("n", 1)
        row += body.get("n", 1)
    assert len(before) == kept.num_done


def token_copy(stem: Path, target: Path) -> TokenFile:
    """The prompts as they were then: a batch that ends removes its own."""
    for suffix in (".tokens", ".offsets"):
        target.with_suffix(suffix).write_bytes(stem.with_name(f"{stem.name}{suffix}").read_bytes())
    return TokenFile(target)


def results_of_then(database: Path) -> tuple[str, dict[str, str]]:
    """The fingerprint that both batches have, and by custom id the results of the half batch. Of a copy."""
    with closing(sqlite3.connect(database)) as connection:
        fingerprint, batch_id = connection.execute(
            "select model_fingerprint, id from batches where status = 'in_progress'"
        ).fetchone()
        query = "select custom_id, result from batch_lines where batch_id = ? and state = 'completed'"
        return fingerprint, dict(connection.execute(query, (batch_id,)).fetchall())


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_directory_of_then_is_read_and_its_half_done_batch_is_completed(tmp_path: Path, version: str) -> None:
    kept = Kept.unpacked(version, "directory", tmp_path / "data")
    copy = Kept.unpacked(version, "directory", tmp_path / "copy")
    fingerprint, before = results_of_then(copy.root / "neaptide.db")
    tokens = token_copy(copy.root / "jobs" / kept.half_id, tmp_path / "then")
    async with serves_its_model(Server(kept.root, clock=kept.clock, fingerprint=fingerprint)) as server:
        await check_files(server, kept)
        await server.until_given(kept.half_id)
        server.engine.answer(kept.half_id)
        check_half(server, kept, await server.until_terminal(kept.half_id), before, tokens)
        await check_files(server, kept)
    assert list((kept.root / "jobs").iterdir()) == []
    assert not (kept.root / "moved-aside").exists()


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_copy_from_before_an_upgrade_can_be_put_back(tmp_path: Path, version: str) -> None:
    """With its database as that version knows it; what came after the upgrade is moved aside, not lost."""
    kept = Kept.unpacked(version, "directory", tmp_path / "data")
    backup = Kept.unpacked(version, "directory", tmp_path / "backup")
    looked_at = Kept.unpacked(version, "directory", tmp_path / "copy").root
    fingerprint, _ = results_of_then(looked_at / "neaptide.db")
    async with serves_its_model(Server(kept.root, clock=kept.clock, fingerprint=fingerprint)) as server:
        later = await server.upload(b"later")
    assert schema_of(kept.root) > schema_of(looked_at)
    shutil.rmtree(kept.root)
    shutil.copytree(backup.root, kept.root)
    async with serves_its_model(Server(kept.root, clock=kept.clock, fingerprint=fingerprint)) as server:
        await check_files(server, kept)
        await server.until_given(kept.half_id)
        server.engine.answer(kept.half_id)
        assert (await server.until_terminal(kept.half_id)).status == "completed"
        with pytest.raises(NotFoundError):
            await server.service.files.get(later.id, "")


def test_an_older_version_refuses_a_newer_ones_data_with_the_way_out_and_leaves_it(tmp_path: Path) -> None:
    """Every version has asked for the schema's number, since the first one that is kept."""
    kept = Kept.unpacked(VERSIONS[-1], "directory", tmp_path / "data")
    with closing(sqlite3.connect(kept.root / "neaptide.db")) as connection, connection:
        connection.execute("update alembic_version set version_num = '9999'")
    before = {path: path.read_bytes() for path in kept.root.rglob("*") if path.is_file()}
    store = Store(kept.root)
    with pytest.raises(StoreError) as caught:
        store.open()
    assert str(caught.value) == (
        "the database was written by a newer neaptide (schema 9999); install that version again, or put back the copy "
        "from before the upgrade"
    )
    assert {path: path.read_bytes() for path in before} == before


def schema_of(data_dir: Path) -> str:
    with closing(sqlite3.connect(data_dir / "neaptide.db")) as connection:
        return str(connection.execute("select version_num from alembic_version").fetchone()[0])


def restore(postgres: PostgresServer, dump: str) -> str:
    """A new database with what ``pg_dump`` has written; returns its name."""
    name = postgres.new_database("template0")
    with psycopg.connect(host=str(postgres.directory), user="neaptide", dbname=name) as connection:
        # What begins with a backslash is for psql.
        statements = "\n".join(line for line in dump.splitlines() if not line.startswith("\\"))
        connection.execute(statements)  # type: ignore[call-overload]
    return name


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_dump_of_then_with_its_blobs_is_read_and_its_half_done_batch_is_completed(
    tmp_path: Path, version: str, postgres_server: PostgresServer
) -> None:
    kept = Kept.unpacked(version, "shared", tmp_path / "data")
    database = await asyncio.to_thread(restore, postgres_server, (kept.root / "dump.sql").read_text())
    query = "SELECT model_fingerprint, plan_blob FROM batches WHERE id = %s"
    lines = "SELECT custom_id, result FROM batch_lines WHERE batch_id = %s AND state = 'completed'"
    with postgres_server.connect(database) as connection:
        fingerprint, plan = connection.execute(query, (kept.half_id,)).fetchall()[0]
        before = dict(connection.execute(lines, (kept.half_id,)).fetchall())
    tokens = token_copy(kept.root / "blobs" / plan, tmp_path / "then")
    url = postgres_server.url(database)
    shared = shared_server(kept.root, "server", url, clock=kept.clock, fingerprint=fingerprint)
    async with serves_its_model(shared) as server:
        await check_files(server, kept)
        record = await answered_to_the_end([server], kept.half_id)
        check_half(server, kept, record, before, tokens)
        await check_files(server, kept)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_server_takes_a_directory_of_then(tmp_path: Path, version: str) -> None:
    server = RunningServer(tmp_path, *FLAGS, env=SIM | {"NEAPTIDE_SIM_STEP_MS": "1"})
    kept = Kept.unpacked(version, "directory", server.data_dir)
    with server:
        for file_id, digest in kept.facts["files"].items():
            assert hashlib.sha256(content(server.http, file_id)).hexdigest() == digest
        assert server.http.get(f"/v1/batches/{kept.facts['complete']['id']}").json() == kept.facts["complete"]
        until_here(lambda: half_of(server, kept)["status"] == "completed")
        counts = {"total": len(half_lines()), "completed": len(half_lines()), "failed": 0}
        assert half_of(server, kept)["request_counts"] == counts
        custom_ids = [
            json.loads(line)["custom_id"]
            for line in content(server.http, half_of(server, kept)["output_file_id"]).splitlines()
        ]
        assert custom_ids == [line["custom_id"] for line in half_lines()]
        assert kept.facts["complete"]["request_counts"]["total"] == len(complete_lines())


def content(http: httpx.Client, file_id: str) -> bytes:
    return http.get(f"/v1/files/{file_id}/content").raise_for_status().content


def half_of(server: RunningServer, kept: Kept) -> dict[str, Any]:
    return dict(server.http.get(f"/v1/batches/{kept.half_id}").json())
