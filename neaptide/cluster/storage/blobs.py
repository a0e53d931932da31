"""Bytes on storage that several servers reach: a mounted directory or a bucket.

A key is written once, and read only after a row of the database names it. So a blob needs no lock and no rename: an
interrupted write leaves a blob that no row names.
"""

import asyncio
import os
import secrets
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from neaptide.engine.private_files import DIRECTORY_MODE, FILE_MODE, private_opener
from neaptide.server.batches.sharing import BlobInfo
from neaptide.server.batches.storing.data_dir import MOVED_ASIDE, StoreError, sync_directory

MARK_KEY = "neaptide-blobs"
"""Key of the blob that holds the storage's name, which the database knows too."""
UPLOADS = "files"
NUM_THREADS = 16
"""More than the ten connections that an S3 client opens."""
PUT_S, SLOWEST_BYTES_PER_S = 60.0, 1_000_000
"""Time limit of an upload to a bucket, and the slowest rate that extends it. The library itself has no limit."""

P = ParamSpec("P")
T = TypeVar("T")


class BlobsUnavailableError(OSError):
    """The storage failed to do what was asked; the same may succeed later."""


def batch_key(batch_id: str, epoch: int) -> str:
    """A new key for a file that a server writes under its lease of a batch."""
    return f"{batch_id}/{epoch}-{uuid.uuid4().hex}"


class Blobs:
    """All blobs below one address of fsspec. Implements ``BlobStorage``. Faults are ``BlobsUnavailableError``.

    Raises:
        StoreError: there is no storage of this kind, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        # Imported here: a single server does without.
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        if "://" not in url:
            raise StoreError("the blobs need an address such as file:///DIRECTORY or s3://BUCKET/PREFIX")
        try:
            self._fs: Any
            self._fs, root = fsspec.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise StoreError(f"there is no blob storage at {url.partition('://')[0]}://: {error}") from error
        if url.startswith("s3://"):
            # The library retries five times when a network refuses, on top of botocore's own retries. Only botocore's
            # remain, as AWS_MAX_ATTEMPTS says.
            self._fs.retries = 1
        self._threads = ThreadPoolExecutor(NUM_THREADS, "blobs")
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)
        # An address may contain a password.
        self.name = f"{url.partition('://')[0]}://{self._root.rpartition('@')[2]}"

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call of the storage in a thread that nothing else needs. So a silent storage does not hold up the
        database's readers."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    def upload_key(self, file_id: str) -> str:
        """Key of a client's file, whose id is its own random number."""
        return f"{UPLOADS}/{file_id}"

    # ---- the storage as a whole ----

    def mark(self) -> str | None:
        """The storage's name; None if it has none yet."""
        with self._faults():
            try:
                return str(self._fs.cat_file(self._path(MARK_KEY)).decode("ascii", "replace")).strip()
            except FileNotFoundError:
                return None

    def set_mark(self, name: str) -> None:
        """Names the storage; makes the directory if there is none."""
        with self._faults():
            if self._is_local:
                os.makedirs(self._root, mode=DIRECTORY_MODE, exist_ok=True)
            self._fs.pipe_file(self._path(MARK_KEY), f"{name}\n".encode("ascii"))
            self._make_durable(MARK_KEY)

    def find(self) -> Iterator[BlobInfo]:
        """All blobs, except the mark."""
        with self._faults():
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
            for path, info in found.items():
                key = str(path).removeprefix(f"{self._root}/")
                if key != MARK_KEY:
                    yield BlobInfo(key, int(info["size"]), _unix_s(self._fs.modified(path)))

    # ---- one blob ----

    def put(self, source: Path, key: str) -> None:
        with self._faults():
            if self._is_local:
                # A directory that is no longer mounted looks like an empty one.
                self._require_mark()
                self._fs.makedirs(self._fs._parent(self._path(key)), exist_ok=True)
            if self._fs.async_impl:
                from fsspec.asyn import sync

                limit_s = PUT_S + source.stat().st_size / SLOWEST_BYTES_PER_S
                sync(self._fs.loop, _put_within, limit_s, self._fs, str(source), self._path(key))
            else:
                self._fs.put_file(str(source), self._path(key))
            self._make_durable(key)

    def fetch(self, key: str, target: Path, scratch: Path) -> None:
        """Copies a blob to ``target``, through a file in ``scratch`` on the same disk.

        Raises:
            FileNotFoundError: the storage has no such blob.
        """
        temp = scratch / f"upload-{secrets.token_hex(8)}.tmp"
        try:
            with open(temp, "xb", opener=private_opener):
                pass
            with self._faults():
                try:
                    self._fs.get_file(self._path(key), str(temp))
                except FileNotFoundError:
                    self._require_mark()
                    raise
            temp.rename(target)
        finally:
            temp.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        """Removes a blob; no error if there is none."""
        with self._faults():
            try:
                self._fs.rm_file(self._path(key))
                if self._is_local:
                    os.rmdir(self._fs._parent(self._path(key)))
            except FileNotFoundError:
                self._require_mark()
            except OSError:
                if self._is_local and self._fs.exists(self._path(key)):
                    raise
                # The directory has other blobs.

    def set_aside(self, key: str, folder: str) -> None:
        """Renames a blob to a key below ``moved-aside/FOLDER``, which no record will have."""
        target = f"{MOVED_ASIDE}/{folder}/{key}"
        with self._faults():
            if self._is_local:
                self._fs.makedirs(self._fs._parent(self._path(target)), exist_ok=True)
            self._fs.mv(self._path(key), self._path(target))
            self._make_durable(target)
        # Removes the directory if it is empty now; in a bucket nothing is left to remove.
        self.remove(key)

    # ---- inside ----

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _require_mark(self) -> None:
        if not self._fs.exists(self._path(MARK_KEY)):
            raise BlobsUnavailableError(f"{self.name} is not there: its mark {MARK_KEY} is missing")

    def _make_durable(self, key: str) -> None:
        """Syncs a directory to disk. A bucket is durable when it has answered."""
        if not self._is_local:
            return
        path = Path(self._path(key))
        with open(path, "rb") as f:
            os.fchmod(f.fileno(), FILE_MODE)
            os.fsync(f.fileno())
        for directory in path.parents:
            sync_directory(directory)
            if str(directory) == self._root:
                break

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, BlobsUnavailableError):
            raise
        except Exception as error:
            # Each kind of storage has its own errors, and not all are OSErrors.
            raise BlobsUnavailableError(f"{self.name}: {type(error).__name__}: {error}") from error


async def _put_within(limit_s: float, fs: Any, source: str, path: str) -> None:
    async with asyncio.timeout(limit_s):
        await fs._put_file(source, path)


def _unix_s(at: datetime) -> float:
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
