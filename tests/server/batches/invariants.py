"""What must hold of a data directory whatever was killed, in whatever moment (B1 to B20 of the batch service).

The judge is independent of the server: it reads a copy of the database with plain SQL, the files with plain
reads, and believes only what the client was told (``Facts``) and what the engine says that it ran (its witness).
"""

import hashlib
import hmac
import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

TERMINAL = {"completed", "failed", "expired", "cancelled"}
LEGAL = {
    "validating": {"in_progress", "finalizing", "failed", "cancelling", *TERMINAL},
    "in_progress": {"finalizing", "cancelling", "completed", "cancelled", "expired"},
    "finalizing": {"completed"},
    "cancelling": {"cancelled"},
}
"""Edges that an observer may see between two looks; it may miss states between them."""
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass
class Facts:
    """What the server has acknowledged, in the order of the acknowledgements."""

    files: dict[str, str] = field(default_factory=dict)
    """File id -> SHA-256 of what was uploaded or seen."""
    deleting: set[str] = field(default_factory=set)
    """Files whose deletion was asked for and perhaps not answered: they may be there or not."""
    deleted: set[str] = field(default_factory=set)
    batches: dict[str, int] = field(default_factory=dict)
    """Batch id -> lines of its input file."""
    keys: dict[str, str] = field(default_factory=dict)
    """Idempotency key -> batch id."""
    cancelled: set[str] = field(default_factory=set)
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Batch objects as the API showed them."""
    receipts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Receipts as the API gave them, by batch id."""
    executions: Counter[str] = field(default_factory=Counter)
    """Rows (``batch:row``) that engines have run."""
    max_decodes: int = 1
    """Most decodes of one run of a row."""


@contextmanager
def database(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the database as it lies there; the original is not touched, not even by recovery."""
    with tempfile.TemporaryDirectory() as copy:
        for path in data_dir.glob("*.db*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, copy)
        (path,) = Path(copy).glob("*.db")
        with closing(sqlite3.connect(path)) as connection:
            connection.row_factory = sqlite3.Row
            yield connection


def durable_rows(data_dir: Path) -> set[str]:
    """Rows (``batch:row``) of lines whose result is committed; none before there is a database."""
    try:
        with database(data_dir) as connection:
            lines = connection.execute("select * from batch_lines where state in ('completed', 'failed')").fetchall()
    except (ValueError, sqlite3.OperationalError):  # no file or no table yet
        return set()
    return {
        f"{line['batch_id']}:{row}"
        for line in lines
        for row in range(line["first_row"], line["first_row"] + line["num_rows"])
    }


def violations(data_dir: Path, facts: Facts, crashes: int = 0) -> list[str]:
    """Everything that is wrong in a directory whose server has stopped with nothing left to do."""
    with database(data_dir) as connection:
        judge = _Judge(data_dir, facts, crashes, connection)
        judge.check()
    return judge.found


class _Judge:
    def __init__(self, data_dir: Path, facts: Facts, crashes: int, connection: sqlite3.Connection) -> None:
        self.found: list[str] = []
        self._dir, self._facts, self._crashes, self._db = data_dir, facts, crashes, connection
        self._files = {row["id"]: row for row in connection.execute("select * from files")}
        self._batches = {row["id"]: row for row in connection.execute("select * from batches")}

    def check(self) -> None:
        self._expect(self._db.execute("pragma integrity_check").fetchone()[0] == "ok", "the database is damaged")
        self._expect(not self._db.execute("pragma foreign_key_check").fetchall(), "a foreign key leads nowhere")
        self._check_acknowledged()
        self._check_files()
        for batch in self._batches.values():
            self._check_batch(batch)
        for batch_id, seen in self._facts.seen.items():
            self._check_history(batch_id, [*seen, dict(self._batches.get(batch_id) or {})])
        for row, times in self._facts.executions.items():
            self._expect(times <= 1 + self._crashes, f"B7: {row} ran {times} times in {self._crashes} crashes")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.found.append(otherwise)

    def _check_acknowledged(self) -> None:
        facts = self._facts
        for file_id, digest in facts.files.items():
            row = self._files.get(file_id)
            if file_id in facts.deleted:
                self._expect(row is None, f"B1: {file_id} was deleted and is back")
            elif row is None and file_id not in facts.deleting:
                self.found.append(f"B1: {file_id} was acknowledged and is gone")
            elif row is not None:
                self._expect(row["sha256"] == digest, f"B5: {file_id} is not what was uploaded")
        for batch_id in facts.batches:
            self._expect(batch_id in self._batches, f"B1: {batch_id} was acknowledged and is gone")
        for key, batch_id in facts.keys.items():
            found = self._db.execute("select object_id from idempotency_keys where key = ?", (key,)).fetchall()
            self._expect([row[0] for row in found] == [batch_id], f"B12: key {key} does not lead to {batch_id}")
        for batch_id in facts.cancelled & set(self._batches):
            self._expect(self._batches[batch_id]["status"] == "cancelled", f"B10: {batch_id} was not cancelled")

    def _check_files(self) -> None:
        on_disk = {path.name for path in (self._dir / "files").iterdir()}
        self._expect(on_disk == set(self._files), f"B16: files and rows differ: {on_disk ^ set(self._files)}")
        leftovers = [path.name for path in (self._dir / "jobs").iterdir()]
        self._expect(not leftovers, f"B16: left of jobs: {leftovers}")
        for file_id in on_disk & set(self._files):
            content = (self._dir / "files" / file_id).read_bytes()
            same = len(content) == self._files[file_id]["num_bytes"]
            same = same and hashlib.sha256(content).hexdigest() == self._files[file_id]["sha256"]
            self._expect(same, f"B5: the bytes of {file_id} are not those of its row")

    def _check_batch(self, batch: sqlite3.Row) -> None:
        name = batch["id"]
        self._expect(batch["status"] in TERMINAL, f"B3: {name} is still {batch['status']}")
        for at in TIMES:
            self._expect(batch[at] is None or batch[at] >= batch["created_at"], f"B4: {name}: {at} is too early")
        lines = self._db.execute("select * from batch_lines where batch_id = ? order by line_no", (name,)).fetchall()
        states = Counter(line["state"] for line in lines)
        counts = (batch["num_total"], batch["num_completed"], batch["num_failed"])
        self._expect(counts == (len(lines), states["completed"], states["failed"]), f"B2: counts of {name}: {counts}")
        if batch["in_progress_at"] is None:
            self._expect(not lines, f"B14: {name} never ran and has lines")
        else:
            self._expect(len(lines) == self._facts.batches.get(name, len(lines)), f"B2: {name} has lost lines")
        self._check_receipt(batch)
        for kind, ended_well in (("output", True), ("error", False)):
            wanted = [line["custom_id"] for line in lines if (line["state"] == "completed") == ended_well]
            self._check_result_file(batch, kind, wanted)

    def _check_receipt(self, batch: sqlite3.Row) -> None:
        name = batch["id"]
        found = self._db.execute("select receipt from batch_receipts where batch_id = ?", (name,)).fetchall()
        self._expect(len(found) == (batch["status"] != "failed"), f"{name} has {len(found)} receipts")
        left = self._db.execute("select count(*) from batch_costs where batch_id = ?", (name,)).fetchone()[0]
        self._expect(left == 0, f"{name} has sums beside its receipt")
        for receipt in (json.loads(row["receipt"], parse_float=_number) for row in found):
            lines = {part: batch[f"num_{part}"] for part in ("total", "completed", "failed")}
            self._expect(receipt["lines"] == lines, f"the receipt of {name} counts other lines: {receipt['lines']}")
            runs = sum(count for row, count in self._facts.executions.items() if row.startswith(f"{name}:"))
            charged = receipt["tokens"]["computed_decode"]
            most = runs * self._facts.max_decodes
            self._expect(charged <= most, f"the receipt of {name} charges {charged} tokens for {runs} runs of rows")
            text = json.dumps(receipt, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            key = bytes.fromhex((self._dir / "receipt-key").read_text())
            signed = {**receipt, "hash": hmac.new(key, text.encode(), "sha256").hexdigest()}
            for shown in self._facts.receipts.get(name, ()):
                self._expect(shown == signed, f"another receipt of {name} was shown before")

    def _check_result_file(self, batch: sqlite3.Row, kind: str, wanted: list[str]) -> None:
        file_id = batch[f"{kind}_file_id"]
        if file_id is None:
            self._expect(not wanted, f"B2: {batch['id']} has no {kind} file for {len(wanted)} lines")
            return
        self._expect(file_id == batch[f"planned_{kind}_file_id"], f"B5: {batch['id']} has an unplanned {kind} file")
        if file_id not in self._files or not (self._dir / "files" / file_id).exists():
            self.found.append(f"B16: {file_id} of {batch['id']} does not resolve")
            return
        content = (self._dir / "files" / file_id).read_bytes()
        self._expect(content.endswith(b"\n"), f"B2: the {kind} file of {batch['id']} is torn")
        try:
            found = [json.loads(line)["custom_id"] for line in content.splitlines()]
        except ValueError:
            self.found.append(f"B2: the {kind} file of {batch['id']} has a line that does not parse")
            return
        self._expect(found == wanted, f"B2, B20: the {kind} file of {batch['id']} has other lines than its rows")

    def _check_history(self, batch_id: str, seen: list[dict[str, Any]]) -> None:
        for before, after in pairwise(seen):
            if not after:
                return
            moved = before["status"] == after["status"] or after["status"] in LEGAL.get(before["status"], ())
            self._expect(moved, f"B4: {batch_id} went from {before['status']} to {after['status']}")
            for at in TIMES:
                self._expect(before[at] in (None, after[at]), f"B4: {at} of {batch_id} changed")
            for name in ("output_file_id", "error_file_id"):
                self._expect(before[name] in (None, after[name]), f"B5: {name} of {batch_id} changed")
            counts, later = _counts(before), _counts(after)
            self._expect(all(a <= b for a, b in zip(counts, later, strict=True)), f"B6: {batch_id} counts back")
            self._expect(later[1] + later[2] <= later[0], f"B6: {batch_id} counts more than its lines")


def _number(text: str) -> float:
    """A number as it is signed: whole ones without a fraction."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _counts(shown: dict[str, Any]) -> tuple[int, int, int]:
    """(total, completed, failed) of a batch object, or of a row."""
    counts = shown.get("request_counts")
    if counts is None:
        return shown["num_total"], shown["num_completed"], shown["num_failed"]
    return counts["total"], counts["completed"], counts["failed"]
