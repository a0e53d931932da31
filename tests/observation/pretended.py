"""A simulated server that pretends to be vLLM: its metrics, second by second, with what really happened."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from neaptide.engine.messages import AddRequest, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.observation.exposition import read_exposition
from neaptide.observation.record import Header, RecordWriter, ServerRecord, read_record

LABELS = ("model_name", "engine")
VALUES = ("pretended", "0")
LENGTHS = [base * 10**power for power in range(5) for base in (1, 2, 5)]
STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
TTFT_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0]
GAP_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0]
LATENCY_S = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0]


@dataclass(slots=True)
class _Seen:
    """A request as vLLM's front end knows it."""

    arrival_s: float
    taken_s: float
    """When the engine took it: between two steps. vLLM's queue begins here."""
    prompt_tokens: int
    cached_tokens: int = 0
    scheduled_s: float | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


class VllmMetrics:
    """The families that vLLM has, with its buckets."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.registry = CollectorRegistry()
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        counters = (
            "prompt_tokens",
            "prompt_tokens_cached",
            "generation_tokens",
            "num_preemptions",
            "prefix_cache_queries",
            "prefix_cache_hits",
        )
        histograms = {
            "request_prompt_tokens": LENGTHS,
            "request_generation_tokens": LENGTHS,
            "iteration_tokens_total": STEP_TOKENS,
            "time_to_first_token_seconds": TTFT_S,
            "inter_token_latency_seconds": GAP_S,
            "request_time_per_output_token_seconds": GAP_S,
            "e2e_request_latency_seconds": LATENCY_S,
            "request_queue_time_seconds": LATENCY_S,
            "request_prefill_time_seconds": LATENCY_S,
            "request_inference_time_seconds": LATENCY_S,
        }
        self.families: dict[str, Any] = {}
        for name in gauges:
            self.families[name] = Gauge(f"vllm:{name}", "-", LABELS, registry=self.registry).labels(*VALUES)
        for name in counters:
            self.families[name] = Counter(f"vllm:{name}", "-", LABELS, registry=self.registry).labels(*VALUES)
        for name, buckets in histograms.items():
            family = Histogram(f"vllm:{name}", "-", LABELS, buckets=buckets, registry=self.registry)
            self.families[name] = family.labels(*VALUES)
        config = Gauge(
            "vllm:cache_config_info", "-", ("block_size", "num_gpu_blocks", "engine"), registry=self.registry
        )
        config.labels(str(block_size), str(num_blocks), "0").set(1)

    def __getitem__(self, name: str) -> Any:
        return self.families[name]

    def page(self) -> str:
        return generate_latest(self.registry).decode()


class Pretender(EngineObserver):
    """Keeps vLLM's metrics while a simulation runs, and their page at every poll."""

    def __init__(self, num_blocks: int, block_size: int, every_s: float = 1.0) -> None:
        self.metrics = VllmMetrics(num_blocks, block_size)
        self.num_blocks = num_blocks
        self.pages: list[tuple[float, str]] = [(0.0, self.metrics.page())]
        self.requests: list[_Seen] = []
        """In order of arrival."""
        self.steps: list[tuple[float, float, int, int]] = []
        """End, time, streams and prompt tokens of every step."""
        self._every_s = every_s
        self._seen: dict[str, _Seen] = {}
        self._parts: list[tuple[str, int, int, bool]] = []
        self._ended: list[str] = []

    def message(self, message: ToEngine, now_s: float) -> None:
        if isinstance(message, AddRequest):
            seen = _Seen(message.arrival_s or 0.0, now_s, len(message.prompt_token_ids))
            self._seen[message.request_id] = seen
            self.requests.append(seen)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan = step.plan
        self._parts = list(
            zip(
                plan.request_ids,
                plan.num_tokens.tolist(),
                plan.num_computed.tolist(),
                plan.sample.tolist(),
                strict=True,
            )
        )
        for request_id, _, num_computed, _ in self._parts:
            seen = self._seen[request_id]
            if seen.scheduled_s is None:
                seen.scheduled_s, seen.cached_tokens = step.timer.start_s, num_computed
                self.metrics["prefix_cache_queries"].inc(seen.prompt_tokens)
                self.metrics["prefix_cache_hits"].inc(num_computed)

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ended.append(request.request_id)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        now_s, metrics = step.timer.executed_at_s, self.metrics
        self._poll_until(now_s)
        streams = prompts = computed = outputs = 0
        for request_id, num_tokens, _, sampled in self._parts:
            seen = self._seen[request_id]
            prompts += num_tokens if seen.tokens == 0 else 0
            streams += seen.tokens > 0
            if not sampled:
                continue
            outputs += 1
            if seen.tokens == 0:
                seen.first_s = now_s
                computed += seen.prompt_tokens - seen.cached_tokens
                metrics["time_to_first_token_seconds"].observe(now_s - seen.arrival_s)
                metrics["prompt_tokens"].inc(seen.prompt_tokens)
                metrics["prompt_tokens_cached"].inc(seen.cached_tokens)
            else:
                metrics["inter_token_latency_seconds"].observe(now_s - seen.last_s)
            seen.last_s = now_s
            seen.tokens += 1
        self.steps.append((now_s, now_s - step.timer.start_s, streams, prompts))
        if outputs:
            metrics["generation_tokens"].inc(outputs)
            metrics["iteration_tokens_total"].observe(computed + outputs)
        for request_id in self._ended:
            self._end(self._seen[request_id])
        self._ended.clear()
        queues, occupancy = scheduler.queues, scheduler.kv.occupancy()
        metrics["num_requests_running"].set(len(queues.running_online))
        metrics["num_requests_waiting"].set(len(queues.waiting_online))
        metrics["kv_cache_usage_perc"].set(occupancy.online / self.num_blocks)

    def _end(self, seen: _Seen) -> None:
        scheduled_s, metrics = seen.scheduled_s or 0.0, self.metrics
        metrics["request_prompt_tokens"].observe(seen.prompt_tokens)
        metrics["request_generation_tokens"].observe(seen.tokens)
        metrics["e2e_request_latency_seconds"].observe(seen.last_s - seen.arrival_s)
        metrics["request_queue_time_seconds"].observe(scheduled_s - seen.taken_s)
        metrics["request_prefill_time_seconds"].observe(seen.first_s - scheduled_s)
        metrics["request_inference_time_seconds"].observe(seen.last_s - scheduled_s)
        decoded = max(seen.tokens - 1, 1)
        metrics["request_time_per_output_token_seconds"].observe((seen.last_s - seen.first_s) / decoded)

    def _poll_until(self, now_s: float) -> None:
        while len(self.pages) * self._every_s < now_s:
            self.pages.append((len(self.pages) * self._every_s, self.metrics.page()))


@dataclass(slots=True)
class Recorded:
    """A pretended server's record, and the truth."""

    record: ServerRecord
    truth: Pretender
    path: Path = field(default_factory=Path)


def recorded(truth: Pretender, path: Path) -> Recorded:
    """The record of the pages that a pretended server showed."""
    with path.open("wb") as file:
        writer = None
        for at_s, scrape in _scrapes(truth):
            if writer is None:
                labels = dict(scrape.labels)
                writer = RecordWriter(file, Header(server="http://pretended", started=0.0, every_s=1.0, labels=labels))
            writer.add(at_s, scrape)
    return Recorded(read_record(path), truth, path)


def _scrapes(truth: Pretender) -> Iterator[tuple[float, Any]]:
    for at_s, page in truth.pages:
        yield at_s, read_exposition(page)
