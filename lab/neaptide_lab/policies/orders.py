"""Fixed orders of the offline pool: BlendServe's DFS and Balance.

Source: BlendServe (ASPLOS'26), section 6.1: NanoFlow-DFS and NanoFlow-Balance are one engine with the same requests in
another order. The paper does not say which child of a prefix tree's node comes first; every depth-first order shares
the same text.
"""

from typing import ClassVar

from neaptide.policy import RowKey, TokenFile, VllmV1Fcfs

MASK_64 = (1 << 64) - 1


def by_prefix(tokens: TokenFile, row: int) -> bytes:
    """Sort key by token ids: a depth-first walk of the job's prefix tree, children by token id."""
    return tokens.sort_key(row)


def shuffled(seed: int) -> RowKey:
    """Sort key of a random order for each seed. It is a bijection of the line, so no two lines tie."""
    mixed_seed = mix(seed)
    return lambda tokens, row: mix(row ^ mixed_seed)


def mix(value: int) -> int:
    """Pseudo-random 64 bits, different for every value below 2**64 (splitmix64's increment and finalizer)."""
    value = (value + 1) * 0x9E3779B97F4A7C15 & MASK_64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK_64
    return value ^ value >> 31


class DepthFirstFcfs(VllmV1Fcfs):
    """Policy ``dfs``: requests that share a prefix run one after another."""

    row_key: ClassVar[RowKey | None] = staticmethod(by_prefix)


class ShuffledFcfs(VllmV1Fcfs):
    """Policy ``balance``: requests in random order, whatever their order of submission."""

    row_key: ClassVar[RowKey | None] = staticmethod(shuffled(seed=0))
