"""Upper bounds on offline tokens/s for any policy, assuming that all lengths and arrivals are known.

They are the fluid limit of the roofline. Steps have the size that spreads their fixed cost best, read the weights for
free and hold any number of requests. The remaining work must be done. It is the matrix products and attention of every
token that no cache can have, one read of the cached context per decoded token, and the cost per request. Online work is
done as late as its deadlines from arrival allow, so only what is due inside the window counts. The rest of the window
goes to the offline sets in their own mix.

That is the long-run bound. Within one window a policy may exceed it at the expense of the time outside. A full prefix
cache may have been computed before the window, and a cache of prompts may be decoded after it. The window bound allows
for both.

A policy that lets chats be late is held by neither: it has their time for offline work. The bound ``in_time`` is the
window bound beside those requests alone that a run had in time, so no run exceeds it, except by lucky noise.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import read_kv_tokens
from neaptide.estimator.cost.step_cost import StepCost, gemm_knot
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.traces import Segments, TraceRequest
from neaptide.simulation.measures import Window
from neaptide.simulation.scenario import Scenario

Bounds = dict[str, float | None]
"""``long_run``, ``window``, and of a run ``in_time``."""

TargetsKept = Literal["every token", "both targets", "nothing"]
"""Targets that a run kept: every token's deadline from arrival, the two targets in the mean, or less."""


@dataclass(slots=True, frozen=True)
class Devices:
    """The devices that work in a window."""

    mean_number: float
    caches: int
    """Number of caches that existed at some time in the window."""


ONE_DEVICE = Devices(1.0, 1)


@dataclass(slots=True, frozen=True)
class BoundWork:
    """Device seconds: compute and memory may overlap, the rest does not."""

    compute_s: float
    memory_s: float
    rest_s: float = 0.0

    def lines_s(self, overlap_kappa: float) -> tuple[float, float]:
        """Two sums whose larger one is the time of the work: max + kappa min, for a kappa of at most 1."""
        compute_first_s = self.compute_s + overlap_kappa * self.memory_s
        memory_first_s = self.memory_s + overlap_kappa * self.compute_s
        return self.rest_s + compute_first_s, self.rest_s + memory_first_s


@dataclass(slots=True, frozen=True)
class OfflineMix:
    """All work to be done once for the offline sets."""

    prefill: BoundWork
    decode: BoundWork
    prompt_tokens: int
    output_tokens: int
    caches: float
    """Size of the KV cache relative to the sets' prompts, with shared tokens counted once; 0 ignores the window's
    edges."""
    shares: bool
    """Whether prompts share text."""


def most_tokens(window_s: float, online: BoundWork, offline: OfflineMix, overlap_kappa: float) -> float:
    """Offline tokens that fit into the window together with ``online``."""
    lines = (work.lines_s(overlap_kappa) for work in (online, offline.prefill, offline.decode))
    return max(min(_on_line(window_s, offline, *line) for line in zip(*lines, strict=True)), 0.0)


def _on_line(window_s: float, offline: OfflineMix, online_s: float, prefill_s: float, decode_s: float) -> float:
    """The tokens if time were this sum. Decoding left for later is all or nothing, whichever gives more."""
    found_s = offline.caches * prefill_s if offline.shares else 0.0
    tokens_per_s = (offline.prompt_tokens + offline.output_tokens) / (prefill_s + decode_s)
    at_once = (window_s - online_s + found_s) * tokens_per_s
    left_s, left_tokens = offline.caches * decode_s, offline.caches * offline.output_tokens
    return max(at_once, at_once + left_s * tokens_per_s - left_tokens)


@dataclass(slots=True, frozen=True)
class UnitCosts:
    """Lower bounds of the cost per unit of work, for steps of any regime and size, in seconds."""

    token_s: float
    row_s: float
    pair_s: float
    kv_token_s: float
    link_token_s: float
    decode_request_s: float
    prefill_request_s: float

    @classmethod
    def of(cls, profile: DeviceProfile) -> "UnitCosts":
        costs = list(profile.costs.values())
        return cls(
            token_s=min(map(_least_token_s, costs)),
            row_s=min(cost.row_s for cost in costs),
            pair_s=min(cost.pair_s for cost in costs),
            kv_token_s=min(cost.kv_token_s for cost in costs),
            link_token_s=min(cost.token_s for cost in costs),
            decode_request_s=min(cost.decode_request_s for cost in costs),
            prefill_request_s=min(cost.prefill_request_s for cost in costs),
        )

    def work(self, shape: BatchShape) -> BoundWork:
        """The work of everything added to the shape, for any split into steps."""
        rows = shape.prefill_requests + shape.decode_requests
        compute_s = self.token_s * shape.num_tokens + self.row_s * rows + self.pair_s * shape.prefill_attention_pairs
        requests_s = self.decode_request_s * shape.decode_requests + self.prefill_request_s * shape.prefill_requests
        return BoundWork(
            compute_s, self.kv_token_s * read_kv_tokens(shape), self.link_token_s * shape.num_tokens + requests_s
        )


def _least_token_s(cost: StepCost) -> float:
    """Seconds per token of a step: the matrix products and its part of the fixed cost.

    In a measured profile the fixed cost includes the matrix products of one token. After its last knot the curve
    continues with its last slope: in a large enough step the fixed cost vanishes.
    """
    curve = cost.gemm_curve_s
    last = len(curve) - 1
    slope_s = (curve[last] - curve[last - 1]) / (gemm_knot(last) - gemm_knot(last - 1))
    return min(slope_s, *((cost.fixed_s + seconds) / gemm_knot(k) for k, seconds in enumerate(curve)))


def num_due(left_s: float, tpot_slo_s: float, output_tokens: int) -> int:
    """Output tokens of a request whose deadlines from arrival are within ``left_s`` of the first one's."""
    return min(output_tokens, 1 + int(left_s / tpot_slo_s)) if left_s >= 0 else 0


def add_request(shape: BatchShape, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
    """Adds a prompt in one piece, and a decode for every output token but the first."""
    shape.add(prompt_tokens - cached_tokens, cached_tokens)
    add_decodes(shape, prompt_tokens, output_tokens)


def add_decodes(shape: BatchShape, prompt_tokens: int, output_tokens: int) -> None:
    if decodes := output_tokens - 1:
        read_tokens = decodes * prompt_tokens + decodes * (decodes + 1) // 2
        shape.add_decodes(decodes, read_tokens, prompt_tokens + decodes)


def cached_prefixes(prompts: Iterable[Segments], block_size: int) -> Iterator[int]:
    """Tokens of each prompt that an unlimited cache has, in whole blocks; at least one token is computed."""
    nodes: dict[tuple[int, int, int], int] = {}  # (parent, content, tokens) -> node
    reach: dict[tuple[int, int], int] = {}  # (parent, content) -> tokens of the longest
    for segments in prompts:
        parent = length = found = 0
        is_known = True
        for content, tokens in segments:
            longest = reach.get((parent, content), 0)
            if is_known:
                found += min(longest, tokens)
                is_known = (parent, content, tokens) in nodes
            reach[parent, content] = max(longest, tokens)
            parent = nodes.setdefault((parent, content, tokens), len(nodes) + 1)
            length += tokens
        yield min(found, length - 1) // block_size * block_size


def total_shape(requests: Sequence[TraceRequest], outputs: Iterable[int], block_size: int) -> BatchShape:
    """The work of the requests with these output tokens. Requests with none are deferred, but their prompts are
    cached."""
    shape = BatchShape()
    cached = cached_prefixes((request.segments for request in requests), block_size)
    for request, cached_tokens, output_tokens in zip(requests, cached, outputs, strict=True):
        if output_tokens:
            add_request(shape, request.input_tokens, cached_tokens, output_tokens)
    return shape


def bound_tokens_per_s(
    scenario: Scenario, window_s: Window, devices: Devices = ONE_DEVICE, kept: Sequence[TargetsKept] | None = None
) -> Bounds:
    """Logical offline tokens per second.

    None without offline work, in a window of length zero, or if the scenario disables bounds. Several devices count as
    one with their total time and memory, among which work is split freely.

    Args:
        kept: what a run kept of each online request that fits, in their order; adds the bound ``in_time``.
    """
    length_s = window_s[1] - window_s[0]
    rows = [r for one in scenario.offline for r in one.requests if r.segments and scenario.output_limit(r) > 0]
    if not rows or length_s <= 0 or not scenario.with_bounds:
        names = ("long_run", "window") if kept is None else ("long_run", "window", "in_time")
        return dict.fromkeys(names)
    # Requests from before the window take nothing from it, because their remaining work is unknown.
    fitting = [r for r in scenario.online if r.segments and scenario.output_limit(r) > 0]
    inside = [number for number, r in enumerate(fitting) if r.arrival_s >= window_s[0]]
    online = [fitting[number] for number in inside]
    costs = UnitCosts.of(scenario.profile)
    mix = _mix(scenario, rows, costs)
    in_window = replace(mix, caches=devices.caches * mix.caches)

    def work(every: Iterable[TargetsKept]) -> BoundWork:
        due = [_due(scenario, request, window_s[1], one) for request, one in zip(online, every, strict=True)]
        return costs.work(total_shape(online, due, scenario.block_size))

    def most(online_work: BoundWork, each: OfflineMix) -> float:
        return most_tokens(devices.mean_number * length_s, online_work, each, scenario.overlap_kappa) / length_s

    in_time: TargetsKept = "every token"
    whole = work([in_time] * len(online))
    bounds: Bounds = {"long_run": most(whole, replace(mix, caches=0.0)), "window": most(whole, in_window)}
    if kept is not None:
        bounds["in_time"] = most(work(kept[number] for number in inside), in_window)
    return bounds


def _due(scenario: Scenario, request: TraceRequest, end_s: float, kept: TargetsKept) -> int:
    """Output tokens that a request must have by the window's end, if that much of it was in time.

    A TPOT target is a mean. Where only the mean was met, all tokens but the first may come with the last one.
    """
    outputs = _outputs(scenario, request)
    due = num_due(end_s - request.arrival_s - scenario.ttft_slo_s, scenario.tpot_slo_s, outputs)
    if kept == "nothing":
        return 0
    return due if kept == "every token" or due == outputs else min(due, 1)


def _mix(scenario: Scenario, rows: Sequence[TraceRequest], costs: UnitCosts) -> OfflineMix:
    outputs = [_outputs(scenario, row) for row in rows]
    prompt_tokens = sum(row.input_tokens for row in rows)
    prefill = total_shape(rows, [1] * len(rows), scenario.block_size)
    decode = BatchShape()
    for row, output_tokens in zip(rows, outputs, strict=True):
        add_decodes(decode, row.input_tokens, output_tokens)
    computed_tokens = prefill.num_tokens
    return OfflineMix(
        costs.work(prefill),
        costs.work(decode),
        prompt_tokens,
        sum(outputs),
        scenario.num_blocks * scenario.block_size / computed_tokens,
        computed_tokens < prompt_tokens,
    )


def _outputs(scenario: Scenario, request: TraceRequest) -> int:
    return min(request.output_tokens, scenario.output_limit(request))
