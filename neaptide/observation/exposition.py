"""The series of vLLM's ``/metrics`` that a record keeps, and how a page of them is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:"
RUNNING, WAITING, KV_USAGE = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
GAUGES = frozenset((RUNNING, WAITING, KV_USAGE))
PROMPTS, ANSWERS = "request_prompt_tokens", "request_generation_tokens"
TTFT, ITL, TPOT = "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"
E2E, QUEUE, PREFILL = "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"
INFERENCE, STEP_TOKENS = "request_inference_time_seconds", "iteration_tokens_total"
HISTOGRAMS = frozenset((PROMPTS, ANSWERS, TTFT, ITL, TPOT, E2E, QUEUE, PREFILL, INFERENCE, STEP_TOKENS))
PROMPT_TOKENS, CACHED_TOKENS = "prompt_tokens_total", "prompt_tokens_cached_total"
ANSWER_TOKENS, PREEMPTIONS = "generation_tokens_total", "num_preemptions_total"
QUERIES, HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
COUNTERS = frozenset((PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS, PREEMPTIONS, QUERIES, HITS))
CREATED = "request_prompt_tokens_created"
"""Unix time since which the server counts; a restart changes it."""
CACHE_CONFIG = "cache_config_info"
OLDER_NAMES = {
    "time_per_output_token_seconds": ITL,
    "gpu_cache_usage_perc": KV_USAGE,
    "gpu_prefix_cache_queries_total": QUERIES,
    "gpu_prefix_cache_hits_total": HITS,
}
"""Names in older versions of vLLM, with today's."""
NEEDED = (RUNNING, WAITING, f"{PROMPTS}_count", f"{ANSWERS}_count", f"{TTFT}_count", f"{ITL}_count", f"{E2E}_count")
"""Series without which there is no record."""
PARTS = ("_bucket", "_sum", "_count")

Values = dict[str, float]
"""Values by series: a counter's or gauge's name, ``NAME_sum``, ``NAME_count``, or ``NAME_bucket|LIMIT``."""


class ExpositionError(Exception):
    """A page from which no record can be made. The message is one line."""


@dataclass(slots=True, frozen=True)
class Scrape:
    """One page of metrics of one engine."""

    values: Values
    labels: Mapping[str, str]
    """``model_name``, and ``block_size`` and ``num_gpu_blocks`` of the KV cache if the page names them."""


def read_exposition(text: str, engine: str | None = None) -> Scrape:
    """The kept series of a page.

    Args:
        engine: the value of vLLM's ``engine`` label; None if the server has one engine.

    Raises:
        ExpositionError: the page is no exposition, lacks needed series, or has several engines and none is chosen.
    """
    found: dict[str, Values] = {}
    labels: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(_ours(text)):
            for name, its, value, *_ in family.samples:
                if (of := its.get("engine", "0")) != (engine or of):
                    continue
                name = name.removeprefix(PREFIX)
                if name == CACHE_CONFIG:
                    labels |= {key: its[key] for key in ("block_size", "num_gpu_blocks") if key in its}
                elif (key := _key(name, its)) and math.isfinite(value):
                    values = found.setdefault(of, {})
                    values[key] = values.get(key, 0.0) + value
                    labels.setdefault("model_name", its.get("model_name", ""))
    except (ValueError, KeyError, IndexError) as error:
        raise ExpositionError(f"the page is no Prometheus exposition: {' '.join(str(error).split())}") from None
    if not found:
        raise ExpositionError("there is no series of vLLM" + (f" for engine {engine}" if engine else ""))
    if len(found) > 1:
        raise ExpositionError(f"there are {len(found)} engines ({', '.join(sorted(found))}): choose one with --engine")
    ((_, values),) = found.items()
    if missing := [f"{PREFIX}{name}" for name in NEEDED if name not in values]:
        raise ExpositionError(f"there is no {missing[0]}, without which nothing can be inferred")
    return Scrape(values, labels)


def _ours(text: str) -> str:
    """The page without comments and without series of others: parsing them takes time."""
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith(PREFIX))


def _key(name: str, labels: Mapping[str, str]) -> str | None:
    """The series' key in a record; None if it is not kept."""
    name = OLDER_NAMES.get(name, name)
    if name in GAUGES or name in COUNTERS or name == CREATED:
        return name
    for part in PARTS:
        if name.endswith(part):
            base = name.removesuffix(part)
            base = OLDER_NAMES.get(base, base)
            if base in HISTOGRAMS:
                return f"{base}{part}|{float(labels['le'])!r}" if part == "_bucket" else f"{base}{part}"
    return None
