"""C sources of this package as libraries: compiled with the system's compiler on first use, then kept in a cache."""

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
        directory = _cache_directory()
        path = directory / f"{source.stem}-{_key(source, compiler)}.so"
        with (directory / f"{path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one compiles
            if not path.exists():
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


def _cache_directory() -> Path:
    """The user's own; where that cannot be written, a new one that nobody else can write to."""
    directory = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neaptide" / "native"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="neaptide-native-"))
    return directory if os.access(directory, os.W_OK) else Path(tempfile.mkdtemp(prefix="neaptide-native-"))


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
                made.replace(path)  # whole or not at all
                logger.info("compiled %s with %s", source.name, compiler)
                return
        raise CompileError(f"{compiler} fails: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
