"""Overview of a server for the dashboard: a report that gateways can merge, and the page's view of it."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from neaptide.engine.messages import Occupancy
from neaptide.engine.params import Tier
from neaptide.server.counterfactual.frames import ShadowAnswer
from neaptide.server.observe.facts import ServerFacts
from neaptide.server.observe.history import (
    INTERVAL_S,
    KEPT_S,
    Absence,
    Interval,
    LateChat,
    Targets,
    merged,
    quantile,
    since,
    total,
)
from neaptide.server.observe.status import Figures, Recent, Severity, Status, standstill, status

NOW_S, LATELY_S = 60, 300
POINT_S = 15
"""Time between two points of a plot."""
_RANK = (Severity.OK, Severity.INFO, Severity.WARN, Severity.BAD)


class ShownComparison(msgspec.Struct, kw_only=True, frozen=True):
    """The last counterfactual replay."""

    answer: ShadowAnswer
    age_s: float


class Report(msgspec.Struct, kw_only=True):
    """What one server knows of itself."""

    at_s: float
    """Unix time."""
    facts: ServerFacts = msgspec.field(default_factory=ServerFacts)
    is_up: bool = True
    has_started: bool = True
    has_given_up: bool = False
    engine_age_s: float = 0.0
    last_end: str = ""
    is_draining: bool = False
    is_paused: bool = False
    storage_failing: bool = False
    oldest_silent_s: float = 0.0
    silent: int = 0
    occupancy: tuple[int, ...] = ()
    """Values of ``Occupancy``'s fields, in order."""
    in_flight: dict[str, int] = {}
    """Number of requests by tier."""
    pending_lines: int = 0
    waiting_batches: int = 0
    outlooks: dict[str, int] = {}
    """Number of batches by deadline status."""
    intervals: list[Interval] = []
    absences: list[Absence] = []
    """Times without an engine; on a gateway, those of all servers."""
    late: list[LateChat] = []
    """The last ones, newest first."""
    replays: bool = False
    """Whether recent traffic is replayed under other policies."""
    comparison: ShownComparison | None = None

    def of(self, name: str) -> int:
        """A field of the engine's occupancy; 0 without an engine."""
        return dict(zip(Occupancy.__struct_fields__, self.occupancy, strict=False)).get(name, 0)


encoder = msgspec.json.Encoder()
report_decoder = msgspec.json.Decoder(Report)


def figures_of(report: Report) -> Figures:
    """The figures that the status depends on."""
    blocks = [report.of(f"blocks_{state}") for state in ("free", "cached", "online", "offline")]
    return Figures(
        is_up=report.is_up,
        has_started=report.has_started,
        has_given_up=report.has_given_up,
        engine_age_s=report.engine_age_s,
        last_end=report.last_end,
        back_s=report.at_s - max((one.end_s or report.at_s for one in report.absences), default=report.at_s),
        is_draining=report.is_draining,
        is_paused=report.is_paused,
        storage_failing=report.storage_failing,
        ttft_slo_s=report.facts.ttft_slo_s,
        tpot_slo_s=report.facts.tpot_slo_s,
        oldest_silent_s=report.oldest_silent_s,
        silent=report.silent,
        running_online=report.of("running_online"),
        running_offline=report.of("running_offline"),
        waiting_online=report.of("waiting_online"),
        blocks_total=sum(blocks),
        blocks_online=report.of("blocks_online"),
        pending_lines=report.pending_lines,
        waiting_batches=report.waiting_batches,
        infeasible=report.outlooks.get("infeasible", 0),
        at_risk=report.outlooks.get("at_risk", 0),
        now=recent(report, NOW_S),
        lately=recent(report, LATELY_S),
    )


def recent(report: Report, seconds: float) -> Recent:
    """Figures of the last ``seconds``, or of the time since the start if that is shorter."""
    span_s = max(min(seconds, report.at_s - report.facts.started_s), INTERVAL_S)
    whole = total(since(report.intervals, report.at_s - seconds))
    targets = _all(whole)
    outcomes = Counter(whole.outcomes)
    away = [(max(one.start_s, report.at_s - seconds), one.end_s or report.at_s) for one in report.absences]
    return Recent(
        seconds=span_s,
        judged=targets.ttft_met + targets.ttft_missed,
        ttft_missed=targets.ttft_missed,
        tpot_missed=targets.tpot_missed,
        missed=targets.missed,
        ttft_p50_s=quantile(whole.ttft, 0.5),
        ttft_p99_s=quantile(whole.ttft, 0.99),
        tpot_p50_s=quantile(whole.tpot, 0.5),
        tpot_p99_s=quantile(whole.tpot, 0.99),
        answers=outcomes.total() - outcomes["aborted"],
        errors=outcomes["server_error"],
        refused=outcomes["shed"],
        error_codes=tuple(code for code, _ in Counter(whole.errors).most_common()),
        online_tokens=whole.online_tokens,
        offline_tokens=whole.offline_tokens,
        steps=whole.steps,
        step_s=whole.step_s,
        predicted_s=whole.predicted_s,
        away_s=sum(max(0.0, end_s - start_s) for start_s, end_s in away),
    )


def _all(interval: Interval) -> Targets:
    found = Targets()
    for targets in interval.targets.values():
        found.add(targets)
    return found


# ---- the page's view ----


def view(report: Report, replicas: Mapping[str, Report] | None = None) -> dict[str, Any]:
    """What the dashboard shows, as plain data for JSON.

    Args:
        replicas: on a gateway, the reports that ``report`` was merged from; the worst status of them is told first.
    """
    figures = figures_of(report)
    judged = status(figures)
    if replicas is not None:
        judged = _worst({name: status(figures_of(one)) for name, one in replicas.items()}, judged)
    lately, now = figures.lately, figures.now
    whole = total(since(report.intervals, report.at_s - LATELY_S))
    return {
        "at_s": report.at_s,
        "status": {"severity": judged.severity.value, "sentence": judged.sentence, "cause": judged.cause},
        "standstill": standstill(figures),
        "facts": msgspec.to_builtins(report.facts),
        "latencies": [
            _latency("TTFT", lately.ttft_p50_s, lately.ttft_p99_s, figures.ttft_slo_s, lately.ttft_missed, lately),
            _latency("TPOT", lately.tpot_p50_s, lately.tpot_p99_s, figures.tpot_slo_s, lately.tpot_missed, lately),
        ],
        "now": {
            "online_tokens_per_s": now.online_tokens / now.seconds,
            "offline_tokens_per_s": now.offline_tokens / now.seconds,
            "oldest_silent_s": report.oldest_silent_s,
            "speed": lately.speed,
            "steps_within_margin": whole.steps_within_margin / whole.steps if whole.steps else None,
            "errors": lately.errors,
            "refused": lately.refused,
            "error_codes": lately.error_codes,
            "preemptions": whole.preemptions,
            **{name: report.of(name) for name in Occupancy.__struct_fields__},
        },
        "tiers": [_tier(tier, whole, report) for tier in Tier if tier is not Tier.BATCH],
        "pending_lines": report.pending_lines,
        "points": _points(report),
        "absences": [msgspec.to_builtins(one) for one in report.absences],
        "late": [msgspec.to_builtins(one) for one in report.late],
        "replays": report.replays,
        "comparison": None if report.comparison is None else _comparison(report.comparison),
    }


def _worst(statuses: Mapping[str, Status], own: Status) -> Status:
    if not statuses:
        return Status(Severity.BAD, "No replica answers. Every request gets 503.")
    name, worst = max(statuses.items(), key=lambda item: _RANK.index(item[1].severity))
    if _RANK.index(worst.severity) < _RANK.index(Severity.WARN):
        return own
    return Status(worst.severity, f"{name}: {worst.sentence}", worst.cause)


def _latency(
    name: str, p50_s: float | None, p99_s: float | None, target_s: float, missed: int, window: Recent
) -> dict[str, Any]:
    met = None if not window.judged else 1 - missed / window.judged
    return {"name": name, "p50_s": p50_s, "p99_s": p99_s, "target_s": target_s, "met": met, "judged": window.judged}


def _tier(tier: Tier, whole: Interval, report: Report) -> dict[str, Any]:
    targets = whole.targets.get(tier.value, Targets())
    return {
        "tier": tier.value,
        "in_flight": report.in_flight.get(tier.value, 0),
        "ttft_met": _share(targets.ttft_met, targets.ttft_missed),
        "tpot_met": _share(targets.tpot_met, targets.tpot_missed),
        "ended": whole.ended.get(tier.value, 0),
    }


def _share(met: int, missed: int) -> float | None:
    return met / (met + missed) if met + missed else None


def _points(report: Report) -> dict[str, list[Any]]:
    """Columns of the plots, one value for each ``POINT_S`` seconds of the last 15 minutes; None where nothing was
    reported."""
    end_s = int(report.at_s) // POINT_S * POINT_S
    groups: dict[int, list[Interval]] = {}
    for one in report.intervals:
        groups.setdefault(one.start_s // POINT_S * POINT_S, []).append(one)
    columns: dict[str, list[Any]] = {}
    first_s = max(end_s - KEPT_S, min(groups, default=end_s))
    for start_s in range(first_s, end_s, POINT_S):
        for name, value in _point(groups.get(start_s, [])).items():
            columns.setdefault(name, []).append(value)
        columns.setdefault("start_s", []).append(start_s)
    return columns


def _point(group: list[Interval]) -> dict[str, Any]:
    one = total(group)
    targets = _all(one)
    occupancy = dict(zip(Occupancy.__struct_fields__, one.occupancy, strict=False))
    return {
        "online_tokens_per_s": one.online_tokens / POINT_S if group else None,
        "offline_tokens_per_s": one.offline_tokens / POINT_S if group else None,
        "ttft_p50_s": quantile(one.ttft, 0.5),
        "ttft_p99_s": quantile(one.ttft, 0.99),
        "tpot_p50_s": quantile(one.tpot, 0.5),
        "tpot_p99_s": quantile(one.tpot, 0.99),
        "ttft_met": _share(targets.ttft_met, targets.ttft_missed),
        "tpot_met": _share(targets.tpot_met, targets.tpot_missed),
        "step_s": one.step_s / one.steps if one.steps else None,
        "predicted_s": one.predicted_s / one.steps if one.steps else None,
        **{name: occupancy.get(name) for name in _PLOTTED},
    }


_PLOTTED = ("blocks_online", "blocks_offline", "blocks_cached", "blocks_free", "blocks_reserved", "waiting_online")


def _comparison(found: ShownComparison) -> dict[str, Any]:
    answer = found.answer
    assert answer.real is not None
    rows = {"this server": answer.real} | {f"simulated: {name}": one for name, one in answer.shadows.items()}
    return {
        "age_s": found.age_s,
        "window_s": answer.end_s - answer.start_s,
        "requests": answer.requests,
        "rows": [
            {"policy": name, "met": one.met, "offline_tokens_per_s": one.offline_tokens_per_s}
            for name, one in rows.items()
        ],
    }


class OncePerSecond:
    """Content for callers without keys: made at most once a second, whatever their number. Event loop only."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._made_s = -math.inf
        self._content = b""

    async def get(self) -> bytes:
        """The content, at most a second old."""
        async with self._one_at_a_time:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._made_s >= 1.0:
                self._content = await self._make()
                self._made_s = now_s
            return self._content


# ---- a gateway ----


def merged_report(reports: Mapping[str, Report], at_s: float) -> Report:
    """Several servers as one: sums, the oldest waiting chat, and what all of them read from one database once."""
    found = list(reports.values())
    if not found:
        return Report(at_s=at_s, is_up=False, has_started=False)
    late = sorted((one for report in found for one in report.late), key=lambda one: -one.at_s)
    return Report(
        at_s=at_s,
        facts=msgspec.structs.replace(found[0].facts, started_s=min(one.facts.started_s for one in found)),
        is_up=any(one.is_up for one in found),
        has_started=any(one.has_started for one in found),
        engine_age_s=min(one.engine_age_s for one in found),
        is_paused=all(one.is_paused for one in found),
        storage_failing=any(one.storage_failing for one in found),
        oldest_silent_s=max(one.oldest_silent_s for one in found),
        silent=sum(one.silent for one in found),
        occupancy=tuple(map(sum, zip(*(one.occupancy for one in found if one.occupancy), strict=True))),
        in_flight=dict(sum((Counter(one.in_flight) for one in found), Counter[str]())),
        pending_lines=max(one.pending_lines for one in found),
        waiting_batches=min(one.waiting_batches for one in found),
        outlooks=dict(sum((Counter(one.outlooks) for one in found), Counter[str]())),
        intervals=merged(one.intervals for one in found),
        absences=[absence for one in found for absence in one.absences],
        late=late[:20],
    )
