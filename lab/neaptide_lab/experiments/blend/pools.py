"""Pools to a density and a share of common prefixes, at a size that can be simulated.

BlendServe's pools have 400,000 requests and take 220,000 steps, for answers of 16,000 tokens must be few beside those
steps. A pool that is shrunk by k has answers that are k times shorter, on a device where a cached token weighs k times
more: memory holds k times fewer, and to read one takes k times longer. So densities, requests at work and the parts of
a step's time stay what they are, and there are k times fewer steps, and prompts, which keep their lengths.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.blend_sets import (
    BURSTGPT_OUTPUT_TOKENS,
    BURSTGPT_PROMPT_TOKENS,
    BURSTGPT_SHARING,
    DENSITY_TOKENS,
    MMLU_HEAD_TOKENS,
    MMLU_OUTPUT_TOKENS,
    MMLU_PROMPT_TOKENS,
    MMLU_SUBJECT_REQUESTS,
    OPENVID_OUTPUT_TOKENS,
    OPENVID_PROMPT_TOKENS,
    OPENVID_SYSTEM_TOKENS,
)
from neaptide.loadgen.workloads.lengths import exponential_lengths, lognormal_lengths, shares_of, uniform_lengths
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base

BLOCK_TOKENS = 16
HEAD_SPREAD, QUESTION_SPREAD = 0.3, 0.5
"""Standard deviation over mean. These are ours, and less than in ``blend_sets``: a prompt must stay small relative to
the memory."""


@dataclass(slots=True, frozen=True)
class Chats:
    """The part that wants compute, with a system prompt in common.

    Of the published sets densities and sharing are known (Table 4). With K tokens (``blend_sets``) answers whose
    standard deviation is their mean D have a density of (1 - s) K / D; lengths of prompts are ours.
    """

    prompt_tokens: int
    prompt_std: int
    output_tokens: float
    sharing: float
    output_spread: float = 1.0
    """Standard deviation of answers over their mean."""

    def system_tokens(self, shrink: int) -> int:
        """A block at least: the paper's tree knows single tokens, ours whole blocks."""
        return max(round(self.sharing * (self.prompt_tokens + self.output_tokens / shrink)), BLOCK_TOKENS)


BURSTGPT = Chats(BURSTGPT_PROMPT_TOKENS, BURSTGPT_PROMPT_TOKENS // 2, BURSTGPT_OUTPUT_TOKENS, BURSTGPT_SHARING)
AZURE = Chats(2048, 1024, DENSITY_TOKENS * 0.99 / 33.2, 0.01)
SHAREGPT = Chats(246, 123, DENSITY_TOKENS * 0.98 / 3.12, 0.02)
WILDCHAT = Chats(300, 150, 256, 0.19, 1.35)
"""Answers are 256 tokens as stated, so the spread makes its density of 2.13."""


@dataclass(slots=True, frozen=True)
class Mix:
    """What is asked for."""

    density: float
    sharing: float
    chats: Chats = BURSTGPT
    density_tokens: float = DENSITY_TOKENS
    """K of the model, see ``blend_sets``."""


@dataclass(slots=True, frozen=True)
class Size:
    shrink: int
    lasting: float
    """How many times as many steps as the longest answer the long ones take together, if they fill the memory: a short
    pool is as good as its longest answer lets it be. BlendServe's 400,000 requests are 2.1 at a density of 1.4."""
    spreads: bool = False
    """Long answers spread as the published density of OpenVid asks (0.05, so their standard deviation is their mean,
    and the longest of 400 is seven times as long); else evenly from nothing to twice the mean, which is 0.075, and
    needs a third of the requests."""

    def num_videos(self, kv_tokens: int) -> int:
        """Answers of mean D read n D^2 tokens if they spread, and the longest of them has D ln 2n; else two thirds of
        that and 2 D. Memory holds ``kv_tokens``."""
        memory, count = kv_tokens / OPENVID_OUTPUT_TOKENS, 2.0
        if not self.spreads:
            return max(round(3.0 * self.lasting * memory), 2)
        for _ in range(40):
            count = max(self.lasting * memory * math.log(2.0 * count), 2.0)
        return round(count)

    def long_answers(self, rng: np.random.Generator, count: int) -> IntArray:
        if self.spreads:
            return exponential_lengths(rng, count, OPENVID_OUTPUT_TOKENS)
        return uniform_lengths(rng, count, 1, round(2.0 * OPENVID_OUTPUT_TOKENS) - 1)


def shrunk(profile: DeviceProfile, shrink: int) -> DeviceProfile:
    """The device on which a cached token weighs as much as ``shrink`` of the profile's."""
    costs = {
        regime: msgspec.structs.replace(cost, kv_token_s=shrink * cost.kv_token_s)
        for regime, cost in profile.costs.items()
    }
    return msgspec.structs.replace(
        profile,
        num_blocks=profile.num_blocks // shrink,
        kv_bytes_per_token=profile.kv_bytes_per_token * shrink,
        costs=costs,
    )


def blended(mix: Mix, size: Size, profile: DeviceProfile) -> OfflineSet:
    """A pool of chats, MMLU-like questions and OpenVid-like long answers, shrunk.

    Args:
        profile: as it is without shrinking; its memory says how many long answers make a pool of the size.

    Raises:
        ValueError: no mix of these parts has the density and the sharing.
    """
    rng, name = np.random.default_rng(0), f"blend-{mix.density:.2f}-{mix.sharing:.2f}"
    ids = itertools.count(content_base(f"{name}/{size.shrink}"))
    videos = list(_videos(ids, rng, size.long_answers(rng, size.num_videos(profile.kv_capacity_tokens)), size.shrink))
    num_chats, num_questions = _counts(mix, size.shrink, videos)
    requests = [
        *_chats(ids, rng, mix.chats, num_chats, size.shrink),
        *_questions(ids, rng, num_questions, size.shrink),
        *videos,
    ]
    order = rng.permutation(len(requests)).tolist()
    return OfflineSet(name, [requests[k] for k in order], synthetic=True)


def _counts(mix: Mix, shrink: int, videos: list[TraceRequest]) -> tuple[int, int]:
    """Chats and questions that the long answers need: two linear equations, for shared tokens and for the density.
    Decodes make the memory, so an answer's first token, which comes with its prompt, is not counted."""
    weight = mix.density_tokens / shrink * (1.0 - mix.sharing) / mix.density
    chats, questions = mix.chats, MMLU_OUTPUT_TOKENS / shrink
    decodes = chats.output_tokens / shrink
    half_square = (1.0 + chats.output_spread**2) / 2.0 * decodes**2
    parts = [  # tokens, tokens that are read, tokens that are shared
        (chats.prompt_tokens + decodes, chats.prompt_tokens * decodes + half_square, chats.system_tokens(shrink)),
        (MMLU_PROMPT_TOKENS + questions, MMLU_PROMPT_TOKENS * questions, MMLU_HEAD_TOKENS),
        (
            sum(r.input_tokens + r.output_tokens for r in videos),
            sum((r.input_tokens + r.output_tokens / 2) * r.output_tokens for r in videos),
            BLOCK_TOKENS * len(videos),
        ),
    ]
    of_chats, of_questions, of_videos = (
        (shared - mix.sharing * tokens, weight * tokens - read) for tokens, read, shared in parts
    )
    counts = np.linalg.solve(np.array([of_chats, of_questions]).T, -np.array(of_videos))
    if counts.min() < 0.5:
        raise ValueError(f"no mix has a density of {mix.density} and a sharing of {mix.sharing}")
    return round(float(counts[0])), round(float(counts[1]))


def _chats(
    ids: Iterator[int], rng: np.random.Generator, chats: Chats, count: int, shrink: int
) -> Iterator[TraceRequest]:
    system = (next(ids), chats.system_tokens(shrink))
    own = lognormal_lengths(rng, count, chats.prompt_tokens - system[1], chats.prompt_std)
    if chats.output_spread == 1.0:
        outputs = exponential_lengths(rng, count, chats.output_tokens)
    else:
        outputs = lognormal_lengths(rng, count, chats.output_tokens, chats.output_spread * chats.output_tokens)
    for prompt, decodes in zip(own.tolist(), _shrunk(rng, outputs, shrink).tolist(), strict=True):
        yield TraceRequest(0.0, (system, (next(ids), prompt)), 1 + decodes)


def _questions(ids: Iterator[int], rng: np.random.Generator, count: int, shrink: int) -> Iterator[TraceRequest]:
    """Whole subjects of about 246 questions, each with a head of worked examples."""
    subjects = max(1, round(count / MMLU_SUBJECT_REQUESTS))
    heads = lognormal_lengths(rng, subjects, MMLU_HEAD_TOKENS, HEAD_SPREAD * MMLU_HEAD_TOKENS)
    own_tokens = MMLU_PROMPT_TOKENS - MMLU_HEAD_TOKENS
    own = iter(lognormal_lengths(rng, count, own_tokens, QUESTION_SPREAD * own_tokens).tolist())
    decodes = iter(_shrunk(rng, np.full(count, MMLU_OUTPUT_TOKENS), shrink).tolist())
    for head, questions in zip(heads.tolist(), shares_of(count, np.ones(subjects)).tolist(), strict=True):
        subject = (next(ids), head)
        for _ in range(questions):
            yield TraceRequest(0.0, (subject, (next(ids), next(own))), 1 + next(decodes))


def _videos(ids: Iterator[int], rng: np.random.Generator, outputs: IntArray, shrink: int) -> Iterator[TraceRequest]:
    """Their lengths are requested, so they are known. Their prompts, which every step reads, are shrunk as well, except
    the block that shows that they belong together."""
    own_tokens = max(round((OPENVID_PROMPT_TOKENS - OPENVID_SYSTEM_TOKENS) / shrink), 1)
    system = (next(ids), BLOCK_TOKENS)
    for decodes in _shrunk(rng, outputs, shrink).tolist():
        yield TraceRequest(0.0, (system, (next(ids), own_tokens)), 1 + decodes, is_fixed=True)


def _shrunk(rng: np.random.Generator, tokens: IntArray, shrink: int) -> IntArray:
    """Divided, with chance in place of fractions, so that the mean stays."""
    exact: FloatArray = tokens / shrink
    return np.floor(exact + rng.random(len(tokens))).astype(np.int64)
