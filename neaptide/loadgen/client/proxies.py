"""Proxies of the environment, which never apply to a server on this machine."""

import ipaddress
from urllib.parse import urlsplit

import httpx


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine: no proxy could reach that server."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def mounts_for(url: str) -> dict[str, httpx.AsyncBaseTransport | None]:
    """Transports of an asynchronous client: on loopback none of the environment's proxies."""
    return dict.fromkeys(("http://", "https://", "all://")) if is_loopback(url) else {}


def blocking_mounts_for(url: str) -> dict[str, httpx.BaseTransport | None]:
    """``mounts_for`` a blocking client."""
    return dict.fromkeys(("http://", "https://", "all://")) if is_loopback(url) else {}
