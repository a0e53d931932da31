"""A replica of a simulated cluster: its reports and their times, and whether it takes work."""

from collections import deque
from enum import StrEnum

from neaptide.cluster.routing import RoutingFigures
from neaptide.cluster.simulation.shared_rows import LeasedRows
from neaptide.engine.kv.cache_digest import digest_of
from neaptide.engine.scheduler.online_load import LoadMeter
from neaptide.engine.scheduler.online_room import online_room
from neaptide.simulation.measures import CLOCK_ERROR_S
from neaptide.simulation.offline_feed import OfflineFeed
from neaptide.simulation.replica import SimulatedReplica

REPORT_S = 0.1
"""Time between two reports of a replica. If a tenth of the TTFT target is less, that is used."""
DIGEST_S = 1.0
"""Time between two reports that include the cache digest."""


class MemberState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class Member:
    """One replica of the cluster.

    Args:
        begins_s: time of its start; it serves from ``replica.now_s`` on.
    """

    def __init__(self, name: str, replica: SimulatedReplica, rows: OfflineFeed | LeasedRows, begins_s: float) -> None:
        self.name = name
        self.replica = replica
        self.rows = rows
        self.begins_s = begins_s
        self.ready_s = replica.now_s
        self.ended_s: float | None = None
        self.state = MemberState.STARTING if begins_s < self.ready_s else MemberState.SERVING
        self.is_parked = False
        """It has nothing to do until something happens in the cluster."""
        self.online_load = 0.0
        """Fraction of its time that its online targets need, by its last report."""
        self.num_failed_online = 0
        """Its unfinished requests when it was lost."""
        self._reports: deque[tuple[float, RoutingFigures]] = deque()
        self._next_report_s = self._next_digest_s = self.ready_s
        self._meter = LoadMeter()
        self._prompt_tokens_seen = 0

    @property
    def runs(self) -> bool:
        return self.state in (MemberState.SERVING, MemberState.DRAINING)

    def report_if_due(self) -> None:
        now_s = self.replica.now_s
        if now_s < self._next_report_s - CLOCK_ERROR_S:
            return
        scheduler = self.replica.core.scheduler
        self._next_report_s = now_s + min(REPORT_S, 0.1 * scheduler.config.ttft_slo_s)
        room, digest = online_room(scheduler), None
        if now_s >= self._next_digest_s:
            self._next_digest_s = now_s + DIGEST_S
            digest = digest_of(scheduler.kv.indexed_hashes())
        new_tokens = self.replica.online_prefill_tokens - self._prompt_tokens_seen
        self._prompt_tokens_seen += new_tokens
        self._meter.note(now_s, new_tokens)
        self.online_load = self._meter.load(now_s, room.streams_share, room.alone_token_s)
        figures = RoutingFigures(
            free_slack_ms=1e3 * room.free_slack_s,
            ttft_slo_ms=1e3 * scheduler.config.ttft_slo_s,
            prompt_token_ms=1e3 * room.prompt_token_s,
            digest=digest,
        )
        self._reports.append((now_s, figures))

    def reports_until(self, now_s: float) -> list[RoutingFigures]:
        """Reports that have reached the router by now."""
        found = []
        while self._reports and self._reports[0][0] <= now_s:
            found.append(self._reports.popleft()[1])
        return found

    def ends_until(self, now_s: float) -> int:
        """Number of online requests that have ended and that the router does not know to have ended."""
        ends_s, count = self.replica.online_ends_s, 0
        while ends_s and ends_s[0] <= now_s:
            ends_s.popleft()
            count += 1
        return count
