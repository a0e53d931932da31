"""Prometheus series of the server, on a registry that is passed in.

Series about requests carry ``tier`` (priority, default, flex, batch). Series about engine steps carry ``class``
(online, offline), because steps distinguish only those. No label has a value that a caller can choose.
"""

import asyncio
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from neaptide.engine.messages import StepStats
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, OUT_OF_MEMORY, RequestClass, Tier, request_class
from neaptide.server.engine_client.events import RequestFailed
from neaptide.server.observe.exposition import Scrapes
from neaptide.server.observe.gaps import TallyCounter, TallyHistogram
from neaptide.server.observe.history import History, LateChat
from neaptide.server.observe.judgement import judge
from neaptide.server.observe.metrics_http import E2E_BUCKETS_S, HttpMetrics
from neaptide.server.observe.request_log import RequestRecord, RequestTerms, log_request
from neaptide.server.observe.timing import RequestTiming

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
STEP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)

_COUNTED = (
    ("dropped_tokens", "neaptide_dropped_tokens_total", "Number of tokens whose KV preemptions dropped."),
    ("recomputed_tokens", "neaptide_recomputed_tokens_total", "Number of tokens computed again after a preemption."),
    (
        "cached_tokens",
        "neaptide_prefix_cache_hit_tokens_total",
        "Number of prompt tokens that admitted requests found in the prefix cache.",
    ),
    (
        "admitted_prompt_tokens",
        "neaptide_prefix_cache_query_tokens_total",
        "Number of prompt tokens that admitted requests looked for in the prefix cache.",
    ),
    ("saved_blocks", "neaptide_kv_blocks_saved_total", "Number of KV blocks that were copied to host memory."),
    ("loaded_blocks", "neaptide_kv_blocks_loaded_total", "Number of KV blocks that came back from host memory."),
    (
        "memory_ran_out",
        "neaptide_memory_ran_out_total",
        "Number of times that a step did not fit into memory and went on in smaller pieces.",
    ),
    ("mask_s", "neaptide_mask_wait_seconds_total", "Time that steps waited for the masks of grammars, in seconds."),
    ("late_masks", "neaptide_late_masks_total", "Number of grammar masks that were late."),
    (
        "is_aborted",
        "neaptide_steps_given_up_total",
        "Number of steps without online work that an online arrival aborted.",
    ),
)
"""Summed fields of ``StepStats``, with their series and help."""
ONLINE_TIERS = tuple(tier for tier in Tier if request_class(tier) is RequestClass.ONLINE)
"""Tiers with latency targets."""
MAX_LATE = 20
"""Most late choices that are kept."""
_PHASES = ("schedule", "prepare", "model", "sample", "commit")


ENGINE_ERRORS = (NUMERICAL_ERROR, INTERNAL_ERROR, OUT_OF_MEMORY, "other")


class EndSink(Protocol):
    """Receives the ends of requests."""

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None: ...


class MetricsSink(EndSink, Protocol):
    """Additional series for the same events."""

    def on_gap(self, tier: Tier, gap_s: float) -> None: ...

    def on_gaps(self, tier: Tier, gaps_s: Sequence[float]) -> None: ...

    def on_tokens(self, tier: Tier, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> None: ...


class MetricsSource(Protocol):
    """Series that must be updated before a scrape."""

    async def refresh(self) -> None: ...


class ServerMetrics:
    """Metrics of requests, from the HTTP handlers, and of steps, from the engine.

    Args:
        wall: unix time in seconds, for the history.
    """

    def __init__(self, registry: CollectorRegistry, wall: Callable[[], float] = time.time) -> None:
        self.scrapes = Scrapes(registry, self.refresh)
        self.history = History(wall)
        self._silent: dict[int, RequestTiming] = {}
        """Online requests without a token yet, in order of arrival, by ``id``."""
        self.num_in_flight: Counts[str] = Counts()
        """Number of requests between arrival and reply, by tier."""
        self.late: deque[LateChat] = deque(maxlen=MAX_LATE)
        """The last choices that missed a target, newest first."""
        self._sinks: list[MetricsSink] = []
        self._end_sinks: list[EndSink] = []
        self._sources: list[MetricsSource] = []
        self._define_requests(registry)
        self._define_steps(registry)
        self._define_process(registry)
        self.http = HttpMetrics(registry)

    def add_source(self, source: MetricsSource) -> None:
        """Adds series that are updated before each scrape."""
        self._sources.append(source)

    async def refresh(self) -> None:
        """Updates the series that do not update by themselves."""
        for source in self._sources:
            await source.refresh()

    def add_sink(self, sink: MetricsSink) -> None:
        """Adds series that receive the request events, those of each token too."""
        self._sinks.append(sink)
        self._end_sinks.append(sink)

    def add_end_sink(self, sink: EndSink) -> None:
        """Adds what receives the ends of requests."""
        self._end_sinks.append(sink)

    # ---- requests ----

    def _define_requests(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"neaptide_request_{name}_seconds", text, ["tier"], buckets=buckets, registry=registry)

        self.ttft = histogram("ttft", "Time from arrival to the first token.", TTFT_BUCKETS_S)
        gaps = TallyHistogram(
            ["neaptide_request_itl_seconds"],
            "Gap between two outputs of one choice.",
            ["tier"],
            [[tier.value] for tier in Tier],
            ITL_BUCKETS_S,
            registry,
        )
        self._gaps_of_tier = {tier: gaps.tallies[(tier.value,)] for tier in Tier}
        self.tpot = histogram("tpot", "Mean time per token after the first.", ITL_BUCKETS_S)
        self.e2e = histogram("e2e", "Time from arrival to the end of the reply.", E2E_BUCKETS_S)
        self.queue = histogram("queue", "Time from arrival to the first scheduled step.", TTFT_BUCKETS_S)
        self.requests = Counter(
            "neaptide_requests_total",
            "Number of requests that have ended, well or not.",
            ["tier", "endpoint", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "neaptide_requests_in_flight",
            "Number of requests between arrival and the end of their reply.",
            ["tier"],
            registry=registry,
        )
        tokens = TallyCounter(
            "neaptide_tokens",
            "Number of prompt, cached and generated tokens, counted as they are computed.",
            ["tier", "kind"],
            [[tier.value, kind] for tier in Tier for kind in ("prompt", "cached", "generated")],
            registry,
        )
        self._token_counts = tokens.counts
        self.attained = Counter(
            "neaptide_slo_attained_total",
            "Number of choices that met their target.",
            ["tier", "slo"],
            registry=registry,
        )
        self.violated = Counter(
            "neaptide_slo_violated_total",
            "Number of choices that missed their target.",
            ["tier", "slo"],
            registry=registry,
        )
        self.rejected = Counter(
            "neaptide_admission_rejected_total",
            "Number of requests that were refused under load.",
            ["tier", "reason"],
            registry=registry,
        )
        self.engine_errors = Counter(
            "neaptide_engine_errors_total",
            "Number of requests and batch rows that the engine failed.",
            ["code"],
            registry=registry,
        )
        self._make_first_series()

    def _make_first_series(self) -> None:
        """Creates the series that alerts and boards divide by. A rate counts only from a series' first sample, and a
        ratio of missing series is empty."""
        for code in ENGINE_ERRORS:
            self.engine_errors.labels(code)
        for tier in Tier:
            self.in_flight.labels(tier.value)
            self.rejected.labels(tier.value, "overloaded")
        for tier in ONLINE_TIERS:
            for slo in ("ttft", "tpot"):
                self.attained.labels(tier.value, slo)
                self.violated.labels(tier.value, slo)

    def on_gap(self, tier: Tier, gap_s: float) -> None:
        """Notes the gap between two outputs of one choice."""
        self._gaps_of_tier[tier].observe(gap_s)
        for sink in self._sinks:
            sink.on_gap(tier, gap_s)

    def on_gaps(self, tier: Tier, gaps_s: Sequence[float]) -> None:
        """As ``on_gap`` for each, in less time."""
        self._gaps_of_tier[tier].observe_all(gaps_s)
        for sink in self._sinks:
            sink.on_gaps(tier, gaps_s)

    def on_tokens(self, tier: Tier, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> None:
        """Notes the tokens of one output of a choice; those of the prompt with the first output only."""
        if prompt_tokens:
            self._token_counts[tier, "prompt"] += prompt_tokens
            self._token_counts[tier, "cached"] += cached_tokens
        self._token_counts[tier, "generated"] += new_tokens
        for sink in self._sinks:
            sink.on_tokens(tier, prompt_tokens, cached_tokens, new_tokens)

    def on_begun(self, tier: Tier, timing: RequestTiming) -> None:
        """Notes that a request is given to the engine; ``on_finished`` must follow."""
        self.in_flight.labels(tier.value).inc()
        self.num_in_flight[tier.value] += 1
        if tier in ONLINE_TIERS:
            self._silent[id(timing)] = timing

    def silent(self, now_s: float) -> tuple[int, float]:
        """Number of online requests without a token, and the age of the oldest in seconds; 0 without one.

        Args:
            now_s: time on the clock of ``RequestTiming``.
        """
        for key in [key for key, timing in self._silent.items() if timing.ttft_s is not None]:
            del self._silent[key]
        ages = [now_s - timing.arrival_s for timing in self._silent.values()]
        return len(ages), max(ages, default=0.0)

    def on_request_failed(self, failed: RequestFailed) -> None:
        """Notes an engine error of a request or a batch line."""
        self.engine_errors.labels(failed.code if failed.code in ENGINE_ERRORS else "other").inc()

    def on_refused(self, record: RequestRecord) -> None:
        """Notes a request that was refused before the engine got it."""
        self.requests.labels(record.tier, record.endpoint, record.outcome).inc()
        self.history.on_ended(record.tier, record.outcome, record.error_code)
        if record.outcome == "shed":
            self.rejected.labels(record.tier, "overloaded").inc()
        log_request(record)

    def on_refused_unread(self, model: str, endpoint: str, request_id: str) -> None:
        """Notes a chat that was refused before anything was known of it but its path."""
        record = RequestRecord(
            request_id=request_id,
            endpoint=endpoint,
            tier=Tier.DEFAULT.value,
            model=model,
            outcome="shed",
            error_code="overloaded",
        )
        self.on_refused(record)

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None:
        """Notes the end of a request that the engine got, successful or not."""
        tier = record.tier
        self.in_flight.labels(tier).dec()
        self.num_in_flight[tier] -= 1
        self._silent.pop(id(timing), None)
        self.requests.labels(tier, record.endpoint, record.outcome).inc()
        self.history.on_ended(tier, record.outcome, record.error_code)
        if record.e2e_ms is not None:
            self.e2e.labels(tier).observe(record.e2e_ms / 1000)
        if timing.queue_s is not None:
            self.queue.labels(tier).observe(timing.queue_s)
        # Aborts and faults of the client do not count; failures of the server count as missed targets.
        if record.outcome not in ("aborted", "client_error"):
            self._judge(prepared, timing, record)
        for sink in self._end_sinks:
            sink.on_finished(record, prepared, timing)
        log_request(record)

    def _judge(self, prepared: RequestTerms, timing: RequestTiming, record: RequestRecord) -> None:
        tier, failed = prepared.tier.value, record.outcome == "server_error"
        for timed in timing.choices:
            choice = judge(timed, timing.arrival_s, prepared.ttft_slo_s, prepared.tpot_slo_s, failed=failed)
            if choice.ttft_s is not None:
                self.ttft.labels(tier).observe(choice.ttft_s)
            if choice.tpot_s is not None:
                self.tpot.labels(tier).observe(choice.tpot_s)
            if prepared.tier in ONLINE_TIERS and max(prepared.max_tokens) > 0:
                (self.attained if choice.ttft_met else self.violated).labels(tier, "ttft").inc()
                (self.attained if choice.tpot_met else self.violated).labels(tier, "tpot").inc()
                self.history.on_choice(tier, choice)
                if not (choice.ttft_met and choice.tpot_met):
                    self.late.appendleft(
                        LateChat(
                            at_s=self.history.now_s,
                            request=record.engine_id or "",
                            tier=tier,
                            ttft_s=choice.ttft_s,
                            ttft_slo_s=prepared.ttft_slo_s,
                            tpot_s=choice.tpot_s,
                            tpot_slo_s=prepared.tpot_slo_s,
                        )
                    )

    # ---- steps ----

    def _define_steps(self, registry: CollectorRegistry) -> None:
        seconds = TallyHistogram(
            ["neaptide_step_seconds"],
            "Time of a step, in total and by phase.",
            ["phase"],
            [[phase] for phase in (*_PHASES, "total")],
            STEP_BUCKETS_S,
            registry,
        )
        self._phase_seconds = [(f"{phase}_s", seconds.tallies[(phase,)]) for phase in _PHASES]
        self._total_seconds = seconds.tallies[("total",)]
        error = TallyHistogram(
            ["neaptide_step_prediction_error_ratio"],
            "Absolute error of the predicted step time over the measured one.",
            [],
            [[]],
            ERROR_BUCKETS,
            registry,
        )
        self._step_error = error.tallies[()]
        self.steps = Counter("neaptide_steps_total", "Number of steps whose time was predicted.", registry=registry)
        self.predicted_seconds = Counter(
            "neaptide_steps_predicted_seconds_total",
            "Sum of the predicted times of all steps whose time was predicted.",
            registry=registry,
        )
        self.steps_within_margin = Counter(
            "neaptide_steps_within_margin_total",
            "Number of steps that took no longer than predicted plus their margin.",
            registry=registry,
        )
        self.aborted_seconds = Counter(
            "neaptide_steps_given_up_seconds_total",
            "Time spent on aborted steps.",
            registry=registry,
        )
        tokens = Counter(
            "neaptide_step_tokens_total", "Number of tokens that steps computed.", ["class", "phase"], registry=registry
        )
        preemptions = Counter(
            "neaptide_preemptions_total",
            "Number of running requests that were preempted.",
            ["class"],
            registry=registry,
        )
        self._step_counters: list[tuple[str, Counter]] = [
            (field, Counter(name, text, registry=registry)) for field, name, text in _COUNTED
        ]
        for name in ("online", "offline"):
            self._step_counters.append((f"preempted_{name}", preemptions.labels(name)))
            for phase in ("prefill", "decode"):
                self._step_counters.append((f"{name}_{phase}_tokens", tokens.labels(name, phase)))
        self.grammar_bytes = Gauge(
            "neaptide_grammar_bytes", "Host memory of the engine that grammars take, roughly.", registry=registry
        )
        self.paused = Gauge(
            "neaptide_besteffort_paused", "1 while offline work is paused by the operator, else 0.", registry=registry
        )
        self.storage_failing = Gauge(
            "neaptide_storage_failing", "1 while files or batches cannot be read or stored, else 0.", registry=registry
        )

    def on_stats(self, stats: StepStats) -> None:
        """Notes a step; called on the event loop."""
        self.history.on_step(stats)
        self._total_seconds.observe(stats.duration_s)
        self.grammar_bytes.set(stats.grammar_bytes)
        for field, tally in self._phase_seconds:
            tally.observe(getattr(stats, field))
        if stats.is_aborted:
            self.aborted_seconds.inc(stats.duration_s)
        elif stats.duration_s > 0 and stats.predicted_s > 0:
            self._step_error.observe(abs(stats.predicted_s - stats.duration_s) / stats.duration_s)
            self.steps.inc()
            self.predicted_seconds.inc(stats.predicted_s)
            if stats.duration_s <= stats.predicted_s + stats.margin_s:
                self.steps_within_margin.inc()
        for field, counter in self._step_counters:
            count = getattr(stats, field)
            if count:
                counter.inc(count)

    def _define_process(self, registry: CollectorRegistry) -> None:
        tasks = Gauge(
            "neaptide_asyncio_tasks", "Number of tasks on the event loop of the API process.", registry=registry
        )
        tasks.set_function(_num_tasks)
        self.own_wait = Gauge(
            "neaptide_api_process_wait_seconds",
            "Expected wait of a new chat in the API process, without the engine. Chats are refused if it is too long.",
            registry=registry,
        )


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # Called outside of an event loop.
        return 0
