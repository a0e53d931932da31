"""Result files: on the disk before they have their name, and not begun by a server that stops."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.server.batches.running import finalize
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine
from neaptide.server.batches.storing.store import Store

BATCH = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 200)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a batch of two lines, one of which has completed and one failed."""
    store = Store(tmp_path / "data")
    store.open()
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    store.write_blocking(batch_rows.insert_lines, BATCH.id, [NewLine(n, f"c{n}", 0, 1, n - 1, 1) for n in (1, 2)])
    store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", "fingerprint", 101)
    ends = [LineResult(1, LineState.COMPLETED, 200, "r1", "{}"), LineResult(2, LineState.FAILED, 400, "r2", "{}")]
    store.write_blocking(batch_rows.end_lines, BATCH.id, ends)
    yield store
    store.close()


@pytest.mark.acceptance("A8", "the order of writes, syncs and renames of a result file", count=2)
def test_every_byte_is_synced_before_the_file_has_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename = Path.rename

    def note_sync(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        events.append(f"sync {name} of {os.fstat(fd).st_size} bytes" if "tmp" in name else f"sync {name}")

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(finalize, "sync_directory", lambda path: events.append(f"sync directory {path.name}"))
    monkeypatch.setattr(Path, "rename", note_rename)
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    with monkeypatch.context() as patch:
        patch.setattr(finalize.os, "fsync", note_sync)
        output, error = finalize.write_files(store, record, tmp_path, lambda: False, 110, 3600)
    assert output is not None
    assert error is not None
    assert events == [
        f"sync file-o.tmp of {output.num_bytes} bytes",
        "rename file-o.tmp to file-o",
        f"sync directory {tmp_path.name}",
        f"sync file-e.tmp of {error.num_bytes} bytes",
        "rename file-e.tmp to file-e",
        f"sync directory {tmp_path.name}",
    ]
    assert [(tmp_path / name).stat().st_size for name in ("file-o", "file-e")] == [output.num_bytes, error.num_bytes]


@pytest.mark.parametrize("lines_before_the_stop", [0, 1])
def test_a_server_that_stops_publishes_nothing(store: Store, tmp_path: Path, lines_before_the_stop: int) -> None:
    answers = iter([False] * lines_before_the_stop + [True])
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    with pytest.raises(finalize.FinalizeStoppedError):
        finalize.write_files(store, record, tmp_path, lambda: next(answers), 110, 3600)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
