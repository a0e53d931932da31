"""Block table entries in Triton: ``block * 2 + is_reversed``."""

import triton
import triton.language as tl


@triton.jit
def slot_of(entry, offset, BLOCK_SIZE: tl.constexpr):
    """Cache slot of the token at ``offset`` in a block. A reversed block stores its tokens from its last slot
    backwards."""
    offset = tl.where(entry % 2 == 1, BLOCK_SIZE - 1 - offset, offset)
    return (entry // 2).to(tl.int64) * BLOCK_SIZE + offset
