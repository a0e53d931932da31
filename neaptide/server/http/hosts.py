"""Checks of the ``Host`` header, and of web pages that send requests with side effects.

A web page can map its own name to 127.0.0.1 and so reach a server that listens there without keys (DNS rebinding).
The browser then sends the page's name as ``Host``.

A browser sends a page's form or file to any server without asking. It adds the page's site as ``Origin`` and its
relation to the server as ``Sec-Fetch-Site``. Pages cannot set either.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from neaptide.server.http.errors import PermissionDeniedError

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
    """Accepts loopback names and the names that an operator adds."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)

    @classmethod
    def of_settings(cls, names: Sequence[str], *, bound_to: str, keys_required: bool) -> "HostFilter | None":
        """The filter for the settings. None accepts every name: if ``*`` is set, or by default unless all loopback
        callers are accepted."""
        if "*" in names or (not names and (keys_required or not is_loopback(bound_to))):
            return None
        return cls(names)

    def admits(self, host: str | None) -> bool:
        """Whether a ``Host`` header is accepted. A client that sends none is not a browser."""
        if host is None:
            return True
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        name = name.lower().rstrip(".")
        return name in self._names or is_loopback(name)


class OriginFilter:
    """Accepts the server's own pages, pages of the sites in ``allowed`` (``*`` is any), and clients that are not
    browsers."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def refusal(self, method: str, headers: Headers) -> PermissionDeniedError | None:
        """The error for a request with side effects from a page of another site; None accepts the request."""
        if method in _READS or self._admits(headers):
            return None
        text = "Pages of other sites may not do this. Allow sites with the server's setting cors_origins."
        return PermissionDeniedError(text, code="cross_site_request")

    def _admits(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._allowed or origin in self._allowed:
            return True
        if site is not None:
            return site in ("same-origin", "none")
        # Browsers omit the relation without TLS.
        return origin is None or is_own(origin, headers.get("host", ""))


def is_own(origin: str, host: str) -> bool:
    """Whether an ``Origin`` is the site of a ``Host``. A proxy may have ended TLS, so the schemes may differ."""
    try:
        scheme, netloc = urlsplit(origin)[:2]
    except ValueError:
        return False
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and netloc.lower().removesuffix(port) == host.lower().removesuffix(port)
