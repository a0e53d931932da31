"""Text formats of the metrics for scrapers.

Prometheus lists several formats with qualities in ``Accept`` and parses by ``Content-Type``. OpenMetrics is sent if it
is preferred to the classic text. Everything else gets the classic text: browsers, ``curl``, and scrapers that ask for
an unknown version.
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
"""Accepted versions. "0.0.1" is the draft's name of 1.0.0; "" is an ``Accept`` without a version."""
SHARE = 0.1
"""Largest share of the event loop for expositions, each of which takes 5 to 10 ms."""
_TEXT_VERSIONS = ("0.0.4", "")


class _Range(NamedTuple):
    """One entry of an ``Accept`` header."""

    media_type: str
    parameters: Mapping[str, str]
    quality: float


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The metrics in the format that an ``Accept`` header asks for, and its content type."""
    if _wants_openmetrics(accept):
        # By default the library escapes the colon of ``vllm:`` here, though the format allows it. A test checks that
        # all our names are legal in every naming scheme, so none needs an escape.
        encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0; escaping=allow-utf-8")
        return encode(registry), OPENMETRICS
    return generate_latest(registry), TEXT


class Scrapes:
    """Expositions for callers without keys. Event loop only.

    Concurrent callers share one exposition, and all expositions together take a bounded share of the event loop.

    Args:
        refresh: updates the series that do not update by themselves.
    """

    def __init__(self, registry: CollectorRegistry, refresh: Callable[[], Awaitable[None]]) -> None:
        self._registry = registry
        self._refresh = refresh
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[bool, tuple[float, tuple[bytes, str]]] = {}
        """Start time and content of the last exposition in each format."""
        self._due_s = 0.0

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Like ``expose``; the values are no older than the call."""
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
