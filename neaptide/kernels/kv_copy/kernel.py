"""Triton kernel that copies KV slots of all layers in one launch; torch needs one launch per layer."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    kv_cache,
    copied,
    slots,
    layer_stride,
    LAYERS: tl.constexpr,
    ROW: tl.constexpr,
    LANES: tl.constexpr,
    INTO_CACHE: tl.constexpr,
):
    """Runs slots * LAYERS programs.

    ``kv_cache`` is [LAYERS, slots of the cache, ROW], with ``layer_stride`` elements from one layer to the next;
    ``copied`` is [slots, LAYERS, ROW].
    """
    program = tl.program_id(0).to(tl.int64)
    layer = program % LAYERS
    slot = tl.load(slots + program // LAYERS)
    lanes = tl.arange(0, LANES)
    inside = kv_cache + layer * layer_stride + slot * ROW + lanes
    outside = copied + program * ROW + lanes
    if INTO_CACHE:
        tl.store(inside, tl.load(outside, mask=lanes < ROW), mask=lanes < ROW)
    else:
        tl.store(outside, tl.load(inside, mask=lanes < ROW), mask=lanes < ROW)
