"""Checks settings at once that an engine would reject only after loading its model."""

import os
from pathlib import Path

from neaptide.extras import check_part
from neaptide.server.settings import Settings


def check_parts(settings: Settings) -> None:
    """Looks for what a server needs beyond the base installation. An engine on another interpreter finds its own.

    Raises:
        MissingPartError: a package is not installed; the message is one line.
    """
    from neaptide.executors.registry import EXECUTORS

    kind = EXECUTORS.get(settings.executor)
    if settings.engine_python is None and kind is not None and kind.package is not None:
        check_part(kind.package)
    for package in ("fastapi", "sqlalchemy", "llguidance"):
        check_part(package)
    if settings.store is not None:
        check_part("psycopg")


def check_files(settings: Settings) -> None:
    """Checks the files that settings name.

    Raises:
        ValueError: the device profile does not exist, or the step log cannot be written. The message is one line.
    """
    if settings.profile is not None:
        from neaptide.estimator.device_profile import load_profile

        try:
            load_profile(settings.profile)
        except OSError as error:
            raise ValueError(f"profile = {settings.profile!r} cannot be read: {error.strerror}") from error
    if settings.step_log is not None:
        log = Path(settings.step_log)
        folder = log.absolute().parent
        if log.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(
                f"step_log = {settings.step_log!r} cannot be written: check the folder and its permissions"
            )
