"""Which web pages may send requests that change something.

A browser sends a page's form or file to any server that it reaches, without asking, and puts the page's site in
``Origin`` and its relation to the server in ``Sec-Fetch-Site``. Pages can set neither.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from neaptide.server.edge.errors import PermissionDeniedError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


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
