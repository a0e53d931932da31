"""A digest of the prefix cache, so that a router knows every second which prompts an engine has cached."""

from collections.abc import Collection

KEY_BYTES = 8
"""Bytes kept of a block's hash. Among a million cached prefixes two keys collide with probability 3e-8."""
SAMPLED_BELOW = 32
"""Only hashes whose first byte is below this are kept: one block in eight, at any position. An engine of 25,000
blocks then sends 25 KB."""


def digest_of(block_hashes: Collection[bytes]) -> frozenset[bytes]:
    """Keys of the sampled blocks. Hashes are chained, so a block's hash identifies everything before it too."""
    return frozenset(found[:KEY_BYTES] for found in block_hashes if found[0] < SAMPLED_BELOW)
