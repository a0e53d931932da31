"""The coefficients of one regime's step time, and the formula that uses them."""

from bisect import bisect_right
from itertools import pairwise

import msgspec

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import raggedness, read_kv_tokens


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a step of one regime, in seconds per unit.

    Without ``weights_s`` the formula is linear in all coefficients, so measured ones are fitted that way.
    """

    fixed_s: float
    """Cost of every step: launches, preparation, and everything else that does not depend on the batch."""
    gemm_curve_s: tuple[float, ...]
    """Matrix products of a step of 1, 2, 3, 4, 6, 8, 12, ... tokens (``gemm_knot``), at least two values. Linear
    between them and after the last."""
    pair_s: float
    """Prefill attention, per (query, key) pair."""
    kv_token_s: float
    """Reading cached keys and values, per KV token: of decodes, and of the context before prefill chunks."""
    shared_kv_token_s: float = 0.0
    """Per KV token that a decode need not read, because another one's read serves both (``shared_prefix_tokens``)."""
    masked_pair_s: float = 0.0
    """Per pair above the diagonal of a chunk with context, if the kernel computes those too."""
    ragged_s: float = 0.0
    """Decodes of different lengths, times ``raggedness``: they run in more pieces."""
    decode_request_s: float = 0.0
    prefill_request_s: float = 0.0
    swap_block_s: float = 0.0
    """Per KV block copied to or from host memory."""
    weights_s: float = 0.0
    """Reading the weights once: a lower bound for the matrix products."""
    row_s: float = 0.0
    """Output projection, per request of the step."""
    token_s: float = 0.0
    """Per token, never overlapped: all-reduce of tensor parallelism."""

    def scaled(self, factors: "Terms") -> "StepCost":
        """The costs with every term multiplied by its factor; approximate if operators overlap."""
        fixed, gemm, attention, kv, requests, swap = factors
        return StepCost(
            fixed_s=fixed * self.fixed_s,
            gemm_curve_s=tuple(gemm * seconds for seconds in self.gemm_curve_s),
            pair_s=attention * self.pair_s,
            kv_token_s=kv * self.kv_token_s,
            shared_kv_token_s=kv * self.shared_kv_token_s,
            masked_pair_s=attention * self.masked_pair_s,
            ragged_s=requests * self.ragged_s,
            decode_request_s=requests * self.decode_request_s,
            prefill_request_s=requests * self.prefill_request_s,
            swap_block_s=swap * self.swap_block_s,
            weights_s=gemm * self.weights_s,
            row_s=gemm * self.row_s,
            token_s=gemm * self.token_s,
        )


Terms = tuple[float, float, float, float, float, float]
"""The parts of a step's predicted time, in seconds, which sum to it: fixed, matrix products, prefill attention, KV
reads, requests, swap.

A plain tuple, because hundreds are made per step.
"""
NUM_TERMS = 6


def gemm_knot(index: int) -> int:
    """Tokens at a knot of the matrix product curve: powers of two and the middles between them."""
    octave, half = divmod(index + 1, 2)
    return (2 + half) << octave - 1 if index else 1


def gemm_segment(num_tokens: int) -> int:
    """Index of the last knot at or below this many tokens."""
    octave = num_tokens.bit_length() - 1
    return 2 * octave - 1 + (num_tokens >= 3 << octave - 1) if octave else 0


class StepFormula:
    """``StepCost`` compiled for speed: every call is O(1) in plain floats.

    Serial time = max(compute, weights) + prefill attention + KV reads + rest. Its lower bound under operator overlap =
    max(compute + prefill attention, weights + KV reads) + rest. The prediction is ``overlap_kappa`` of the way from the
    bound to the serial time.

    Args:
        tile_tokens: matrix products take as long as those of the next multiple of this many tokens.
        overlaps_copies: copies of single slots run beside the step's work, so only the time beyond it counts. Otherwise
            the step waits for them.
    """

    def __init__(
        self, cost: StepCost, overlap_kappa: float = 1.0, tile_tokens: int = 1, overlaps_copies: bool = False
    ) -> None:
        if len(cost.gemm_curve_s) < 2:
            raise ValueError("the curve of matrix products needs at least the times of 1 and 2 tokens")
        self._cost = cost
        self._kappa = overlap_kappa
        self._tile_tokens = tile_tokens
        self._overlaps_copies = overlaps_copies
        curve = cost.gemm_curve_s
        self._last = len(curve) - 2
        self._knots = tuple(map(gemm_knot, range(len(curve))))
        widths = (after - before for before, after in pairwise(self._knots))
        self._slopes = tuple(
            (after - before) / width for (before, after), width in zip(pairwise(curve), widths, strict=True)
        )
        self._curve = curve

    def gemm_s(self, num_tokens: int) -> float:
        """Compute time of the matrix products."""
        if num_tokens <= 0:
            return 0.0
        if self._tile_tokens > 1:
            num_tokens += -num_tokens % self._tile_tokens
        k = bisect_right(self._knots, num_tokens) - 1
        if k > self._last:
            k = self._last
        return self._curve[k] + self._slopes[k] * (num_tokens - self._knots[k])

    def terms(self, shape: BatchShape) -> Terms:
        cost, decode_requests, prefill_requests = self._cost, shape.decode_requests, shape.prefill_requests
        num_tokens = shape.prefill_tokens + decode_requests
        compute_s = self.gemm_s(num_tokens) + cost.row_s * (prefill_requests + decode_requests)
        gemm_s = compute_s if compute_s > cost.weights_s else cost.weights_s
        attention_s = cost.pair_s * shape.prefill_attention_pairs + cost.masked_pair_s * shape.prefill_masked_pairs
        kv_s = cost.kv_token_s * read_kv_tokens(shape)
        if shape.shared_prefix_tokens:
            kv_s += cost.shared_kv_token_s * shape.shared_prefix_tokens
        if self._kappa != 1.0:
            serial_s = gemm_s + attention_s + kv_s
            if serial_s > 0.0:
                bound_s = max(compute_s + attention_s, cost.weights_s + kv_s)
                share = (bound_s + self._kappa * (serial_s - bound_s)) / serial_s
                gemm_s, attention_s, kv_s = gemm_s * share, attention_s * share, kv_s * share
        gemm_s += cost.token_s * num_tokens
        requests_s = (
            cost.decode_request_s * decode_requests
            + cost.prefill_request_s * prefill_requests
            + cost.ragged_s * raggedness(shape)
        )
        swap_s = cost.swap_block_s * shape.swapped_blocks
        if shape.copied_aside_blocks:
            copies_s = cost.swap_block_s * shape.copied_aside_blocks
            if self._overlaps_copies:
                work_s = cost.fixed_s + gemm_s + attention_s + kv_s + requests_s + swap_s
                copies_s = max(copies_s - work_s, 0.0)
            swap_s += copies_s
        return cost.fixed_s, gemm_s, attention_s, kv_s, requests_s, swap_s
