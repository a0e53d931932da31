"""Simulations of an experiment in a file: a run that was cut goes on from those that it has."""

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

import neaptide
import neaptide_lab
from neaptide.simulation.measures import OutOfReach

T = TypeVar("T")

OUR_CODE = frozenset(
    f"engine/scheduler/{name}.py"
    for name in ("judgement", "offline_fill", "online_room", "packing", "residual", "traffic")
)
"""Code of our policy alone: what rivals have done does not depend on it."""
_DECIDING = (
    "data/profiles/*.json",
    "engine/**/*.py",
    "estimator/**/*.py",
    "executors/simulated/*.py",
    "loadgen/workloads/*.py",
    "simulation/**/*.py",
)


class Line(msgspec.Struct, Generic[T], forbid_unknown_fields=True):
    """One of the file."""

    name: str
    """Name of the simulated case."""
    code: str
    """Digest of the code that simulated it."""
    least_attainment: float
    result: T | None = None
    out_of_reach: str | None = None
    """Why the run was stopped: the attainment that it could no longer reach."""

    def answers(self, least_attainment: float) -> bool:
        return self.result is not None or self.least_attainment <= least_attainment


class KeptRuns(Generic[T]):
    """
    Args:
        result: the type of what a simulation gives.
        path: of the file, which may not be there yet; None keeps nothing.

    Raises:
        ValueError: the file is not one of these.
        OSError: it cannot be read or written.
    """

    def __init__(self, result: type[T], path: Path | None = None) -> None:
        self._decoder: msgspec.json.Decoder[Line[T]] = msgspec.json.Decoder(Line[result])  # type: ignore[valid-type]
        self._path = path
        self._lines: dict[tuple[str, str], Line[T]] = {}
        self.num_found = 0
        """Simulations that were asked for and not run."""
        if path is not None and path.exists():
            self._read(path)

    def run(self, name: str, code: str, least_attainment: float, simulate: Callable[[], T]) -> T:
        """What the file has of it, or else ``simulate``, whose end is kept.

        Raises:
            OutOfReach: fewer than ``least_attainment`` of the requests can attain: now, or in the run that was kept.
        """
        line = self._lines.get((name, code))
        if line is not None and line.answers(least_attainment):
            self.num_found += 1
        else:
            line = Line(name, code, least_attainment)
            try:
                line.result = simulate()
            except OutOfReach as error:
                line.out_of_reach = str(error)
            self._keep(line)
        if line.result is None:
            raise OutOfReach(line.out_of_reach)
        return line.result

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = self._decoder.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}: line {number} is not a run of this experiment: {error}") from error
            self._lines[line.name, line.code] = line
        if whole or content.startswith(b"{"):
            with path.open("r+b") as file:  # a run that was cut may have left half a line
                file.truncate(len(whole))
        elif content:
            raise ValueError(f"{path}: has no run of this experiment")

    def _keep(self, line: Line[T]) -> None:
        self._lines[line.name, line.code] = line
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")


def code_digest(also: Collection[str], besides: Collection[str] = ()) -> str:
    """A digest of every source and profile that a simulation depends on.

    Args:
        also: files of the experiment, below ``neaptide_lab``.
        besides: files below ``neaptide`` that do not count.
    """
    package, lab = Path(neaptide.__file__).parent, Path(neaptide_lab.__file__).parent
    found = {path.relative_to(package).as_posix(): path for pattern in _DECIDING for path in package.glob(pattern)}
    paths = [path for name, path in sorted(found.items()) if name not in besides]
    paths += sorted([*lab.glob("policies/*.py"), *(lab / name for name in also)])
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
