"""A forecast in words: the sentence, what it rests on, and what would show that it is wrong."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from neaptide.durations import duration
from neaptide.observation.figures import Means, ObservedFigures
from neaptide.observation.forecast import ALONE, FCFS, INSIDE, INSTEAD, Estimate, Forecast, ForecastOption
from neaptide.observation.step_times import CONTEXT_SHARES, InferredStepTimes

FEW_IN_TIME = 0.9
"""If chats alone have a smaller share in time, batch work is not what makes them late."""
CLOSE = 0.1
"""Largest relative difference between replayed and recorded means with which a forecast is trusted."""
NAMES = {
    ALONE: "chats alone",
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
    draws_traffic: bool
    """Whether each draw has other arrivals and lengths. Those of a trace are given."""
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
    best = ", the best" if option.name == facts.forecast.best_priority and _keeps_chats(option) else ""
    return f"vLLM's priority, {option.max_num_seqs} slots, {option.max_num_batched_tokens:,} tokens{best}"


def sentence(facts: Facts) -> str:
    """The answer in one or two sentences."""
    found = facts.forecast
    inside, alone, priority = (found.option(name) for name in (INSIDE, ALONE, found.best_priority))
    if _keeps_chats(priority):
        rival = (
            f"With vLLM's priority, at the best of {_num_priority(found)} settings for the chats, it would be "
            f"{rate_text(priority.batch_tokens_per_s)} batch tokens/s and {_percent(priority.attainment)} of the chats."
        )
    else:
        rival = f"With vLLM's priority no chat would meet them at any of {_num_priority(found)} settings."
    return (
        f"With Neaptide inside vLLM, {rate_text(inside.batch_tokens_per_s)} batch tokens/s would run beside these "
        f"chats, and {_percent(inside.attainment)} of the chats would meet {targets(facts)}. {rival} "
        f"Simulated without batch work {_percent(alone.attainment)} meet them. Brackets hold 90% intervals. "
        f"{replicas(facts)}"
    )


def replicas(facts: Facts) -> str:
    """Number of replicas that the peak needs."""
    need = facts.forecast.replicas
    peak = f"In the busiest {duration(need.peak_s)}, without batch work,"
    if need.number is None:
        most = "1 replica" if need.most == 1 else f"{need.most} replicas"
        return f"{peak} not even {most} would keep {need.least:.0%} of the chats in time."
    enough = "1 such server is" if need.number == 1 else f"{need.number} such servers are"
    return f"{peak} {enough} enough for {need.attainment:.0%} of the chats in time ({need.least:.0%} are asked for)."


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
            f"vLLM counts in buckets: {_bounds(seen.in_ttft.low, seen.in_ttft.high)} of them met the TTFT target, and "
            f"{_bounds(seen.in_tpot.low, seen.in_tpot.high)} the TPOT target."
        )
    return " ".join(parts)


def repetitions(facts: Facts) -> str:
    """What is simulated, how often, and what the intervals come from."""
    found = facts.forecast
    said = f"The forecast simulates {found.chats:,} chats, in {found.simulated_s:.0f} s of that traffic."
    drawn = ["arrivals", "lengths"] if facts.draws_traffic else []
    drawn += ["step times"] if facts.times is not None else []
    if not drawn:
        return f"{said} Arrivals, lengths and step times are given, so nothing is drawn: tokens/s have no interval."
    if not found.draws:
        return f"{said} It does so once, without draws."
    plural = "1 more run draws" if found.draws == 1 else f"{found.draws} more runs draw"
    return f"{said} For the intervals {plural} {_listed(drawn)} anew."


def checks(facts: Facts) -> list[ReplayCheck]:
    """The recorded means beside those of a replay. Only a record has them."""
    seen, alone = facts.simulated, facts.forecast.option(ALONE)
    found = []
    if seen is not None and seen.gap_s is not None and alone.mean_gap_s is not None:
        found.append(ReplayCheck("gap between tokens", seen.gap_s, alone.mean_gap_s))
    if seen is not None and seen.ttft_s is not None and alone.mean_ttft_s is not None:
        # What is added to TTFTs makes both means equal, unless that would be too much.
        ttft = ReplayCheck("TTFT", seen.ttft_s, alone.mean_ttft_s)
        found += [] if math.isclose(ttft.recorded_s, ttft.replayed_s, rel_tol=1e-6) else [ttft]
    return found


def warnings(facts: Facts) -> Iterator[str]:
    """Reasons not to trust the forecast."""
    alone = facts.forecast.option(ALONE).attainment
    if alone.value < FEW_IN_TIME:
        yield (
            f"Without any batch work only {alone.value:.1%} of the chats are in time. The load is too high for one "
            f"server, or the targets are too short for its steps."
        )
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
        longer = "give a longer trace" if facts.observed is None else "record for longer"
        yield f"Only {facts.forecast.chats} chats were simulated: {longer}, or raise --simulate-s."
    if not facts.forecast.option(INSIDE).valid:
        yield "The batch ran out of lines, so its rate is too low."


def assumptions(facts: Facts) -> Iterator[str]:
    """Assumptions of the forecast."""
    seen, times, found = facts.observed, facts.times, facts.forecast
    if times is not None:
        yield (
            f"Step times are inferred from the gaps between tokens and from prefill times. Steps without prompts take "
            f"{_line(times, 'fixed_s', 'stream_s')} for each stream. Steps with prompts take "
            f"{_line(times, 'prompt_step_s', 'token_s')} for each token, those of streams too. Contexts come on top. "
            f"Gaps that the fit had not seen differ by {times.error:.1%} (median). Each simulated step differs by "
            f"{times.scatter:.1%} at random; the intervals of batch tokens/s hold an error of all steps, too."
        )
        low, high = CONTEXT_SHARES
        yield (
            f"Beyond {times.most_streams:.0f} streams a step takes the longer of these two times. Where the record "
            f"cannot tell what streams cost from what their contexts do, contexts have {(low + high) / 2:.0%} of it, "
            f"and from {low:.0%} to {high:.0%} in the runs for the intervals."
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
            f"Recorded TTFTs were {duration(found.overhead_s)} longer than those of a replay. So much is added to all "
            f"simulated ones, with and without batch work. vLLM counts {duration(seen.overhead_s)} outside of queue "
            f"and steps, and no more may be added. Network time is not included."
        )
    yield f"The KV cache holds {facts.kv_tokens:,} tokens, {facts.kv_source}."
    limits = found.option(INSIDE)
    yield (
        f"The engine runs up to {limits.max_num_seqs} requests (chats and batch lines) and "
        f"{limits.max_num_batched_tokens:,} tokens in a step. vLLM does not report these limits: if yours differ, give "
        f"--max-num-seqs and --max-num-batched-tokens."
    )
    yield f"Batch lines are {facts.batch}, share no prefixes, and there are always more."
    if times is not None:
        yield (
            "Steps take as long as recorded ones, planning included, inside vLLM and instead of it: the same kernels "
            "run. That is why both rows are equal."
        )
    else:
        yield "Steps take equally long in every row: the same kernels run."
    yield "Clients send the same chats at the same times, however fast the answers are."


def falsifiers(facts: Facts) -> Iterator[str]:
    """Observations that would show that the forecast is wrong."""
    inside, found = facts.forecast.option(INSIDE), facts.forecast
    yield (
        f"Run vLLM with --scheduler-cls neaptide_vllm.scheduler and such a batch beside at least 400 such chats. "
        f"{_outside(inside.attainment, 'the forecast')} One such run in ten is outside by chance alone."
    )
    rate = inside.batch_tokens_per_s
    if has_interval(rate):
        yield f"So do less than {rate.low:,.0f} batch tokens/s there, or more than {rate.high:,.0f}."
    else:
        yield f"Batch tokens/s have no interval here, so no difference from {rate.value:,.0f} shows an error."
    priority = found.option(found.best_priority)
    yield (
        f"Run vLLM's priority with {priority.max_num_seqs} slots and {priority.max_num_batched_tokens:,} step tokens. "
        f"{_outside(priority.attainment, 'its row')}"
    )
    for check in checks(facts):
        yield (
            f"Record again at the same load. A mean {check.name} more than {CLOSE:.0%} from the simulated "
            f"{1e3 * check.replayed_s:.1f} ms (recorded: {1e3 * check.recorded_s:.1f} ms) speaks against the inferred "
            f"step times."
        )


def silences(facts: Facts) -> Iterator[str]:
    """Limits of the page."""
    yield "Other hours, other traffic and growth: only what was recorded is simulated" + (
        "." if facts.speed == 1.0 else f", at {facts.speed:g} times its speed."
    )
    yield "What a chat with its own targets would get: all have the same ones here."
    yield "Failures, restarts, adapters, speculation and structured output."
    yield "How it ends: this is a forecast of one load on one server, and no promise."


def _num_priority(found: Forecast) -> int:
    return sum(option.name.startswith("priority") for option in found.options)


def _keeps_chats(option: ForecastOption) -> bool:
    """Whether any chats are in time, as far as a page shows it."""
    return option.attainment.value >= 5e-4


def has_interval(rate: Estimate) -> bool:
    return rate.high > rate.low


def rate_text(rate: Estimate) -> str:
    return f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})" if has_interval(rate) else f"{rate.value:,.0f}"


def _outside(share: Estimate, subject: str) -> str:
    """Which shares in time an interval excludes, as a sentence."""
    said = [f"fewer than {share.low:.1%}"] if share.low >= 5e-4 else []
    said += [f"more than {share.high:.1%}"] if share.high < 1.0 - 5e-4 else []
    if not said:
        return f"No share of chats in time speaks against {subject}."
    text = ", or ".join(said)
    return f"{text[:1].upper()}{text[1:]} of the chats in time speak against {subject}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _bounds(low: float, high: float) -> str:
    return f"{low:.1%}" if high - low < 5e-4 else f"{100 * low:.1f} to {100 * high:.1f}%"


def _line(times: InferredStepTimes, fixed: str, slope: str) -> str:
    low, high = times.spread[fixed]
    value, each_s = times.costs[fixed], times.costs[slope]
    return f"{1e3 * value:.1f} ms (90%: {1e3 * low:.1f} to {1e3 * high:.1f}) and {1e3 * each_s:.2g} ms more"
