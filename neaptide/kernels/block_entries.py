"""Entries of block tables in Triton: ``block * 2 + is_reversed``."""

import triton
import triton.language as tl


@triton.jit
def slot_of(entry, offset, BLOCK_SIZE: tl.constexpr):
    """Where a token lies that is ``offset`` tokens behind the first of its block; a reversed block has its tokens from
    its last slot back."""
    offset = tl.where(entry % 2 == 1, BLOCK_SIZE - 1 - offset, offset)
    return (entry // 2).to(tl.int64) * BLOCK_SIZE + offset
