"""Simulations of a sweep in a file: a run that was cut goes on from those that it has."""

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

import neaptide
from neaptide.simulation.measures import OutOfReach
from neaptide.simulation.result import SimResult

OUR_CODE = frozenset(
    f"engine/scheduler/{name}.py"
    for name in ("controller", "cushion", "offline_fill", "online_room", "packing", "residual", "slack")
)
"""Code of our policy alone: what rivals have done does not depend on it."""
_DECIDING = (
    "data/profiles/*.json",
    "engine/**/*.py",
    "estimator/**/*.py",
    "executors/simulated/*.py",
    "experiments/rivals/loads.py",
    "loadgen/workloads/*.py",
    "simulation/**/*.py",
)


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One of the file."""

    name: str
    """What was simulated ..."""
    code: str
    """... and by which code."""
    least_attainment: float
    result: SimResult | None = None
    out_of_reach: str | None = None
    """Why it was given up: it could no longer attain so much."""

    def answers(self, least_attainment: float) -> bool:
        return self.result is not None or self.least_attainment <= least_attainment


class KeptRuns:
    """
    Args:
        path: of the file, which may not be there yet; None keeps nothing.

    Raises:
        ValueError: the file is not one of these.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: dict[tuple[str, str], Line] = {}
        self.num_found = 0
        """Simulations that were asked for and not run."""
        if path is not None and path.exists():
            self._read(path)

    def run(self, name: str, code: str, least_attainment: float, simulate: Callable[[], SimResult]) -> SimResult:
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
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}: line {number} is not a run of this experiment: {error}") from error
            self._lines[line.name, line.code] = line
        if whole or content.startswith(b"{"):
            with path.open("r+b") as file:  # a run that was cut may have left half a line
                file.truncate(len(whole))
        elif content:
            raise ValueError(f"{path}: has no run of this experiment")

    def _keep(self, line: Line) -> None:
        self._lines[line.name, line.code] = line
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")


def code_digest(besides: Collection[str] = ()) -> str:
    """Changes with any source or profile that a simulation depends on, ``besides`` these."""
    root = Path(neaptide.__file__).parent
    files = sorted((path.relative_to(root).as_posix(), path) for pattern in _DECIDING for path in root.glob(pattern))
    digest = hashlib.sha256()
    for name, path in files:
        if name not in besides:
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
