"""Polls another server's metrics into a record. The server is only ever asked for its page of metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from neaptide.observation.exposition import ExpositionError, Scrape, read_exposition
from neaptide.observation.record import Header, RecordWriter

TIMEOUT_S = 10.0
MAX_BYTES = 32 << 20
"""Largest page that is read."""


class PollingError(Exception):
    """A server that cannot be recorded. The message is one line."""


@dataclass(slots=True, frozen=True)
class Timer:
    """The clock of a polling loop."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    unix: Callable[[], float] = time.time


@dataclass(slots=True, frozen=True)
class Polling:
    """Address, frequency and length of a polling."""

    url: str
    every_s: float
    for_s: float
    engine: str | None = None


def record_polls(
    client: httpx.Client,
    what: Polling,
    path: Path,
    timer: Timer = Timer(),
    on_poll: Callable[[float], None] = lambda at_s: None,
) -> int:
    """Polls until the time is over or the caller is interrupted. Returns the number of polls that succeeded.

    A poll that fails is recorded as such, and the next one is made when it is due. Ctrl-C ends the record early. The
    file is touched only after the first poll.

    Raises:
        PollingError: the first poll fails.
        OSError: the record cannot be written.
    """
    address = metrics_url(what.url)
    start_s, started = timer.now(), timer.unix()
    try:
        first = scrape(client, address, what.engine, timer.now)
    except (httpx.HTTPError, httpx.InvalidURL, ExpositionError) as error:
        raise PollingError(f"{shown_url(address)}: {_line(error)}") from None
    header = Header(server=shown_url(what.url), started=started, every_s=what.every_s, labels=dict(first.labels))
    at_s = timer.now() - start_s
    count = 1
    with path.open("wb") as file:
        writer = RecordWriter(file, header)
        writer.add(at_s, first)
        try:
            for number in range(1, round(what.for_s / what.every_s) + 1):
                timer.sleep(max(start_s + number * what.every_s - timer.now(), 0.0))
                try:
                    found = scrape(client, address, what.engine, timer.now)
                except (httpx.HTTPError, ExpositionError) as error:
                    writer.fail(timer.now() - start_s, _line(error))
                    continue
                # The page was made just before it was read.
                at_s = max(timer.now() - start_s, at_s + 1e-6)
                writer.add(at_s, found)
                count += 1
                on_poll(at_s)
        except KeyboardInterrupt:
            pass
    return count


def scrape(client: httpx.Client, address: str, engine: str | None, now: Callable[[], float]) -> Scrape:
    """One page of metrics. Raises httpx.HTTPError or ExpositionError."""
    due_s = now() + TIMEOUT_S
    with client.stream("GET", address, timeout=TIMEOUT_S) as response:
        if not response.is_success:
            raise ExpositionError(f"the server answered HTTP {response.status_code}")
        content = bytearray()
        for part in response.iter_bytes():
            content += part
            if len(content) > MAX_BYTES:
                raise ExpositionError(f"the page has more than {MAX_BYTES >> 20} MiB")
            if now() > due_s:
                raise ExpositionError(f"the page took more than {TIMEOUT_S:g} s")
    return read_exposition(content.decode("utf-8", errors="replace"), engine)


def metrics_url(url: str) -> str:
    """The address of a server's metrics, given its address with or without ``/v1`` or ``/metrics``."""
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/") + "/metrics"


def shown_url(url: str) -> str:
    """The address without user, password and query, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
