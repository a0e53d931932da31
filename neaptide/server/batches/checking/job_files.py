"""Files of one job: prompts (``engine.offline.token_file``), prefix tree, sampling, and reply records.

They are written once, at validation, and durable before the job starts. After every restart they are mapped or read
again. They are removed when the batch has ended.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.engine.private_files import private_opener
from neaptide.server.batches.checking import reply_records
from neaptide.server.batches.checking.reply_records import ReplyWriter
from neaptide.server.batches.lines import CompiledLine
from neaptide.server.batches.storing.data_dir import sync_directory


class JobPlan(msgspec.Struct):
    """Sampling of each row. There are few sets of parameters for many rows, so this is a table and an index into it."""

    params_table: list[SamplingParams]
    params_index: list[int]
    stream_rows: list[int]
    replies_version: int = 0
    """Version of the reply file's records; 0 where there is no such file."""
    reply_places: bytes = b""
    """Where the records stand, as ``ReplyWriter.places``."""


class SealedPlan(NamedTuple):
    """A plan that matches its seal, and the version of its token file."""

    plan: JobPlan
    tokens_version: tuple[int, ...] | None


_decoder = msgspec.msgpack.Decoder(JobPlan)


class PlanLostError(Exception):
    """A plan is missing or damaged, but its storage works. It can be made again from the batch's input."""


class PlanWriter:
    """Writes the job's token file and plan while its lines are validated. Blocking."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._tokens = TokenFileWriter(stem)
        self._replies = ReplyWriter(plan_file(stem, REPLIES))
        self._plan = JobPlan([], [], [])
        self._known: dict[bytes, int] = {}
        self._closed = False
        self.num_tokens = 0
        self.digest = ""
        """Hash of the finished plan for its seal."""

    @property
    def num_rows(self) -> int:
        return len(self._plan.params_index)

    def append(self, line: CompiledLine) -> int:
        """Adds the line's rows and returns the first."""
        first_row = self.num_rows
        self._replies.append(line.reply, len(line.prompts))
        for prompt, params in zip(line.prompts, line.params, strict=True):
            if line.wants_stream:
                self._plan.stream_rows.append(self.num_rows)
            self._tokens.append(prompt)
            self.num_tokens += len(prompt)
            key = msgspec.msgpack.encode(params)
            index = self._known.setdefault(key, len(self._known))
            if index == len(self._plan.params_table):
                self._plan.params_table.append(params)
            self._plan.params_index.append(index)
        return first_row

    def close(self) -> None:
        """Makes everything durable."""
        self._closed = True
        self._tokens.close()
        self._replies.close()
        write_prefixes(self._stem)
        self._plan.replies_version, self._plan.reply_places = reply_records.VERSION, self._replies.places
        plan = msgspec.msgpack.encode(self._plan)
        self.digest = _seal_of(*(one.digest() for one in self._tokens.hashes), hashlib.sha256(plan).digest())
        with open(_plan_path(self._stem), "wb", opener=private_opener) as f:
            f.write(plan)
            f.flush()
            os.fsync(f.fileno())
        sync_directory(self._stem.parent)

    def abandon(self) -> None:
        """Removes the files written so far."""
        if not self._closed:
            self._closed = True
            self._tokens.close()
            self._replies.close()
        remove_plan(self._stem)


def plan_file(stem: Path, suffix: str) -> Path:
    """One of ``PLAN_SUFFIXES``."""
    return stem.with_name(f"{stem.name}{suffix}")


def _plan_path(stem: Path) -> Path:
    return plan_file(stem, ".plan")


def read_plan(stem: Path) -> JobPlan:
    """Reads a plan. Raises PlanLostError if it is missing or damaged, OSError if it cannot be read now."""
    with plan_faults(stem):
        return _decoder.decode(_plan_path(stem).read_bytes())


def read_sealed_plan(stem: Path) -> SealedPlan:
    """Reads a plan and compares it with its seal.

    Raises:
        PlanLostError: it is missing or damaged.
        OSError: it cannot be read now.
    """
    with plan_faults(stem):
        version = tokens_version(stem)
        check_seal(stem)
        plan = read_plan(stem)
        if len(TokenFile(stem)) != len(plan.params_index):
            raise ValueError("token file and plan do not belong together")
        return SealedPlan(plan, version)


@contextmanager
def plan_faults(stem: Path) -> Iterator[None]:
    """Separates a lost plan (``PlanLostError``) from an unavailable storage (any other ``OSError``)."""
    try:
        yield
    except (FileNotFoundError, ValueError, msgspec.DecodeError) as error:
        # Raises FileNotFoundError if the directory is missing: the state of the plan is then unknown.
        stem.parent.stat()
        raise PlanLostError(f"the plan of {stem.name} is lost: {error}") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise PlanLostError(f"the plan of {stem.name} cannot be read: {error}") from error


def tokens_version(stem: Path) -> tuple[int, ...] | None:
    """Version of the two files that the engine reads: device, inode, size and time of change, in nanoseconds, of each.
    None where one is missing. It tells whether other files have come into their places."""
    try:
        found = [plan_file(stem, suffix).stat() for suffix in (".tokens", ".offsets")]
    except FileNotFoundError:
        return None
    return tuple(number for one in found for number in (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns))


_SUFFIXES = (".tokens", ".offsets", ".plan")
PREFIXES = ".prefixes"
"""The file only orders rows. Jobs of earlier versions have none, and a damaged one is not used."""
REPLIES = ".replies"
"""The file only saves time. Jobs of earlier versions have none, and a damaged record is not used."""
SPARE_SUFFIXES = (PREFIXES, REPLIES)
"""Files that a job can run without."""
SEAL_SUFFIX = ".sha256"
PLAN_SUFFIXES = (*_SUFFIXES, *SPARE_SUFFIXES, SEAL_SUFFIX)
"""The file that is written last; it confirms that the others are complete."""


def _seal_of(*digests: bytes) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(stem: Path) -> str:
    digests = []
    for suffix in _SUFFIXES:
        with plan_file(stem, suffix).open("rb") as f:
            digests.append(hashlib.file_digest(f, "sha256").digest())
    return _seal_of(*digests)


def seal_plan(stem: Path, digest: str) -> None:
    """Stores the hash of a finished plan durably, so that a prompt damaged later is not answered.

    Args:
        digest: ``PlanWriter.digest`` of the written plan.

    Raises:
        PlanLostError: a file of the plan is missing, or differs from what was written.
        OSError: not possible now.
    """
    with plan_faults(stem):
        if _digest(stem) != digest:
            raise ValueError("it is not what was written")
    with open(_seal_path(stem), "w", opener=private_opener) as f:
        f.write(digest)
        f.flush()
        os.fsync(f.fileno())
    sync_directory(stem.parent)


def check_seal(stem: Path) -> None:
    """Compares a plan with its seal. Raises ValueError if it differs, FileNotFoundError if a file is missing."""
    if _seal_path(stem).read_text(errors="replace") != _digest(stem):
        raise ValueError("the token file or the plan is damaged")


def _seal_path(stem: Path) -> Path:
    return plan_file(stem, SEAL_SUFFIX)


def remove_plan(stem: Path) -> None:
    for suffix in PLAN_SUFFIXES:
        plan_file(stem, suffix).unlink(missing_ok=True)
