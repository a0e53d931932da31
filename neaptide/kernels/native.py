"""C sources of this package as libraries: compiled with the system's compiler on first use, then kept in a cache, or
for the process alone where there is none to write to."""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
_TUNED = ("-march=native",)
"""Left out where the compiler does not know it."""
_COMPILE_S = 120.0
_DIGEST_BYTES = hashlib.sha256().digest_size
"""Behind each library, of all before."""


class CompileError(Exception):
    """There is no library; the message is one line that says why."""


@cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library of a C file.

    It is looked up by what the source says, the compiler and its version, the flags and the machine's instruction set,
    so that a cache that several machines share, or an upgrade, never gives a wrong one.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"there is no C compiler ({', '.join(COMPILERS)})")
    try:
        name = f"{source.stem}-{_key(source, compiler)}.so"
        directory = _cache_directory()
        if directory is None:
            with tempfile.TemporaryDirectory(prefix="neaptide-native-") as own:
                _compile(compiler, source, Path(own) / name)
                return ctypes.CDLL(str(Path(own) / name))  # a library that is loaded needs its file no more
        path = directory / name
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one compiles
            if not _is_whole(path):
                _compile(compiler, source, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(str(error)) from error


def find_compiler() -> str | None:
    """The system's, by its path."""
    return next((path for path in map(shutil.which, COMPILERS) if path is not None), None)


def openmp_parallel() -> int:
    """Address of the process's own ``GOMP_parallel``, which runs a function on the threads that torch has: a library of
    ours that brought another OpenMP would have threads beside them. 0 where there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def _cache_directory() -> Path | None:
    """The user's own; None where it cannot be written, or there is no such user."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        directory = (named if named.is_absolute() else Path.home() / ".cache") / "neaptide" / "native"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory if os.access(directory, os.W_OK) else None


def _is_whole(path: Path) -> bool:
    """Whether the file is there as it was written: what a machine that went down leaves may be empty, cut or zeroed,
    and to load that can end the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILE_S).stdout  # noqa: S603
    files = sorted([*source.parent.glob("*.[ch]"), *Path(__file__).parent.glob("*.h")])  # with what it includes
    how = repr((compiler, version, _FLAGS, _TUNED, _machine())).encode()
    parts = [*(file.read_bytes() for file in files), how]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


def _machine() -> tuple[str, ...]:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    kept = ("flags", "Features", "model", "model name", "cpu family", "vendor_id", "CPU part", "CPU implementer")
    return (platform.machine(), *(line for line in lines if line.partition("\t")[0].strip(" :") in kept))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Raises CompileError."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        for flags in (_FLAGS + _TUNED, _FLAGS):
            command = [compiler, *flags, "-o", str(made), str(source)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)  # noqa: S603
            except subprocess.TimeoutExpired as error:
                raise CompileError(f"{compiler} takes longer than {_COMPILE_S:g} s") from error
            if done.returncode == 0:
                content = made.read_bytes()
                made.write_bytes(content + hashlib.sha256(content).digest())  # nobody reads behind a library's end
                made.replace(path)
                logger.info("compiled %s with %s", source.name, compiler)
                return
        raise CompileError(f"{compiler} fails: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
