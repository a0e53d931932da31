"""Environment variables of the client commands."""

import os
from collections.abc import Mapping

from neaptide.server.settings_sources import ENV_PREFIX


def client_base_url(environ: Mapping[str, str] = os.environ) -> str:
    """Base URL of the server for client commands; a flag overrides it."""
    return environ.get(f"{ENV_PREFIX}BASE_URL") or "http://127.0.0.1:8000"


def sendable(key: str, source: str) -> str:
    """Returns the key if a header can carry it. ``source`` names its origin. Raises ValueError with one line."""
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{source}: there must be one key, in printable ASCII characters")
    return key


def client_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """API key for client commands; a flag overrides it. If the variable lists a server's keys, the first one."""
    first = environ.get(f"{ENV_PREFIX}API_KEY", "").split(",")[0]
    if not first:
        return None
    from neaptide.server.http.auth import split_marks  # the web framework, which no other command should wait for

    return split_marks(first)[0]
