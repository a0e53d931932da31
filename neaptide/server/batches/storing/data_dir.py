"""The data directory: ensures that it is ours, that one server uses it, and that no other user can read it.

A directory that we made has a mark. One without a mark is accepted only if it is empty or has our database, as an old
version left it. Any other is refused and not changed.
"""

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from neaptide.engine.private_files import DIRECTORY_MODE, FILE_MODE, make_private_directory, private_opener

logger = logging.getLogger(__name__)

MARK_NAME = "neaptide-data-dir"
FORMAT = 1
"""Version of the layout; the database has its own schema version."""
DATABASE_NAME = "neaptide.db"
LOCK_NAME = "lock"
FILES, JOBS, PROFILES, MOVED_ASIDE = "files", "jobs", "profiles", "moved-aside"
COMMITS = "commits"
"""Count of the database's acknowledged commits, see ``databases/commit_count.py``."""
CACHE = "cache"
"""Copies of files that are on shared storage, in place of ``FILES``."""
TEMPORARY = "tmp"
"""Temporary files of child processes; emptied at every start."""
KERNELS = "kernels"
"""Kernels that the engine compiled, where its user has no home directory."""
REQUEST_LOG = "engine-requests.jsonl"
RECEIPT_KEY = "receipt-key"
"""Secret that receipts of batches are hashed with."""

_FOLDERS = (FILES, JOBS, PROFILES, MOVED_ASIDE, CACHE, TEMPORARY)
_MARK_TEMP = f"{MARK_NAME}.tmp"
_WAL_NAME = f"{DATABASE_NAME}-wal"
_DATABASE_PARTS = (DATABASE_NAME, _WAL_NAME, f"{DATABASE_NAME}-shm", f"{DATABASE_NAME}-journal")
_BLANK = {LOCK_NAME, _MARK_TEMP, "lost+found", *_DATABASE_PARTS}
"""Entries that an interrupted first start may leave, or that a new file system has."""
_OUR_TABLES = {"files", "batches", "batch_lines"}
_SHOWN_NAMES = 3


WAY_BACK = "install that version again, or put back the copy from before the upgrade"
"""What to do about data of a newer version."""


class StoreError(Exception):
    """The data directory cannot be used; the message says why in one line."""


class DataDirLockedError(StoreError):
    """Another server uses the data directory."""


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable, which a rename alone does not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DataDir:
    """The data directory of one server or one offline command, from ``open`` to ``close``. Blocking."""

    def __init__(self, path: Path, has_database: bool = True) -> None:
        self.path = path
        self.database = path / DATABASE_NAME
        self._is_home_of_database = has_database
        """False: the database is elsewhere, and none may be here."""
        self._lock_fd: int | None = None
        self._opened: dict[Path, tuple[int, int]] = {}
        """Device and inode of the paths that must stay in place while in use."""

    def open(self, create: bool = True) -> None:
        """Opens the directory: refuses a foreign one, locks it, marks it, and removes other users' access.

        Raises:
            DataDirLockedError: another server uses it.
            StoreError: it is foreign, damaged, without its database, not writable, or (without ``create``) missing.
        """
        try:
            self._make_or_find(create)
            is_marked = self._is_marked()
            if not is_marked:
                self._refuse_foreign(create)
            self._refuse_odd_kinds()
            self._lock_fd = _lock(self.path / LOCK_NAME)
            self._refuse_wrong_database(is_marked)
            self._take(is_marked)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot use the data directory {self.path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock; safe to call twice."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # ---- while it is in use ----

    def note_place(self, *folders: Path) -> None:
        """Records the paths that ``missing`` checks; ``folders`` have data that is nowhere else."""
        # The file is open, so that no new file can get its inode; a new directory may get the old one's.
        kept_open = self.database if self._is_home_of_database else self.path / LOCK_NAME
        self._opened = {path: identity_of(path) for path in (self.path, kept_open, *folders)}

    def missing(self) -> str | None:
        """Why new data would not be found here again; None if it would.

        If the directory is removed, unmounted or replaced, open files give no error.
        """
        return first_missing(self._opened)

    # ---- looking ----

    def _make_or_find(self, create: bool) -> None:
        if create and not os.path.lexists(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
        if not self.path.is_dir():
            found = "is not a directory" if os.path.lexists(self.path) else "does not exist"
            raise StoreError(f"the data directory {self.path} {found}")

    def _is_marked(self) -> bool:
        mark = self.path / MARK_NAME
        if not os.path.lexists(mark):
            return False
        try:
            version = json.loads(mark.read_bytes())["format"]
            if type(version) is not int or mark.is_symlink():
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise StoreError(
                f"{mark} is damaged; if the directory is a server's, remove that file and start again"
            ) from None
        if version > FORMAT:
            raise StoreError(f"the data directory was written by a newer neaptide (format {version}); {WAY_BACK}")
        return True

    def _refuse_foreign(self, create: bool) -> None:
        if self._tables() >= _OUR_TABLES:
            return
        if not create:
            raise StoreError(f"{self.path} is not a neaptide data directory")
        foreign = sorted(name for name in os.listdir(self.path) if not self._is_blank(name))
        if foreign:
            shown = ", ".join(foreign[:_SHOWN_NAMES]) + (", ..." if len(foreign) > _SHOWN_NAMES else "")
            raise StoreError(
                f"{self.path} is not a neaptide data directory, and is not empty ({shown!r}); "
                "choose an empty or a new one with --data-dir"
            )

    def _is_blank(self, name: str) -> bool:
        """Whether an entry of a directory without mark and tables may be left by an interrupted start."""
        path = self.path / name
        if name in (FILES, JOBS):
            return path.is_dir() and not path.is_symlink() and not os.listdir(path)
        if name == LOCK_NAME:
            content = path.read_bytes()[:32] if path.is_file() and not path.is_symlink() else b"?"
            return not content.strip() or content.strip().isdigit()
        return name in _BLANK and (name == "lost+found" or self._has_database or name not in _DATABASE_PARTS)

    @property
    def _has_database(self) -> bool:
        return os.path.lexists(self.database)

    def _tables(self, is_ours: bool = False) -> set[str]:
        """Tables of the database, if there is one; does not change it.

        But SQLite must first roll back an interrupted write of our own database.
        """
        if not self._has_database:
            return set()
        if self.database.is_symlink() or not self.database.is_file():
            raise StoreError(f"the database {self.database} is not a plain file")
        try:
            try:
                return _tables_of(self.database, "ro")
            except sqlite3.OperationalError:
                if not is_ours:
                    raise
                return _tables_of(self.database, "rw")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreError(f"the database {self.database} cannot be opened: {error}") from error

    def _refuse_odd_kinds(self) -> None:
        """Refuses links in place of our directories, because their targets might not be ours to clean up."""
        for name in (FILES, JOBS, MOVED_ASIDE, CACHE, TEMPORARY):
            path = self.path / name
            if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
                raise StoreError(f"{path} must be a directory, and not a link: link or move the whole data directory")
        for name in (LOCK_NAME, MARK_NAME, REQUEST_LOG, COMMITS, RECEIPT_KEY, *_DATABASE_PARTS):
            path = self.path / name
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                raise StoreError(f"{path} must be a plain file")

    def _refuse_wrong_database(self, is_marked: bool) -> None:
        """Refuses a missing or foreign database, because without its own one every file would count as unknown."""
        if not self._is_home_of_database:
            if self._has_database:
                raise StoreError(
                    f"{self.path} holds an SQLite database with files and batches of its own; "
                    "choose another --data-dir, or leave --store out"
                )
            return
        if self._tables(is_ours=is_marked):
            return
        left = [name for name in (FILES, JOBS) if (self.path / name).is_dir() and os.listdir(self.path / name)]
        wal = self.path / _WAL_NAME
        if not self._has_database and wal.exists() and wal.stat().st_size:
            left.append(_WAL_NAME)
        if left:
            raise StoreError(
                f"the database {self.database} {self._state()}, but there is still {' and '.join(left)} next to it; "
                f"restore the database, or move {' and '.join(left)} away to start empty"
            )

    def _state(self) -> str:
        """Description of a database without tables, for the error."""
        if not self._has_database:
            return "is missing"
        if not self.database.stat().st_size:
            return "is blank"
        return f"has lost all its data with its write-ahead log {_WAL_NAME}, which is missing or damaged"

    # ---- taking ----

    def _take(self, is_marked: bool) -> None:
        _close_to_others(self.path)
        if not is_marked:
            with open(self.path / _MARK_TEMP, "w", opener=private_opener) as f:
                json.dump({"format": FORMAT}, f)
                f.flush()
                os.fsync(f.fileno())
            (self.path / _MARK_TEMP).replace(self.path / MARK_NAME)
            logger.info("%s is now marked as a neaptide data directory", self.path)
        if self._is_home_of_database and not self._has_database:
            # SQLite would make it readable for every user, and give its log the same mode.
            open(self.database, "xb", opener=private_opener).close()
        shutil.rmtree(self.path / TEMPORARY, ignore_errors=True)
        for name in (FILES, JOBS, PROFILES, TEMPORARY):
            make_private_directory(self.path / name)
        sync_directory(self.path)


def identity_of(path: Path) -> tuple[int, int]:
    """Device and inode of a path. Raises OSError."""
    found = path.stat()
    return found.st_dev, found.st_ino


def first_missing(opened: Mapping[Path, tuple[int, int]]) -> str | None:
    """The first path that is missing or replaced; None if all are in place."""
    for path, identity in opened.items():
        try:
            if identity_of(path) != identity:
                return f"{path} is not the one that was opened"
        except OSError as error:
            return f"{path} is missing: {error.strerror}"
    return None


def _tables_of(database: Path, mode: str) -> set[str]:
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode={mode}", uri=True)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {str(name) for (name,) in names}


def _lock(path: Path) -> int:
    """Takes an exclusive lock that ends with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        raise DataDirLockedError(
            f"another neaptide process ({holder or 'unknown'}) uses the data directory {path.parent}; "
            "stop it or choose another --data-dir"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _close_to_others(root: Path) -> None:
    """Removes other users' rights from all our entries, starting with the directory."""
    _set_mode(root, os.stat(root), DIRECTORY_MODE)
    for path, found in _ours(root):
        _set_mode(path, found, DIRECTORY_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE)


def _ours(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Plain files and directories below our names; does not follow links."""
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if Path(entry.path).parent == root and not _is_our_name(entry.name):
                    continue
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    if entry.name != MOVED_ASIDE:  # Its contents are not ours.
                        pending.append(Path(entry.path))
                    yield Path(entry.path), found
                elif stat.S_ISREG(found.st_mode):
                    yield Path(entry.path), found


def _is_our_name(name: str) -> bool:
    return name in (LOCK_NAME, MARK_NAME, COMMITS, RECEIPT_KEY, *_FOLDERS, *_DATABASE_PARTS) or name.startswith(
        REQUEST_LOG
    )


def _set_mode(path: Path, found: os.stat_result, mode: int) -> None:
    if stat.S_IMODE(found.st_mode) == mode:
        return
    try:
        os.chmod(path, mode)
    except PermissionError:
        # It may be another user's, such as the root of a mounted volume; our entries inside are closed anyway.
        logger.warning("%s belongs to another user; its permissions are not changed", path)
