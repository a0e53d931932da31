"""Series for stock vLLM dashboards, routers and benchmarks, for online work only.

If offline work counted as "waiting", a router would take the server for overloaded and turn requests away. ``metrics``
has its series.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from neaptide.engine.messages import EngineReady, StepStats
from neaptide.engine.params import RequestClass, Tier, request_class
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.engine_state import EngineState
from neaptide.server.observe.gaps import TallyCounter, TallyHistogram
from neaptide.server.observe.request_log import RequestRecord, RequestTerms
from neaptide.server.observe.timing import RequestTiming

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model_name", "engine")
_HTTP_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/version"})
"""Routes that vLLM does not count."""


class VllmMetrics:
    """Series with the prefix ``vllm:``, from request events and steps."""

    def __init__(self, registry: CollectorRegistry, model_name: str, client: EngineClient, engine: EngineState) -> None:
        self._registry = registry
        self._client = client
        self._engine = engine
        self._values = (model_name, "0")
        running = self._gauge("num_requests_running", "Number of online requests that run in the engine.")
        waiting = self._gauge("num_requests_waiting", "Number of online requests that wait in the engine.")
        usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks that online work holds, 0 to 1.")
        running.set_function(lambda: engine.occupancy.running_online)
        waiting.set_function(lambda: engine.occupancy.waiting_online)
        usage.set_function(self._kv_usage)
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of online requests that wait in the engine, by reason. None is deferred.",
            [*_LABELS, "reason"],
            registry=registry,
        )
        by_reason.labels(*self._values, "capacity").set_function(lambda: engine.occupancy.waiting_online)
        by_reason.labels(*self._values, "deferred")
        awake = Gauge(
            "vllm:engine_sleep_state",
            "1 for awake while there is an engine, which never sleeps.",
            [*_LABELS, "sleep_state"],
            registry=registry,
        )
        awake.labels(*self._values, "awake").set_function(lambda: engine.is_up)
        for state in ("weights_offloaded", "discard_all"):
            awake.labels(*self._values, state)
        self._config = Gauge(
            "vllm:cache_config_info",
            "Size of the KV cache, in the labels; the value is 1.",
            [*_LABELS, "block_size", "num_gpu_blocks"],
            registry=registry,
        )
        self._config_of: EngineReady | None = None
        # Endpoint pickers read it, and complain of a server without it. No adapter can be loaded here.
        adapters = Gauge(
            "vllm:lora_requests_info",
            "LoRA adapters in use, in the labels; there are none.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=registry,
        )
        adapters.labels("0", "", "").set(1)
        self._preemptions = self._counter("num_preemptions", "Number of online requests that were preempted.")
        self._queries = self._counter(
            "prefix_cache_queries",
            "Number of prompt tokens of online requests that were looked for in the prefix cache.",
        )
        self._hits = self._counter(
            "prefix_cache_hits", "Number of prompt tokens of online requests that were found in the prefix cache."
        )
        self._prompt = self._counter("prompt_tokens", "Number of prompt tokens of online requests.")
        self._cached = self._counter("prompt_tokens_cached", "Number of prompt tokens found in the prefix cache.")
        self._by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens of online requests, by where they came from.",
            [*_LABELS, "source"],
            registry=registry,
        )
        generated = TallyCounter(
            "vllm:generation_tokens", "Number of output tokens of online requests.", _LABELS, [self._values], registry
        )
        self._generated = generated.counts
        self._success = Counter(
            "vllm:request_success",
            "Number of online requests that have ended, by how.",
            [*_LABELS, "finished_reason"],
            registry=registry,
        )
        self._ttft = self._histogram("time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT)
        # Older boards use the second name.
        gaps = TallyHistogram(
            ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
            "Time between two outputs of one choice.",
            _LABELS,
            [self._values],
            _ITL,
            registry,
        )
        self._gaps = gaps.tallies[self._values]
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _ITL
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to the end of the reply.", _E2E)
        self._queue = self._histogram("request_queue_time_seconds", "Time from arrival to the first step.", _E2E)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the first step to the first token.", _E2E
        )
        self._decode = self._histogram("request_decode_time_seconds", "Time from the first token to the last.", _E2E)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time from the first step to the last token.", _E2E
        )
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Prompt tokens of one request.", _TOKENS)
        self._generation_sizes = self._histogram("request_generation_tokens", "Output tokens of one request.", _TOKENS)

        self._computed_sizes = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of one request that were not cached.", _TOKENS
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of one request.", _TOKENS)
        self._max_generation = self._histogram(
            "request_max_num_generation_tokens", "Most output tokens of a choice of one request.", _TOKENS
        )
        self._n = self._histogram("request_params_n", "Number of choices that one request asks for.", _CHOICES)
        self._preempted = self._histogram(
            "request_num_preemptions", "Number of times that one request was preempted.", _PREEMPTIONS
        )
        steps = TallyHistogram(
            ["vllm:iteration_tokens_total"],
            "Online tokens of one step.",
            _LABELS,
            [self._values],
            _STEP_TOKENS,
            registry,
        )
        self._step_tokens = steps.tallies[self._values]
        self._http = Counter(
            "http_requests_total",
            "Number of HTTP replies, under the name and labels of vLLM's server.",
            ["method", "status", "handler"],
            registry=registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time of HTTP requests, under the name and labels of vLLM's server.",
            ["method", "handler"],
            buckets=(0.1, 0.5, 1),
            registry=registry,
        )

    def on_http(self, method: str, route: str, status: int, seconds: float) -> None:
        """Notes an HTTP reply."""
        if route not in _HTTP_UNCOUNTED:
            self._http.labels(method, f"{status // 100}xx", route).inc()
            self._http_seconds.labels(method, route).observe(seconds)

    def on_gap(self, tier: Tier, gap_s: float) -> None:
        """Notes the time between two outputs."""
        if request_class(tier) is RequestClass.ONLINE:
            self._gaps.observe(gap_s)

    def on_gaps(self, tier: Tier, gaps_s: Sequence[float]) -> None:
        """Notes several of them."""
        if request_class(tier) is RequestClass.ONLINE:
            self._gaps.observe_all(gaps_s)

    def on_tokens(self, tier: Tier, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> None:
        """Notes the tokens of one output."""
        if request_class(tier) is not RequestClass.ONLINE:
            return
        if prompt_tokens:
            self._prompt.inc(prompt_tokens)
            self._cached.inc(cached_tokens)
            self._by_source.labels(*self._values, "local_cache_hit").inc(cached_tokens)
            self._by_source.labels(*self._values, "local_compute").inc(prompt_tokens - cached_tokens)
        self._generated[self._values] += new_tokens

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None:
        """Notes the end of a request that the engine got."""
        if request_class(prepared.tier) is not RequestClass.ONLINE:
            return
        for reason in record.finish_reasons:
            ended = {"stop": "stop", "tool_calls": "stop", "length": "length"}.get(reason)
            ended = ended or ("abort" if record.outcome == "aborted" else "error")
            self._success.labels(*self._values, ended).inc()
        if record.outcome != "ok":
            return
        self._prompt_sizes.observe(record.prompt_tokens)
        self._generation_sizes.observe(record.completion_tokens)
        self._computed_sizes.observe(record.prompt_tokens - record.cached_tokens)
        self._max_tokens.observe(max(prepared.max_tokens))
        self._max_generation.observe(max(choice.num_tokens for choice in timing.choices))
        self._n.observe(prepared.n)
        self._preempted.observe(record.preemptions)
        if record.e2e_ms is not None:
            self._e2e.observe(record.e2e_ms / 1000)
        if timing.queue_s is not None:
            self._queue.observe(timing.queue_s)
        for choice in timing.choices:
            if choice.first_s is None or choice.last_s is None:
                continue
            self._ttft.observe(choice.first_s - timing.arrival_s)
            self._prefill.observe(max(0.0, choice.first_s - (choice.scheduled_s or timing.arrival_s)))
            self._decode.observe(choice.last_s - choice.first_s)
            self._inference.observe(max(0.0, choice.last_s - (choice.scheduled_s or timing.arrival_s)))
            if choice.tpot_s is not None:
                self._tpot.observe(choice.tpot_s)

    def on_stats(self, stats: StepStats) -> None:
        """Notes a step of the engine."""
        self._describe(self._client.info)
        if tokens := stats.online_prefill_tokens + stats.online_decode_tokens:
            self._step_tokens.observe(tokens)
        if stats.preempted_online:
            self._preemptions.inc(stats.preempted_online)
        if stats.online_admitted_prompt_tokens:
            self._queries.inc(stats.online_admitted_prompt_tokens)
            self._hits.inc(stats.online_cached_tokens)

    def _kv_usage(self) -> float:
        now = self._engine.occupancy
        total = now.blocks_free + now.blocks_cached + now.blocks_online + now.blocks_offline
        return now.blocks_online / total if total else 0.0

    def _describe(self, info: EngineReady) -> None:
        """Sets the size of the cache, which routers read from labels. A restarted engine may have another size."""
        if info is not self._config_of:
            self._config_of = info
            self._config.clear()
            self._config.labels(*self._values, str(info.block_size), str(info.num_blocks)).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry).labels(*self._values)
