"""Which text form of the series a scraper gets.

Prometheus names several forms in ``Accept`` with a quality each and parses what ``Content-Type`` says. OpenMetrics
is sent where it is asked for above the classic text, which everything else gets: a browser, ``curl``, a scraper that
asks for a version that is not spoken here.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS_VERSIONS = ("1.0.0", "0.0.1", "")
"""The second is what 1.0.0 was called as a draft; the last is an ``Accept`` without a version."""
SHARE = 0.1
"""Of the event loop, for expositions: one takes 5 to 10 ms."""
_TEXT_VERSIONS = ("0.0.4", "")


class _Range(NamedTuple):
    """One entry of an ``Accept`` header."""

    media_type: str
    parameters: Mapping[str, str]
    quality: float


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The series in the form that an ``Accept`` header asks for, and its content type."""
    if _wants_openmetrics(accept):
        # Unless told otherwise the library escapes the colon of ``vllm:`` in this form, though the form allows it. All
        # of our names are legal in every scheme that a scraper may name (a test holds them so): none needs an escape.
        encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0; escaping=allow-utf-8")
        return encode(registry), OPENMETRICS
    return generate_latest(registry), TEXT


class Scrapes:
    """Series for those who ask, whom no key names: those who ask at once get one exposition, and all expositions
    together take a bounded share of the event loop. Event loop only.

    Args:
        refresh: brings series up to date that are not so by themselves.
    """

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], Awaitable[None]]) -> None:
        self._registry = registry
        self._refresh = refresh
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[bool, tuple[float, tuple[bytes, str]]] = {}
        """By form: when it was begun, and what it said."""
        self._due_s = 0.0

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """As ``expose``, no older than the question."""
        loop, form = asyncio.get_running_loop(), _wants_openmetrics(accept)
        asked_s = loop.time()
        async with self._one_at_a_time:
            begun_s, found = self._kept.get(form, (-math.inf, (b"", "")))
            if begun_s < asked_s:
                await asyncio.sleep(self._due_s - loop.time())
                begun_s = loop.time()
                await self._refresh()
                rendering_s = time.perf_counter()
                found = expose(self._registry, accept)
                self._kept[form] = begun_s, found
                self._due_s = loop.time() + (time.perf_counter() - rendering_s) / SHARE
            return found


def _wants_openmetrics(accept: str) -> bool:
    ranges = [_range(entry) for entry in accept.split(",")]
    openmetrics_quality = max(
        (
            r.quality
            for r in ranges
            if r.media_type == "application/openmetrics-text"
            and r.parameters.get("version", "") in _OPENMETRICS_VERSIONS
        ),
        default=0.0,
    )
    text_quality = max(
        (
            r.quality
            for r in ranges
            if r.media_type in ("text/plain", "text/*", "*/*") and r.parameters.get("version", "") in _TEXT_VERSIONS
        ),
        default=0.0,
    )
    return openmetrics_quality > text_quality


def _range(entry: str) -> _Range:
    media_type, *rest = (part.strip() for part in entry.split(";"))
    pairs = (part.partition("=") for part in rest)
    parameters = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        quality = 0.0
    return _Range(media_type.lower(), parameters, quality)
