"""A run's figures for its JSON: clients' measurements, the server's metrics (``docs/simulate-plan-loadtest.md``)."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentiles
from neaptide.loadgen.run.load import Shot
from neaptide.loadgen.run.runner import Progress
from neaptide.loadgen.run.samples import CLASSES, LoadSample, Watch

Pair = tuple[Shot, ChatRecord]
Summary = dict[str, Any]
SHOWN_ERRORS = 5
COMPARED: dict[str, tuple[str, ...]] = {
    "ttft_p50": ("ttft_ms", "p50"),
    "ttft_p99": ("ttft_ms", "p99"),
    "tpot_p50": ("tpot_ms", "p50"),
    "tpot_p99": ("tpot_ms", "p99"),
    "attainment": ("attainment", "both"),
    "output_tokens_per_s": ("output_tokens_per_s",),
    "offline_tokens_per_s": ("offline_tokens_per_s",),
}
"""Names of the ratios between two servers, with the path of their figure in a summary."""


def summary(progress: Progress, warm_up_s: float = 0.0) -> Summary:
    """The figures of requests that arrived after the warm-up; ``None`` where nothing was measured."""
    pairs = [pair for pair in progress.records if pair[1].arrival_s >= warm_up_s]
    records = [record for _, record in pairs]
    fine = [(shot, record) for shot, record in pairs if record.error is None and not record.cancelled]
    seconds = span_s(records)
    counted = [(shot.request.input_tokens, record.num_prompt_tokens) for shot, record in fine]
    gaps = [b - a for _, r in fine for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False)]
    return {
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "cancelled": sum(record.cancelled for record in records),
        "seconds": round(seconds, 3),
        "ttft_ms": _three_ms(record.ttft_s for _, record in fine),
        "ttft_from_sending_ms": _three_ms(record.ttft_from_sending_s for _, record in fine),
        "tpot_ms": _three_ms(record.tpot_s for _, record in fine),
        "itl_ms": _three_ms(gaps),
        "longest_gap_ms": round(1e3 * max(gaps), 2) if gaps else None,
        "e2e_ms": _three_ms(record.e2e_s for _, record in fine),
        "late_ms": _three_ms(record.late_s for record in records),
        "attainment": _attainment(pairs),
        "by_target": _by_target(pairs),
        "requests_per_s": _rate(len(fine), seconds),
        "output_tokens_per_s": _rate(sum(record.num_output_tokens for _, record in fine), seconds),
        "prompt_tokens_per_s": _rate(sum(tokens for _, tokens in counted), seconds),
        "prompt_tokens_asked_for": sum(asked for asked, _ in counted),
        "prompt_tokens_counted": sum(found for _, found in counted),
        **_of_server(progress.watch, warm_up_s),
        "errors": dict(Counter(r.error for r in records if r.error is not None).most_common(SHOWN_ERRORS)),
    }


def ratios(first: Summary, other: Summary) -> dict[str, float | None]:
    """Ratios of the other summary to the first."""
    return {name: _ratio(_at(other, path), _at(first, path)) for name, path in COMPARED.items()}


def met(pairs: Iterable[Pair]) -> list[tuple[bool, bool]]:
    """Whether TTFT and TPOT were met, for all requests that the client did not cancel. A failed request misses both."""
    return [
        (
            record.met(shot.target.ttft_s, math.inf),
            record.met(math.inf, shot.target.tpot_s),
        )
        for shot, record in pairs
        if not record.cancelled
    ]


def span_s(records: Sequence[ChatRecord]) -> float:
    """Seconds from the first start to the last end."""
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.start_s for record in records)


def _attainment(pairs: Sequence[Pair]) -> dict[str, float | None]:
    found = met(pairs)
    shares = {"ttft": [a for a, _ in found], "tpot": [b for _, b in found], "both": [a and b for a, b in found]}
    return {name: round(sum(each) / len(each), 4) if each else None for name, each in shares.items()}


def _by_target(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    targets = dict.fromkeys(shot.target for shot, _ in pairs)
    rows = []
    for target in targets:
        mine = [pair for pair in pairs if pair[0].target == target]
        rows.append({"target_ms": str(target), "requests": len(mine), "attainment": _attainment(mine)})
    return rows


def _of_server(watch: Watch, warm_up_s: float) -> dict[str, Any]:
    samples = [sample for sample in watch.samples if sample.at_s >= warm_up_s]
    steps = [(s.predicted_step_s, s.measured_step_s) for s in samples]
    errors = [abs(predicted / measured - 1) for predicted, measured in steps if predicted and measured]
    batch = None
    if watch.batch is not None:
        counts = watch.batch["request_counts"]
        batch = {"id": watch.batch["id"], "status": watch.batch["status"], "request_counts": counts}
    return {
        **{f"{name}_tokens_per_s": _mean_rate(samples, name) for name in CLASSES},
        "step_prediction_error": _mean(errors),
        "batch": batch,
        "failed_scrapes": watch.failures,
    }


def _three_ms(seconds: Iterable[float | None]) -> dict[str, float | None]:
    found = percentiles(seconds)._asdict()
    return {name: None if math.isnan(value) else round(1e3 * value, 2) for name, value in found.items()}


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 2) if seconds > 0 else None


def _mean_rate(samples: Sequence[LoadSample], name: str) -> float | None:
    """Mean rate, weighted by the samples' lengths."""
    seconds = sum(sample.seconds for sample in samples)
    tokens = sum(sample.seconds * sample.tokens_per_s[name] for sample in samples)
    return round(tokens / seconds, 2) if samples else None


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _at(found: Summary, path: Sequence[str]) -> float | None:
    value: Any = found
    for name in path:
        value = value[name]
    return None if value is None else float(value)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None
