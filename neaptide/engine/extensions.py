"""Loads extensions of other packages: policies, orders of the offline pool, commands.

A package declares them as entry points. A single file needs no package: ``module:Name`` is imported from the installed
packages, from ``PYTHONPATH``, or from the working directory.
"""

import os
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from typing import Any

POLICIES = "neaptide.policies"
ORDERS = "neaptide.orders"
COMMANDS = "neaptide.commands"


class ExtensionError(ValueError):
    """An extension cannot be used; the message is one line for the user."""


def is_path(name: str) -> bool:
    """Whether the name is of the form ``module:Name``."""
    return ":" in name


def known_names(group: str, built_in: Iterable[str]) -> list[str]:
    """Names of an entry point group and of the built-in objects, sorted."""
    return sorted({*built_in, *(point.name for point in entry_points(group=group))})


def refusal(group: str, built_in: Iterable[str], kind: str, name: str) -> ExtensionError:
    """The error for an unknown name."""
    names = ", ".join(known_names(group, built_in))
    return ExtensionError(f"there is no {kind} {name!r}; there are: {names}; your own is named module:Name")


@cache
def load(group: str, kind: str, name: str) -> Any:
    """The object that an entry point of the group or ``module:Name`` names; None if no entry point has the name.

    Raises:
        ExtensionError: it cannot be imported.
    """
    if is_path(name):
        return _imported(kind, name)
    points = entry_points(group=group, name=name)
    return _imported(kind, next(iter(points)).value, name) if points else None


def _imported(kind: str, path: str, name: str | None = None) -> Any:
    """Imports ``module:Name``.

    Args:
        name: the user's name for it, if that is not the path.
    """
    title = f"the {kind} {name or path!r}"
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise ExtensionError(f"{title} is not of the form module:Name")
    try:
        found = _module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part, None)
    except (Exception, SystemExit) as error:
        raise ExtensionError(f"{title} cannot be loaded: {reason(error, module_name)}") from error
    if found is None:
        raise ExtensionError(f"{title} cannot be loaded: the module {module_name} has no {attribute!r}")
    return found


def _module(name: str) -> Any:
    """The module. The working directory is searched after all other places, so that nothing there hides a library."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not _is_about(error, name) or os.getcwd() in sys.path:
            raise
    sys.path.append(os.getcwd())
    invalidate_caches()
    return import_module(name)


def _is_about(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the module itself or its package was not found, and not a module that it imports."""
    return error.name is not None and f"{name}.".startswith(f"{error.name}.")


def reason(error: BaseException, module_name: str = "") -> str:
    """One line that says what failed in an extension, and where.

    Args:
        module_name: the module that was to be imported.
    """
    if isinstance(error, ModuleNotFoundError) and _is_about(error, module_name):
        return f"no module {error.name!r} among the installed packages, in PYTHONPATH or in {os.getcwd()}"
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
