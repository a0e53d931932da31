"""A forecast in words: the sentence, what it rests on, and what would show that it is wrong."""

from collections.abc import Iterator

import msgspec

from neaptide.durations import duration
from neaptide.observation.figures import Means, ObservedFigures
from neaptide.observation.forecast import ALONE, FCFS, INSIDE, INSTEAD, Estimate, Forecast, ForecastOption
from neaptide.observation.step_times import InferredStepTimes

CLOSE = 0.1
"""Largest relative difference between replayed and recorded means with which a forecast is trusted."""
NAMES = {
    ALONE: "chats alone, as recorded",
    INSIDE: "Neaptide inside vLLM",
    INSTEAD: "Neaptide instead of vLLM",
    FCFS: "vLLM, first come first served",
}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the texts are made from."""

    source: str
    model: str
    ttft_slo_s: float
    tpot_slo_s: float
    speed: float
    batch: str
    profile: str | None
    """Name of the profile that step times are from; None if they were inferred."""
    kv_tokens: int
    kv_source: str
    """Who says so: ``as the server says``."""
    observed: ObservedFigures | None
    simulated: Means | None
    """Recorded means of the simulated part; None if the load was changed."""
    times: InferredStepTimes | None
    forecast: Forecast


class ReplayCheck(msgspec.Struct, frozen=True):
    """A mean that was recorded, and the same one when the recorded chats are simulated alone."""

    name: str
    recorded_s: float
    replayed_s: float

    @property
    def is_close(self) -> bool:
        return abs(self.replayed_s - self.recorded_s) <= CLOSE * self.recorded_s


def option_name(facts: Facts, option: ForecastOption) -> str:
    """The name of an option for people."""
    if option.name in NAMES:
        return NAMES[option.name]
    best = ", the best" if option.name == facts.forecast.best_priority else ""
    return f"vLLM's priority, {option.max_num_seqs} slots, {option.max_num_batched_tokens:,} tokens{best}"


def sentence(facts: Facts) -> str:
    """The answer in one or two sentences."""
    found = facts.forecast
    inside, alone, priority = (found.option(name) for name in (INSIDE, ALONE, found.best_priority))
    return (
        f"With Neaptide inside vLLM, {_tokens(inside.batch_tokens_per_s)} batch tokens/s would run beside these chats, "
        f"and {_percent(inside.attainment)} of the chats would meet {targets(facts)}. "
        f"With vLLM's priority at its best of {_num_priority(found)} settings it would be "
        f"{_tokens(priority.batch_tokens_per_s)} batch tokens/s and {_percent(priority.attainment)} of the chats; "
        f"without batch work {_percent(alone.attainment)} meet them. Brackets hold 90% intervals. {replicas(facts)}"
    )


def replicas(facts: Facts) -> str:
    """Number of replicas that the peak needs."""
    need = facts.forecast.replicas
    peak = f"the busiest {duration(need.peak_s)}"
    if need.number is None:
        return f"No number of replicas that was tried keeps the chats of {peak} in time."
    plural = "replica keeps" if need.number == 1 else "replicas keep"
    return f"{need.number} {plural} {need.attainment:.0%} of the chats of {peak} in time, without batch work."


def targets(facts: Facts) -> str:
    return f"TTFT {duration(facts.ttft_slo_s)} and TPOT {duration(facts.tpot_slo_s)}"


def recorded(facts: Facts) -> str:
    """Summary of the record."""
    seen = facts.observed
    if seen is None:
        return f"The chats are those of {facts.source}. Nothing was recorded of a server."
    parts = [
        f"{facts.source} was asked for its metrics {seen.polls:,} times in {duration(seen.seconds)}. "
        f"{seen.arrivals:,} chats came, {seen.ended:,} ended."
    ]
    if seen.prompt_tokens is not None and seen.answer_tokens is not None:
        parts.append(f"A prompt had {seen.prompt_tokens:.0f} tokens on average, an answer {seen.answer_tokens:.0f}.")
    if seen.ttft_s is not None and seen.gap_s is not None:
        parts.append(
            f"The mean TTFT was {duration(seen.ttft_s)}, the mean gap between tokens {1e3 * seen.gap_s:.1f} ms."
        )
    if seen.in_ttft is not None and seen.in_tpot is not None:
        parts.append(
            f"By vLLM's buckets {_bounds(seen.in_ttft.low, seen.in_ttft.high)} met the TTFT target and "
            f"{_bounds(seen.in_tpot.low, seen.in_tpot.high)} the TPOT target."
        )
    return " ".join(parts)


def checks(facts: Facts) -> list[ReplayCheck]:
    """The recorded means beside those of a replay. Only a record has them."""
    seen, alone = facts.simulated, facts.forecast.option(ALONE)
    found = []
    if seen is not None and seen.gap_s is not None and alone.mean_gap_s is not None:
        found.append(ReplayCheck("gap between tokens", seen.gap_s, alone.mean_gap_s))
    if seen is not None and seen.ttft_s is not None and alone.mean_ttft_s is not None:
        found.append(ReplayCheck("TTFT", seen.ttft_s, alone.mean_ttft_s))
    return found


def warnings(facts: Facts) -> Iterator[str]:
    """Reasons not to trust the forecast."""
    for check in checks(facts):
        if not check.is_close:
            yield (
                f"The chats simulated alone have a mean {check.name} of {1e3 * check.replayed_s:.1f} ms; recorded were "
                f"{1e3 * check.recorded_s:.1f} ms. The model does not describe this server well."
            )
    seen, times = facts.observed, facts.times
    if seen is not None and seen.restarts:
        yield f"The server restarted {seen.restarts} time(s). What ran at those moments is missing."
    if seen is not None and seen.failed_polls:
        yield f"{seen.failed_polls} poll(s) failed. Arrivals in those gaps are placed at random."
    if seen is not None and seen.preemptions:
        yield f"vLLM preempted requests {seen.preemptions} times. Their step times are less certain."
    if times is not None and times.most_streams < 0.5 * facts.forecast.option(INSIDE).max_num_seqs:
        yield (
            f"The recorded steps seldom had more than {times.most_streams:.0f} streams. Batch work makes that up to "
            f"{facts.forecast.option(INSIDE).max_num_seqs}. What such steps take was not seen. It is inferred from "
            f"steps with few streams and from steps with prompts."
        )
    if facts.forecast.chats < 100:
        yield f"Only {facts.forecast.chats} chats were simulated: record for longer."
    if not facts.forecast.option(INSIDE).valid:
        yield "The batch ran out of lines, so its rate is too low."


def assumptions(facts: Facts) -> Iterator[str]:
    """Assumptions of the forecast."""
    seen, times, found = facts.observed, facts.times, facts.forecast
    if times is not None:
        yield (
            f"Step times are inferred from the gaps between tokens and from prefill times. A step takes the longer of "
            f"two times. Steps without prompts show the first: {_line(times, 'fixed_s', 'stream_s')} for each stream. "
            f"Steps with prompts show the second: {_line(times, 'prompt_step_s', 'token_s')} for each token. "
            f"Gaps that the fit had not seen differ by {times.error:.1%} (median)."
        )
    else:
        yield f"Step times are those of the profile {facts.profile}. They were not inferred from a server."
    if seen is not None:
        yield (
            f"Lengths are exact for {seen.exact_lengths:,} chats. The others are drawn inside vLLM's buckets with the "
            f"exact sum. Arrivals between two polls are placed at random; how many they are is exact."
        )
        if seen.hit_ratio >= 0.01:
            yield (
                f"{seen.hit_ratio:.0%} of the prompt tokens came from the cache. The simulation has that share as one "
                f"prefix that all prompts have in common."
            )
        yield (
            f"{duration(seen.overhead_s)} of every TTFT pass outside of queue and steps, and remain. Network time is "
            f"not included."
        )
    yield f"The KV cache holds {facts.kv_tokens:,} tokens, {facts.kv_source}."
    limits = found.option(INSIDE)
    yield (
        f"The engine runs up to {limits.max_num_seqs} requests and {limits.max_num_batched_tokens:,} tokens in a step. "
        f"vLLM does not report these limits, so check them."
    )
    yield f"Batch lines are {facts.batch}, share no prefixes, and there are always more."
    yield "Inside and instead of vLLM steps take as long as recorded, planning included: the same kernels run."
    yield "Clients send the same chats at the same times, however fast the answers are."


def falsifiers(facts: Facts) -> Iterator[str]:
    """Observations that would show that the forecast is wrong."""
    inside, found = facts.forecast.option(INSIDE), facts.forecast
    yield (
        f"Run vLLM with --scheduler-cls neaptide_vllm.scheduler and such a batch beside at least 400 such chats. Fewer "
        f"than {inside.attainment.low:.1%} in time, or less than {inside.batch_tokens_per_s.low:,.0f} batch tokens/s, "
        f"and the forecast is wrong. So it is with more than {inside.batch_tokens_per_s.high:,.0f}."
    )
    priority = found.option(found.best_priority)
    yield (
        f"Run vLLM's priority with {priority.max_num_seqs} slots and {priority.max_num_batched_tokens:,} step tokens. "
        f"Fewer than {priority.attainment.low:.1%} of the chats in time, or more than {priority.attainment.high:.1%}, "
        f"and its row is wrong."
    )
    for check in checks(facts):
        yield (
            f"Record again at the same load. A mean {check.name} far from {1e3 * check.replayed_s:.1f} ms (recorded: "
            f"{1e3 * check.recorded_s:.1f} ms) shows that the step times are wrong."
        )


def silences(facts: Facts) -> Iterator[str]:
    """Limits of the page."""
    yield "Other hours, other traffic and growth: only what was recorded is simulated" + (
        "." if facts.speed == 1.0 else f", at {facts.speed:g} times its speed."
    )
    yield "What a chat with its own targets would get: all have the same ones here."
    yield "Failures, restarts, adapters, speculation and structured output."
    yield "A promise. It is a forecast of one load on one server, with the interval stated."


def _num_priority(found: Forecast) -> int:
    return sum(option.name.startswith("priority") for option in found.options)


def _tokens(estimate: Estimate) -> str:
    return f"{estimate.value:,.0f} ({estimate.low:,.0f} to {estimate.high:,.0f})"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _bounds(low: float, high: float) -> str:
    return f"{low:.1%}" if high - low < 5e-4 else f"{100 * low:.1f} to {100 * high:.1f}%"


def _line(times: InferredStepTimes, fixed: str, slope: str) -> str:
    low, high = times.spread[fixed]
    value, each_s = times.costs[fixed], times.costs[slope]
    return f"{1e3 * value:.1f} ms (90%: {1e3 * low:.1f} to {1e3 * high:.1f}) and {1e3 * each_s:.2g} ms more"
