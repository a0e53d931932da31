"""The replicas' own series on the gateway's page, each with the label ``replica``, so that sums are the cluster's.

Series that servers read from their shared database are equal on all of them. They are shown once, without the label.
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

from neaptide.cluster.gateway.replicas import Replica, ReplicaStatus

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Timeout of a replica's page. A slower replica is missing from this scrape: a scraper waits 10 s for all of them."""
OURS = ("neaptide_", "vllm:")
"""Prefixes of the series to keep. The others are about a replica's process, and would clash with the gateway's own."""
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
"""Families of which servers read the values from the database; counters without their ``_total``."""
BEHIND_S = 15.0
"""How long older counts are ignored. Each server reads the database every few seconds at its own time, so counts of
another one may be older than those shown. Prometheus would take a falling counter for a restarted one. A lower count
that lasts longer is real."""


class ReplicaSeries(Collector):
    """Merged series of all replicas; ``refresh`` before a scrape."""

    def __init__(self, registry: CollectorRegistry, http: httpx.AsyncClient) -> None:
        self._http = http
        self._families: list[Metric] = []
        self._counted: dict[str, tuple[float, list[Sample]]] = {}
        """Time and samples last shown of the families that the database counts."""
        registry.register(self)

    async def refresh(self, replicas: Iterable[Replica]) -> None:
        """Fetches the pages of all replicas that answer. A replica that does not answer has no series until it does."""
        asked = [replica for replica in replicas if replica.state is not ReplicaStatus.LOST]
        pages = await asyncio.gather(*map(self._page, asked))
        named = [(replica.name, page) for replica, page in zip(asked, pages, strict=True) if page is not None]
        # In a thread: parsing takes milliseconds, during which streams must continue.
        families = await asyncio.to_thread(merged, named)
        now_s = asyncio.get_running_loop().time()
        for family in families:
            if family.name in OF_THE_DATABASE and family.type in ("counter", "histogram"):
                family.samples = self._not_behind(family, now_s)
        self._families = families

    def _not_behind(self, family: Metric, now_s: float) -> list[Sample]:
        """Its samples, or the ones already shown if those are newer."""
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
    """The families of pages in the classic text format, each labelled with its replica's name. Raises ValueError for
    other formats."""
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
