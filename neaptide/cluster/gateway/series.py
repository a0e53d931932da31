"""The replicas' own series on the gateway's page: each with the label ``replica``, so that what a query adds up is the
cluster's.

What servers read from the database is the same at each of them: it is there once, without the label.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator, Sequence

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from neaptide.cluster.gateway.replicas import Replica, State

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""For a replica's page. One that takes longer is not on this one: a scraper waits 10 s for all of them."""
OURS = ("neaptide_", "vllm:")
"""What else a page has is about its process, and the gateway's process has the same names."""
OF_THE_DATABASE = frozenset(
    (
        "neaptide_batches",
        "neaptide_batch_requests_pending",
        "neaptide_batch_requests",
        "neaptide_batch_job_seconds",
        "neaptide_batch_deadline_slack_seconds",
        "neaptide_batch_oldest_age_seconds",
        "neaptide_batch_chunks",
        "neaptide_batches_waiting",
        "neaptide_files_bytes",
    )
)
"""Families, counters without their ``_total``."""
BEHIND_S = 15.0
"""Servers read the database every few seconds, each in its own time. Where another one says now what is counted there,
it may be behind for a moment, and a counter that falls is taken for one that began anew. For longer it has fallen."""


class ReplicaSeries(Collector):
    """``refresh`` before a scrape."""

    def __init__(self, registry: CollectorRegistry, http: httpx.AsyncClient) -> None:
        self._http = http
        self._families: list[Metric] = []
        self._counted: dict[str, tuple[float, list[Sample]]] = {}
        """Of families that the database counts: what is shown, and when it was taken."""
        registry.register(self)

    async def refresh(self, replicas: Iterable[Replica]) -> None:
        """Asks those that answer. One that does not has no series until it does."""
        asked = [replica for replica in replicas if replica.state is not State.LOST]
        pages = await asyncio.gather(*map(self._page, asked))
        named = [(replica.name, page) for replica, page in zip(asked, pages, strict=True) if page is not None]
        # In a thread: parsing takes milliseconds, and streams are to go on.
        families = await asyncio.to_thread(merged, named)
        now_s = asyncio.get_running_loop().time()
        for family in families:
            if family.name in OF_THE_DATABASE and family.type in ("counter", "histogram"):
                family.samples = self._not_behind(family, now_s)
        self._families = families

    def _not_behind(self, family: Metric, now_s: float) -> list[Sample]:
        """Its samples, or those that are shown, if it is behind them."""
        taken_s, shown = self._counted.get(family.name, (-math.inf, []))
        then = {_key(one): one.value for one in shown}
        is_behind = any(one.value < then.get(_key(one), -math.inf) for one in family.samples)
        if not is_behind or now_s - taken_s > BEHIND_S:
            self._counted[family.name] = now_s, family.samples
        return self._counted[family.name][1]

    async def _page(self, replica: Replica) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await self._http.get(f"{replica.url}/metrics")
            return reply.raise_for_status().text
        except (httpx.HTTPError, TimeoutError) as error:
            logger.warning("the series of %s are missing: %s", replica.name, type(error).__name__)
            return None

    def collect(self) -> Iterator[Metric]:
        """Called by the exposition."""
        return iter(self._families)


def _key(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def merged(pages: Sequence[tuple[str, str]]) -> list[Metric]:
    """Families of pages in the classic text form, each with its replica's name. Raises ValueError for other texts."""
    families: dict[str, Metric] = {}
    for name, page in pages:
        for family in text_string_to_metric_families(page):
            if not family.name.startswith(OURS) or family.name.endswith("_created"):
                continue
            if family.name not in OF_THE_DATABASE:
                family.samples = [one._replace(labels={"replica": name, **one.labels}) for one in family.samples]
            elif family.name in families and families[family.name].samples:
                continue
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    return list(families.values())
