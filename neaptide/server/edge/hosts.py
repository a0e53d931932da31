"""Which ``Host`` headers are ours, and which web pages may send requests that change something.

A web page can give a name of its own the address 127.0.0.1 and so reach a server that listens there without keys
(DNS rebinding). The browser sends the page's name as ``Host``, which tells.

A browser sends a page's form or file to any server that it reaches, without asking, and puts the page's site in
``Origin`` and its relation to the server in ``Sec-Fetch-Site``. Pages can set neither.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from neaptide.server.edge.errors import PermissionDeniedError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


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


class OriginFilter:
    """Admits the server's own pages, pages of the sites in ``allowed`` (``*`` is any), and clients that are no
    browsers."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def refusal(self, method: str, headers: Headers) -> PermissionDeniedError | None:
        """The answer to a request that changes something for a page of another site; None admits the request."""
        if method in _READS or self._admits(headers):
            return None
        text = "A page of another site may not do this. The server's setting cors_origins names the sites that may."
        return PermissionDeniedError(text, code="cross_site_request")

    def _admits(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._allowed or origin in self._allowed:
            return True
        if site is not None:
            return site in ("same-origin", "none")
        # Browsers leave the relation out where there is no TLS.
        return origin is None or is_own(origin, headers.get("host", ""))


def is_own(origin: str, host: str) -> bool:
    """Whether an ``Origin`` is the site of a ``Host``. A proxy may have ended TLS, so the schemes may differ."""
    try:
        scheme, netloc = urlsplit(origin)[:2]
    except ValueError:
        return False
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and netloc.lower().removesuffix(port) == host.lower().removesuffix(port)
