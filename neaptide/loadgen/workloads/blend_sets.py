"""BlendServe's workloads: three kinds of requests mixed to a compute density and a degree of prefix sharing.

BlendServe (ASPLOS'26), sections 4.1 and 6.2, appendix A.3, Tables 2 and 4. All are synthetic: the recorded sets are not
bundled, so each part is drawn to its density and sharing in Table 4.

Density is the paper's ``(1 - s) T_comp / T_mem`` without prefill attention, which the paper also omits. With ``T_comp ~
p + d`` and ``T_mem ~ p d + d^2 / 2`` tokens it is ``K (1 - s) sum(p + d) / sum(p d + d^2 / 2)``. The constant ``K = 2 P
bandwidth / (compute kv_bytes_per_token)``, in tokens, describes model and device. ``s`` is the fraction of the compute
that common prefixes save (section 3.2), and so of prompt and output tokens. With few long outputs it is slightly less
than the fraction of prompt tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.loadgen.workloads.generated_sets import ContentIds, Generator
from neaptide.loadgen.workloads.lengths import exponential_lengths, lognormal_lengths, shares_of
from neaptide.loadgen.workloads.sharing import prefix_sharing
from neaptide.loadgen.workloads.traces import TraceRequest

DENSITY_TOKENS = 2 * 8.03e9 * 2.039e12 / (312e12 * 131_072)
"""K of Llama-3.1-8B on an A100 80 GB SXM: about 801 tokens."""
BLEND_REQUESTS = 40_000
TRACE_TARGETS = {1: (1.4, 0.35), 2: (0.9, 0.35), 3: (1.4, 0.05), 4: (0.9, 0.05)}
"""(density, sharing) of Table 2."""
DENSITY_TOLERANCE = 0.03
"""Allowed relative error of a mix's density."""
SHARING_TOLERANCE = 0.015
"""Allowed error of its sharing, as a fraction of all tokens."""

BURSTGPT_DENSITY, BURSTGPT_SHARING = 17.78, 0.02
MMLU_SHARING = 0.8646
OPENVID_DENSITY = 0.05

BURSTGPT_PROMPT_TOKENS, BURSTGPT_PROMPT_STD = 620, 620
OPENVID_PROMPT_TOKENS, OPENVID_SYSTEM_TOKENS = 100, 40
MMLU_PROMPT_TOKENS, MMLU_OUTPUT_TOKENS, MMLU_SUBJECT_REQUESTS = 874, 2, 246

BURSTGPT_OUTPUT_TOKENS = DENSITY_TOKENS * (1 - BURSTGPT_SHARING) / BURSTGPT_DENSITY
OPENVID_OUTPUT_TOKENS = DENSITY_TOKENS / OPENVID_DENSITY
"""An exponential output of mean D has the density K / D for any prompts: 44 tokens, and 16,015 for OpenVid, which is
the paper's "16K"."""
BURSTGPT_SYSTEM_TOKENS = round(BURSTGPT_SHARING * (BURSTGPT_PROMPT_TOKENS + BURSTGPT_OUTPUT_TOKENS))
MMLU_HEAD_TOKENS = MMLU_SHARING * (MMLU_PROMPT_TOKENS + MMLU_OUTPUT_TOKENS) * (1 + 1 / (MMLU_SUBJECT_REQUESTS - 1))


@dataclass(slots=True)
class _Part:
    """Mean contribution of one request of a part, in tokens."""

    compute: float
    memory: float
    saved: float


_BURSTGPT = _Part(
    BURSTGPT_PROMPT_TOKENS + BURSTGPT_OUTPUT_TOKENS,
    BURSTGPT_PROMPT_TOKENS * BURSTGPT_OUTPUT_TOKENS + BURSTGPT_OUTPUT_TOKENS**2,
    BURSTGPT_SYSTEM_TOKENS,
)
_MMLU = _Part(
    MMLU_PROMPT_TOKENS + MMLU_OUTPUT_TOKENS,
    MMLU_PROMPT_TOKENS * MMLU_OUTPUT_TOKENS + MMLU_OUTPUT_TOKENS**2 / 2,
    MMLU_SHARING * (MMLU_PROMPT_TOKENS + MMLU_OUTPUT_TOKENS),
)
_OPENVID = _Part(
    OPENVID_PROMPT_TOKENS + OPENVID_OUTPUT_TOKENS,
    OPENVID_PROMPT_TOKENS * OPENVID_OUTPUT_TOKENS + OPENVID_OUTPUT_TOKENS**2,
    OPENVID_SYSTEM_TOKENS,
)


def blend(density: float, sharing: float, density_tokens: float = DENSITY_TOKENS) -> Generator:
    """A mix of BurstGPT-, MMLU- and OpenVid-like requests with this density and sharing.

    density_tokens: K of another model or device; it changes the parts' counts, not their lengths. The generator raises
    ValueError if no mix of the parts reaches the target.
    """

    def generate(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
        burstgpt, mmlu, openvid = blend_counts(density, sharing, count, density_tokens)
        rest = [*_burstgpt_like(ids, rng, burstgpt), *_mmlu_like(ids, rng, mmlu)]
        videos = _openvid_like(ids, rng, openvid)
        requests = [*rest, *_stretched(videos, rest, density, sharing, density_tokens)]
        Mix.of(requests, density_tokens).check(density, sharing)
        return requests

    return generate


@dataclass(slots=True, frozen=True)
class Mix:
    """Density and sharing of a pool of requests."""

    density: float
    sharing: float

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], density_tokens: float = DENSITY_TOKENS) -> "Mix":
        """Measures a pool: every token that prompts share counts once."""
        prompts = np.array([request.input_tokens for request in requests], np.float64)
        outputs = np.array([request.output_tokens for request in requests], np.float64)
        shared = prefix_sharing(request.segments for request in requests)
        sharing = (shared.tokens - shared.unique_tokens) / (shared.tokens + float(outputs.sum()))
        memory = float((prompts * outputs + outputs**2 / 2.0).sum())
        compute = float((prompts + outputs).sum())
        return cls(density_tokens * (1.0 - sharing) * compute / memory, sharing)

    def check(self, density: float, sharing: float) -> None:
        """Raises ValueError if the mix misses a target by more than the tolerance, as small pools may."""
        if abs(self.density / density - 1.0) > DENSITY_TOLERANCE or abs(self.sharing - sharing) > SHARING_TOLERANCE:
            raise ValueError(
                f"the mix has a density of {self.density:.3f} and a sharing of {self.sharing:.3f}, not {density} and "
                f"{sharing}: use more requests"
            )


def blend_counts(density: float, sharing: float, count: int, density_tokens: float = DENSITY_TOKENS) -> tuple[int, ...]:
    """Numbers of requests of the BurstGPT-, MMLU- and OpenVid-like parts.

    They solve three linear equations for the number of requests, the saved tokens and the density. Raises ValueError if
    a part would have less than one request.
    """
    parts = (_BURSTGPT, _MMLU, _OPENVID)
    equations = [
        [1.0 for part in parts],
        [part.saved - sharing * part.compute for part in parts],
        [density_tokens * (1 - sharing) * part.compute - density * part.memory for part in parts],
    ]
    exact = np.linalg.solve(np.array(equations), np.array([count, 0.0, 0.0]))
    if exact.min() < 0.5:
        raise ValueError(f"{count} requests cannot be mixed to a density of {density} and a sharing of {sharing}")
    openvid, mmlu = (max(1, round(float(exact[k]))) for k in (2, 1))
    return count - mmlu - openvid, mmlu, openvid


def _burstgpt_like(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
    own_mean = BURSTGPT_PROMPT_TOKENS - BURSTGPT_SYSTEM_TOKENS
    own = lognormal_lengths(rng, count, own_mean, BURSTGPT_PROMPT_STD).tolist()
    outputs = exponential_lengths(rng, count, BURSTGPT_OUTPUT_TOKENS).tolist()
    system = (next(ids), BURSTGPT_SYSTEM_TOKENS)
    return [TraceRequest(0.0, (system, (next(ids), p)), d) for p, d in zip(own, outputs, strict=True)]


def _mmlu_like(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
    """Whole subjects of about 246 questions, each with a prefix of worked examples."""
    subjects = max(1, round(count / MMLU_SUBJECT_REQUESTS))
    heads = lognormal_lengths(rng, subjects, MMLU_HEAD_TOKENS, 0.6 * MMLU_HEAD_TOKENS)
    own_mean = MMLU_PROMPT_TOKENS - MMLU_HEAD_TOKENS
    own = iter(lognormal_lengths(rng, count, own_mean, own_mean / 2).tolist())
    requests = []
    for head, questions in zip(heads.tolist(), shares_of(count, np.ones(subjects)).tolist(), strict=True):
        subject = (next(ids), head)
        requests += [TraceRequest(0.0, (subject, (next(ids), next(own))), MMLU_OUTPUT_TOKENS) for _ in range(questions)]
    return requests


def _openvid_like(ids: ContentIds, rng: np.random.Generator, count: int) -> list[TraceRequest]:
    own_mean = OPENVID_PROMPT_TOKENS - OPENVID_SYSTEM_TOKENS
    own = lognormal_lengths(rng, count, own_mean, own_mean / 3).tolist()
    outputs = exponential_lengths(rng, count, OPENVID_OUTPUT_TOKENS).tolist()
    system = (next(ids), OPENVID_SYSTEM_TOKENS)
    return [TraceRequest(0.0, (system, (next(ids), p)), d) for p, d in zip(own, outputs, strict=True)]


def _stretched(
    videos: list[TraceRequest], rest: list[TraceRequest], density: float, sharing: float, density_tokens: float
) -> list[TraceRequest]:
    """The long outputs, scaled so that the mix reaches its density: a few dozen requests cannot reach it by count."""
    prompts = np.array([request.input_tokens for request in videos], float)
    outputs = np.array([request.output_tokens for request in videos], float)
    rest_compute = sum(request.input_tokens + request.output_tokens for request in rest)
    rest_memory = sum((r.input_tokens + r.output_tokens / 2) * r.output_tokens for r in rest)
    # memory(scale) = compute(scale) * K (1 - s) / density, with memory and compute of all requests
    weight = density_tokens * (1 - sharing) / density
    square = (outputs**2).sum() / 2
    linear = (prompts * outputs).sum() - weight * outputs.sum()
    constant = rest_memory - weight * (rest_compute + prompts.sum())
    scale = (-linear + math.sqrt(linear**2 - 4 * square * constant)) / (2 * square)
    return [TraceRequest(0.0, r.segments, max(1, round(r.output_tokens * scale))) for r in videos]
