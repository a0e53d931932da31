"""The policy that is measured: a file, ``module:Class`` or an installed name."""

import hashlib
import inspect
import re
import sys
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType

from neaptide.engine.extensions import ExtensionError, reason
from neaptide.engine.scheduler.policies import find_policy
from neaptide.policy import Scheduler
from neaptide.simulation.points import parse_points

FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w+))?(?P<limits>@.+)?")
OF_THE_TREE = ("neaptide", "neaptide_lab")
"""Packages whose code has a digest already."""


@dataclass(slots=True, frozen=True)
class Contender:
    """A policy, and where its code is."""

    policy: str
    """As the simulator takes it: a name or ``module:Class``, perhaps with limits."""
    folder: Path
    """The working directory from which it can be imported."""
    digest: str
    """Digest of its files outside of Neaptide; empty if there are none."""


def contender(text: str) -> Contender:
    """Finds a policy: ``FILE.py``, ``FILE.py:Class``, ``module:Class`` or a name, each perhaps with limits.

    Raises:
        ValueError: there is no such policy, or its code cannot be used; the message is one line.
    """
    match = FILE.fullmatch(text)
    folder = Path.cwd()
    if match is not None:
        file = Path(match["file"])
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        folder = file.resolve().parent
        module = _imported(file)
        text = f"{file.stem}:{match['name'] or _only_policy(file, module)}{match['limits'] or ''}"
    points = parse_points(text)
    if len(points) != 1:
        raise ValueError("the gym takes one policy at a time")
    return Contender(text, folder, _digest(find_policy(points[0].policy)))


def _only_policy(file: Path, module: ModuleType) -> str:
    """The name of the only policy of a file."""
    names = [
        name
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Scheduler) and each.__module__ == file.stem
    ]
    usable = [name for name in names if not inspect.isabstract(vars(module)[name])]
    if len(usable) == 1:
        return usable[0]
    if usable:
        raise ValueError(f"{file} has several policies: name one, as {file}:{usable[0]}")
    if names:
        return names[0]  # it lacks something, which is said where it is looked for
    raise ValueError(f"{file} has no class derived from neaptide.policy.Scheduler")


def _imported(file: Path) -> ModuleType:
    if not file.stem.isidentifier():
        raise ValueError(f"{file} cannot be imported: give it a name of letters, digits and underscores")
    sys.path.append(str(file.resolve().parent))
    invalidate_caches()
    try:
        module = import_module(file.stem)
    except (Exception, SystemExit) as error:
        raise ExtensionError(f"{file} cannot be loaded: {reason(error, file.stem)}") from error
    if module.__file__ is None or Path(module.__file__).resolve() != file.resolve():
        raise ValueError(f"{file} has the name of another module, {module.__file__}: rename it")
    return module


def _digest(policy: type[Scheduler]) -> str:
    """A digest of the policy's module and of the modules next to it that it has imported."""
    root = policy.__module__.partition(".")[0]
    if root in OF_THE_TREE:
        return ""
    folder, roots = _folder(sys.modules[root]), {root}
    if folder is not None and not folder.is_relative_to(sys.prefix):  # not among the installed packages
        roots |= {name for name in list(sys.modules) if "." not in name and _folder(sys.modules[name]) == folder}
    files = {
        Path(file)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in roots - {*OF_THE_TREE} and (file := getattr(module, "__file__", None)) is not None
    }
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _folder(module: ModuleType) -> Path | None:
    """The directory in which a module, or a package's own directory, lies."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    return Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
