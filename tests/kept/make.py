"""Makes what ``tests/kept`` keeps of one version: its own server is run, filled, killed in mid-batch and packed.

    python -m tests.kept.make PYTHON NAME

``PYTHON`` is the interpreter of a checkout of the version that is to be kept, ``NAME`` the folder to write.
"""

import hashlib
import json
import lzma
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.server import RunningServer
from tests.kills import signal_all
from tests.patience import until_here
from tests.postgres import PostgresServer, programs

HERE = Path(__file__).parent
WINDOW = "36500d"
"""So that neither files nor batches are over when they are opened."""
FLAGS = ("--completion-windows", f"24h,{WINDOW}", "--file-retention-days", "36500", "--shadow", "off")
NUM_SHORT, NUM_LONG = 16, 8
LONG_TOKENS = 400
WORDS = ("ball", "bird", "boat", "book", "cake", "cat", "dog", "duck", "fish", "frog", "hat", "moon", "sun", "tree")


def chat(custom_id: str, number: int, **fields: Any) -> dict[str, Any]:
    content = f"Tell me a story of the {WORDS[number % len(WORDS)]} and the {WORDS[(number * 5 + 3) % len(WORDS)]}."
    body = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": content}], "temperature": 0} | fields
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def complete_lines() -> list[dict[str, Any]]:
    lines = [chat(f"done-{number}", number, max_tokens=8, n=1 + number % 2) for number in range(NUM_SHORT)]
    # Refused when the file is checked: the batch has an error file, too.
    return [*lines, chat("done-refused", 0, temperature=9)]


def half_lines() -> list[dict[str, Any]]:
    """Short ones, which have ended when the server is killed, between long ones, which have not."""
    short = [chat(f"half-{number}", number, max_tokens=4) for number in range(NUM_SHORT)]
    for number in range(NUM_LONG):
        line = chat(f"half-long-{number}", number, max_tokens=LONG_TOKENS, ignore_eos=True, n=1 + number % 2)
        short.insert(3 * number, line)
    return short


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Made:
    """One running server of the version, and what a client was told by it."""

    def __init__(self, python: str, root: Path, *flags: str) -> None:
        self.server = RunningServer(root, *FLAGS, *flags)
        # Not this checkout's package, which lies in the directory from which we are run.
        self.server._command[:1] = [python, "-P"]
        self.facts: dict[str, Any] = {"files": {}}

    def upload(self, name: str, content: bytes, purpose: str = "batch") -> str:
        reply = self.server.http.post("/v1/files", files={"file": (name, content)}, data={"purpose": purpose})
        assert reply.status_code == 200, reply.text
        file_id = str(reply.json()["id"])
        self.facts["files"][file_id] = hashlib.sha256(content).hexdigest()
        return file_id

    def batch(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": WINDOW}
        reply = self.server.http.post("/v1/batches", json=body, headers={"Idempotency-Key": f"key-of-{file_id}"})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    def see(self, batch_id: str) -> dict[str, Any]:
        return dict(self.server.http.get(f"/v1/batches/{batch_id}").json())

    def fill_and_kill(self) -> None:
        with self.server:
            self.upload("notes.txt", b"kept\n" * 100, "user_data")
            self.upload("unused.jsonl", jsonl([chat("unused", 0)]))
            done = self.batch(self.upload("complete.jsonl", jsonl(complete_lines())))
            until_here(lambda: self.see(done)["status"] == "completed")
            self.facts["complete"] = seen = self.see(done)
            for name in ("output_file_id", "error_file_id"):
                content = self.server.http.get(f"/v1/files/{seen[name]}/content").content
                self.facts["files"][seen[name]] = hashlib.sha256(content).hexdigest()
            half = self.batch(self.upload("half.jsonl", jsonl(half_lines())))
            until_here(lambda: self.see(half)["request_counts"]["completed"] >= NUM_SHORT)
            processes = [
                psutil.Process(self.server.process.pid),
                *psutil.Process(self.server.process.pid).children(True),
            ]
            self.facts["half"] = self.see(half)
            signal_all(processes, signal.SIGKILL)
            psutil.wait_procs(processes)
        counts = self.facts["half"]["request_counts"]
        assert counts["completed"] < counts["total"], "it was too fast: nothing is left to be done"


def pack(folder: Path, target: Path) -> None:
    with lzma.open(target, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            if path.name == "lock" or path.name.endswith("-shm") or "profiles" in path.parts:
                continue
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=_of_nobody)


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def keep_directory(python: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = Made(python, Path(scratch))
        made.fill_and_kill()
        pack(made.server.data_dir, folder / "directory.tar.xz")
        (folder / "directory.json").write_text(json.dumps(made.facts, indent=1) + "\n")


def keep_shared(python: str, folder: Path) -> None:
    found = programs()
    assert found is not None, "PostgreSQL is not installed"
    postgres = PostgresServer(found)
    try:
        postgres.create()
        postgres.execute("CREATE DATABASE kept TEMPLATE template0")
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            made = Made(python, root, "--store", postgres.url("kept"), "--blobs", f"file://{root}/kept/blobs")
            made.fill_and_kill()
            command = ["pg_dump", "--no-owner", "--no-privileges", "--inserts", "--dbname", postgres.url("kept")]
            dump = subprocess.run(command, check=True, capture_output=True).stdout
            (root / "kept" / "dump.sql").write_bytes(dump)
            pack(root / "kept", folder / "shared.tar.xz")
            (folder / "shared.json").write_text(json.dumps(made.facts, indent=1) + "\n")
    finally:
        postgres.remove()


def main(python: str, name: str) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    keep_directory(python, folder)
    keep_shared(python, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
