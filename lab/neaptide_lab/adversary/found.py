"""Found cases in files: what the adversary writes, and what a test replays."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from neaptide_lab.adversary.case import Case
from neaptide_lab.adversary.promises import PROMISES, Breach
from neaptide_lab.adversary.search import judged


@dataclass(slots=True, frozen=True, kw_only=True)
class Found:
    """A case that broke a promise of a policy."""

    promise: str
    policy: str
    about: str
    """The breach when it was found."""
    siblings: int
    """Random variants over which the breach is averaged."""
    case: Case
    known: str = ""
    """Why the promise is still broken; empty once it must be kept."""

    @property
    def title(self) -> str:
        return f"{self.promise} of {self.policy}, {self.case.num_requests} requests"

    def breach(self, policy: str | None = None) -> Breach:
        """The breach today, of another policy if one is named."""
        return judged(self.promise, policy or self.policy, self.case, self.siblings)


def read_found(path: Path) -> Found:
    """Reads a file of ``write_found``.

    Raises:
        ValueError: it is none, or its promise is unknown.
        OSError: it cannot be read.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Found)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a found case: {error}") from error
    if found.promise not in PROMISES:
        raise ValueError(f"{path}: there is no promise {found.promise!r}")
    return found


def write_found(found: Found, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def found_files(path: Path) -> list[Path]:
    """The file itself, or the cases in a directory."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path]
