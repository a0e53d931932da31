"""Reads settings from flags, ``NEAPTIDE_*`` variables and a TOML file; the only place that does."""

import contextlib
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from neaptide.server.settings import OPTIONS, TOKENS, Settings, SettingsError, split_list, token_count, type_of

ENV_PREFIX = "NEAPTIDE_"
_OTHER_VARIABLES = frozenset({"BASE_URL", "CONFIG"})
"""Variables of client commands and of ``load_settings`` itself, which are no settings."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of texts", str: "a text"}


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config_file: str | None = None
) -> Settings:
    """Merges the three sources; entries of ``flags`` that are None count as not given.

    Raises:
        SettingsError: an unknown name, a value of the wrong type or out of range, an unreadable file.
    """
    values: dict[str, Any] = {}
    config_file = config_file or environ.get(f"{ENV_PREFIX}CONFIG")
    if config_file:
        try:
            values |= tomllib.loads(Path(config_file).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the settings file {config_file}: {error}") from error
    _check_names(values, "", f"in {config_file}")
    from_environment = {
        variable.removeprefix(ENV_PREFIX).lower(): text
        for variable, text in environ.items()
        if variable.startswith(ENV_PREFIX) and variable.removeprefix(ENV_PREFIX) not in _OTHER_VARIABLES
    }
    _check_names(from_environment, ENV_PREFIX, "in the environment")
    for name, text in from_environment.items():
        values[name] = split_list(text) if type_of(name) is tuple else text
    values |= {name: value for name, value in flags.items() if value is not None}
    for name, value in values.items():
        if OPTIONS[name].metavar == TOKENS and isinstance(value, str):
            with contextlib.suppress(ValueError):  # else the conversion refuses it
                values[name] = token_count(value)
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        # A SettingsError from __post_init__ arrives as the cause.
        raise SettingsError(str(error.__cause__ or _wrong_kind(str(error), values))) from error


def data_path(data_dir: str) -> Path:
    """Absolute path of the data directory.

    Raises:
        SettingsError: it begins with ``~`` and the user has no home directory, as in a container without HOME.
    """
    try:
        return Path(data_dir).expanduser().absolute()
    except RuntimeError:
        raise SettingsError(
            f"data_dir = {data_dir} cannot be used: this user has no home directory; name another with --data-dir"
        ) from None


def _wrong_kind(error: str, values: Mapping[str, Any]) -> str:
    """The error in the operator's words. Omits the value of a text, which may be a key."""
    found = re.search(r"`\$\.(\w+)", error)
    if found is None:
        return error
    name = found[1]
    kind = type_of(name)
    value = f" = {values[name]!r}" if kind in (int, float, bool) else ""
    choices = OPTIONS[name].choices
    return f"{name}{value} is not {_KINDS[kind]}" + (f": {' or '.join(choices)}" if choices else "")


def _check_names(names: Iterable[str], prefix: str, place: str) -> None:
    for name in names:
        if name not in OPTIONS:
            known = [*OPTIONS, *(variable.lower() for variable in _OTHER_VARIABLES if prefix)]
            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            written, meant = ((prefix + text).upper() if prefix else text for text in (name, nearest))
            raise SettingsError(f"there is no setting {written}, found {place}; the nearest is {meant}")
