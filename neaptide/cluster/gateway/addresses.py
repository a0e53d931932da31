"""Where the servers behind a gateway are: a fixed list of URLs, or the addresses of a name that is looked up again and
again, such as a headless Service of Kubernetes."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from neaptide.cluster.gateway.replicas import Replicas

logger = logging.getLogger(__name__)

FOLLOW_S = 2.0
"""Interval between two look-ups. A new server waits this long for its first request."""
LOOK_UP_S = 5.0
"""Timeout of one look-up. A resolver that does not answer may keep its thread for longer."""

Addresses = dict[str, str]
"""URL of each server, by its name in replies, logs and series."""
LookUp = Callable[[], Awaitable[Addresses]]
"""The addresses now. Raises OSError or TimeoutError if they cannot be found out."""


def listed(urls: Sequence[str]) -> Addresses:
    """The servers of a list. A server's name is its host and port.

    Raises:
        ValueError: an entry is no ``http://HOST:PORT``, or occurs twice; the message is one line for the operator.
    """
    found: Addresses = {}
    for text in urls:
        url = text.strip().rstrip("/")
        name = _name_of(url)
        if name is None:
            raise ValueError(f"{text!r} is not of the form http://HOST:PORT")
        if name in found:
            raise ValueError(f"{name} occurs twice")
        found[name] = url
    if not found:
        raise ValueError("no server is named")
    return found


def _name_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        is_plain = not (parts.path or parts.query or parts.fragment or parts.username)
        is_whole = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port is not None
    except ValueError:
        return None
    return parts.netloc if is_plain and is_whole else None


def name_and_port(text: str) -> tuple[str, int]:
    """The two parts of ``NAME:PORT``. Raises ValueError for anything else."""
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not of the form NAME:PORT")
    return name, int(port)


async def look_up(name: str, port: int) -> Addresses:
    """The servers on all addresses of a name. A server's name is its address and port."""
    async with asyncio.timeout(LOOK_UP_S):
        infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in infos})
    shown = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return {one: f"http://{one}" for one in shown}


async def follow(find: LookUp, replicas: Replicas) -> None:
    """Keeps a gateway's replicas those that ``find`` returns. While it fails, the known ones stay: whether they answer
    is found out by asking them."""
    is_lost = False
    while True:
        try:
            found = await find()
        except (OSError, TimeoutError) as error:
            if not is_lost:
                logger.warning("cannot look up the servers: %s", str(error) or type(error).__name__)
            is_lost = True
        else:
            is_lost = False
            replicas.update(found)
        await asyncio.sleep(FOLLOW_S)
