"""What client commands read of the environment."""

import os
from collections.abc import Mapping

from neaptide.server.settings_sources import ENV_PREFIX


def client_base_url(environ: Mapping[str, str] = os.environ) -> str:
    """The server that client commands talk to unless told otherwise."""
    return environ.get(f"{ENV_PREFIX}BASE_URL") or "http://127.0.0.1:8000"


def sendable(key: str, source: str) -> str:
    """The key, if a header can carry it. ``source`` says where it is from. Raises ValueError with one line."""
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{source}: there must be one key, in printable ASCII characters")
    return key


def client_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that client commands send unless told otherwise: where the variable is a server's, its first."""
    first = environ.get(f"{ENV_PREFIX}API_KEY", "").split(",")[0]
    if not first:
        return None
    from neaptide.server.edge.auth import split_marks  # the web framework, which no other command should wait for

    return split_marks(first)[0]
