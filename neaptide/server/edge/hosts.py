"""Which ``Host`` headers are ours.

A web page can give a name of its own the address 127.0.0.1 and so reach a server that listens there without keys
(DNS rebinding). The browser sends the page's name as ``Host``, which tells.
"""

from collections.abc import Sequence
from ipaddress import ip_address


def is_loopback(name: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class HostFilter:
    """Admits loopback names and the names that an operator adds."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)

    @classmethod
    def of_settings(cls, names: Sequence[str], *, bound_to: str, keys_required: bool) -> "HostFilter | None":
        """None admits every name: where ``*`` is set, and by default unless every caller on loopback is let in."""
        if "*" in names or (not names and (keys_required or not is_loopback(bound_to))):
            return None
        return cls(names)

    def admits(self, host: str | None) -> bool:
        """Whether a ``Host`` header is ours. A client that sends none is no browser."""
        if host is None:
            return True
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        name = name.lower().rstrip(".")
        return name in self._names or is_loopback(name)
