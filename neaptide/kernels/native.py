"""Compiles this package's C sources into shared libraries, with the system's compiler on first use.

Libraries are cached on disk. Without a writable cache they last for the process only. ``python -m
neaptide.kernels.native`` compiles all of them into the package itself, as the build of an image does; a processor of
another kind finds none of its own there and compiles.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
_TUNED = ("-march=native",)
"""Flags that are dropped if the compiler rejects them."""
_FUSED = ("--param=avoid-fma-max-bits=0",)
"""Likewise, and first. For some processors (AMD's Zen) GCC rounds a product before it adds it to a lone sum, but not
before it adds it to one of several. A row's bits would then depend on how many are computed with it."""
_COMPILE_S = 120.0
PREBUILT = Path(__file__).parent / "compiled"
"""Directory of libraries that were compiled with the installation."""
_DIGEST_BYTES = hashlib.sha256().digest_size
"""A digest of this size is appended to each library file."""


class CompileError(Exception):
    """The C library cannot be built. The message is one line with the reason."""


@cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library of a C source file.

    The cache key covers the source, the compiler and its version, the flags and the machine's instruction set. So a
    cache that machines share, or an upgrade, never gives a wrong library.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"there is no C compiler ({', '.join(COMPILERS)})")
    try:
        name = _library_name(source, compiler)
        if _is_whole(PREBUILT / name):
            return ctypes.CDLL(str(PREBUILT / name))
        directory = _cache_directory()
        if directory is None:
            logger.warning("compiling %s at every start: no cache directory can be written", source.name)
            with tempfile.TemporaryDirectory(prefix="neaptide-native-") as own:
                _compile(compiler, source, Path(own) / name)
                return ctypes.CDLL(str(Path(own) / name))  # a loaded library no longer needs its file
        path = directory / name
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # when several processes start together, only one compiles
            if not _is_whole(path):
                logger.info("compiling %s, once", source.name)
                _compile(compiler, source, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(str(error)) from error


def compile_all() -> None:
    """Compiles every C source of the package into ``PREBUILT``. Raises CompileError or OSError."""
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"there is no C compiler ({', '.join(COMPILERS)})")
    PREBUILT.mkdir(exist_ok=True)
    for source in sorted(Path(__file__).parent.glob("*/*.c")):
        _compile(compiler, source, PREBUILT / _library_name(source, compiler))


def find_compiler() -> str | None:
    """Path of the system's C compiler; None if there is none."""
    return next((path for path in map(shutil.which, COMPILERS) if path is not None), None)


def openmp_parallel() -> int:
    """Address of the process's ``GOMP_parallel``, which runs a function on torch's threads; 0 if there is none.

    A second OpenMP runtime in our library would start threads of its own.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def _cache_directory() -> Path | None:
    """The user's cache directory; None if it cannot be written or there is no home directory."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        directory = (named if named.is_absolute() else Path.home() / ".cache") / "neaptide" / "native"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory if os.access(directory, os.W_OK) else None


def _is_whole(path: Path) -> bool:
    """Whether the library file is complete.

    After a crash of the machine the file may be empty, truncated or zeroed, and loading it could kill the process.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _library_name(source: Path, compiler: str) -> str:
    return f"{source.stem}-{_key(source, compiler)}.so"


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILE_S).stdout  # noqa: S603
    # the sources include these headers
    files = sorted([*source.parent.glob("*.[ch]"), *Path(__file__).parent.glob("*.h")])
    how = repr((compiler, version, _FLAGS, _TUNED, _FUSED, _machine())).encode()
    parts = [*(file.read_bytes() for file in files), how]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:24]


def _machine() -> tuple[str, ...]:
    """The machine facts that ``-march=native`` depends on."""
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
        for flags in (_FLAGS + _TUNED + _FUSED, _FLAGS + _TUNED, _FLAGS):
            command = [compiler, *flags, "-o", str(made), str(source)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S)  # noqa: S603
            except subprocess.TimeoutExpired as error:
                raise CompileError(f"{compiler} takes longer than {_COMPILE_S:g} s") from error
            if done.returncode == 0:
                content = made.read_bytes()
                # loaders ignore bytes after the end of a library
                made.write_bytes(content + hashlib.sha256(content).digest())
                made.replace(path)
                logger.info("compiled %s with %s", source.name, compiler)
                return
        raise CompileError(f"{compiler} fails: {(done.stderr.strip().splitlines() or ['no message'])[0]}")


if __name__ == "__main__":
    try:
        compile_all()
    except (CompileError, OSError) as error:
        sys.exit(f"neaptide: {error}")
