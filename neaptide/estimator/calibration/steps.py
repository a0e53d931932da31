"""The steps that a calibration measures."""

import math
import random
from dataclasses import dataclass

from neaptide.engine.config import SchedulerConfig, SharedReads
from neaptide.estimator.calibration.micro_runs import Parts, shared_tokens

DECODE_KV_TOKENS = (16, 64, 256, 1024, 4096)
PREFILL_CONTEXTS = (0, 256, 1024, 4096)
RAGGED_TRAINING = 32
"""Ragged steps per regime for fitting."""
RAGGED_HELD_OUT = 16
"""Ragged steps per regime that are held out for judging."""
HELD_OUT_EVERY = 6
"""One in this many steps of the grid is held out."""
SHARED_TOKENS = (256, 1024, 4096)
"""Lengths of shared prefixes."""
OWN_TOKENS = 64
"""KV tokens of a decode after a shared prefix."""

REFERENCE: Parts = ((32, 0), *((1, 64),) * 8)
"""Repeated between the other steps, to see the machine's speed drift."""


@dataclass(slots=True, frozen=True)
class CalibrationLimits:
    """Limits of a step."""

    max_batched_tokens: int
    max_seqs: int
    max_model_len: int
    kv_tokens: int
    """Token capacity of the KV cache."""
    decodes_per_read: int = 1
    """See ``SharedReads``; 1 without shared reads."""

    @classmethod
    def of(
        cls, scheduler: SchedulerConfig, kv_tokens: int, shared_reads: SharedReads | None = None
    ) -> "CalibrationLimits":
        limits = scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len
        return cls(*limits, kv_tokens, 1 if shared_reads is None else shared_reads.decodes_per_read)

    def allow(self, parts: Parts) -> bool:
        """Whether a step is within the limits. Counts tokens, not blocks."""
        return (
            0 < sum(part[0] for part in parts) <= self.max_batched_tokens
            and len(parts) <= self.max_seqs
            and max(sum(part[:2]) for part in parts) <= self.max_model_len
            and sum(sum(part[:2]) for part in parts) - shared_tokens(parts) <= self.kv_tokens
        )


@dataclass(slots=True, frozen=True)
class CalibrationSteps:
    training: list[Parts]
    held_out: list[Parts]
    grid: frozenset[Parts]
    """Steps of both lists that are on the grid, not ragged."""


def calibration_steps(limits: CalibrationLimits, seed: int) -> CalibrationSteps:
    """A grid over powers of two, and ragged steps between them as a scheduler makes them; some of both are held out."""
    rng = random.Random(seed)
    grid = [parts for parts in dict.fromkeys(_prefills() + _decodes(limits) + _mixed()) if limits.allow(parts)]
    rng.shuffle(grid)
    cut = len(grid) // HELD_OUT_EVERY
    training, held_out = grid[cut:], grid[:cut]
    for kind in _KINDS:
        ragged = [ragged_step(limits, rng, kind) for _ in range(RAGGED_TRAINING + RAGGED_HELD_OUT)]
        new = [parts for parts in dict.fromkeys(ragged) if limits.allow(parts) and parts not in grid]
        cut = len(new) * RAGGED_TRAINING // (RAGGED_TRAINING + RAGGED_HELD_OUT)
        training += new[:cut]
        held_out += new[cut:]
    training += [parts for parts in _shared(limits) if limits.allow(parts)]
    return CalibrationSteps(training, held_out, frozenset(grid))


def start_steps(limits: CalibrationLimits) -> list[Parts]:
    """A few steps for a server's start, small ones first.

    Many contain a short chunk, alone or next to decodes. They show what a prompt's first tokens add to a step. If the
    model overestimates that, no prompt runs next to streams, and nothing corrects the model.
    """
    steps: list[Parts] = [
        ((8, 0),),
        ((16, 0),),
        _equal(1, 64),
        _equal(2, 128),
        ((64, 0),),
        _equal(4, 64),
        ((16, 128),),
        _equal(1, 512),
        _equal(8, 128),
        ((32, 0),),
        ((16, 0), *_equal(2, 128)),
        ((16, 0),) * 2,
        _equal(16, 128),
        ((24, 0), *_equal(2, 200)),
        ((16, 64), *_equal(4, 128)),
        ((128, 0),),
        ((32, 0), *_equal(8, 64)),
        ((48, 64),),
        _equal(32, 64),
        ((48, 0), *_equal(4, 128)),
        ((64, 256), *_equal(2, 256)),
        _equal(32, 256),
        ((32, 0),) * 4,
        ((256, 0),),
        ((128, 0), *_equal(16, 128)),
        _equal(4, 1024),
        ((512, 0),),
    ]
    if limits.decodes_per_read > 1:
        steps += [_sharing(min(count, limits.decodes_per_read), tokens) for count, tokens in ((4, 512), (8, 1024))]
    return [parts for parts in steps if limits.allow(parts)]


def powers_of_two(first: int, last: int) -> list[int]:
    return [1 << k for k in range(last.bit_length()) if first <= 1 << k <= last]


def _equal(requests: int, kv_tokens: int) -> Parts:
    """Decodes that each read ``kv_tokens`` tokens, including their own. One more token would begin another block."""
    return ((1, kv_tokens - 1),) * requests


def _prefills() -> list[Parts]:
    alone: list[Parts] = [((n, c),) for n in powers_of_two(1, 8192) for c in PREFILL_CONTEXTS if n > 1 or c == 0]
    several: list[Parts] = [((n, 0),) * k for n in (16, 64, 256) for k in (2, 4, 8)]
    return alone + several


def _decodes(limits: CalibrationLimits) -> list[Parts]:
    powers = powers_of_two(1, limits.max_seqs)
    between = [3 * b // 2 for b in powers if b > 1]  # the matrix product curve has knots there too
    return [_equal(b, c) for b in powers for c in DECODE_KV_TOKENS] + [
        _equal(b, c) for b in between for c in (64, 1024)
    ]


def _sharing(requests: int, prefix_tokens: int) -> Parts:
    """Decodes after one prefix, which is read once."""
    return ((1, prefix_tokens + OWN_TOKENS - 1, prefix_tokens),) * requests


def _shared(limits: CalibrationLimits) -> list[Parts]:
    """Decodes that share reads, in numbers that one read serves; none for a kernel that shares no reads."""
    counts = {*powers_of_two(2, limits.decodes_per_read), limits.decodes_per_read} - {1}
    return [_sharing(count, tokens) for count in sorted(counts) for tokens in SHARED_TOKENS]


def _mixed() -> list[Parts]:
    return [
        ((chunk, context), *_equal(decodes, decode_kv_tokens))
        for chunk in (16, 64, 256, 1024)
        for context in (0, 1024)
        for decodes in (1, 4, 16, 64, 128)
        for decode_kv_tokens in (32, 128, 512, 2048)
    ]


_KINDS = ("prefill", "decode", "mixed")


def ragged_step(limits: CalibrationLimits, rng: random.Random, kind: str) -> Parts:
    """A step with sizes between the powers of two and different contexts. It may exceed the limits."""
    parts: list[tuple[int, int]] = []
    if kind != "decode":
        prompts = rng.choice((1, 1, 2, 3))
        room = limits.max_batched_tokens // (prompts if kind == "prefill" else 2 * prompts)
        parts += [(_between(rng, 2, room), rng.choice((0, _between(rng, 16, 4096)))) for _ in range(prompts)]
    if kind != "prefill":
        decodes = _between(rng, 1, limits.max_seqs if kind == "decode" else limits.max_seqs // 2)
        mean = _between(rng, 16, max(min(4096, limits.kv_tokens // (2 * decodes)), 17))
        parts += [(1, rng.randint(mean // 2, 3 * mean // 2)) for _ in range(decodes)]
    return tuple(parts)


def _between(rng: random.Random, low: int, high: int) -> int:
    """A log-uniform integer: small and large sizes are equally likely."""
    return round(low * math.pow(max(high, low) / low, rng.random()))
