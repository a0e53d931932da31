"""A digest of the prefix cache, so that a router knows every second which prompts an engine has cached."""

from collections.abc import Collection

KEY_BYTES = 8
"""Bytes of a block's hash that are kept: two of a million cached prefixes collide with a probability of 3e-8."""
SAMPLED_BELOW = 32
"""Only hashes whose first byte is below this are kept: one block in eight, wherever it stands in a prompt. An engine of
25,000 blocks then sends 25 KB."""


def digest_of(block_hashes: Collection[bytes]) -> frozenset[bytes]:
    """Keys of the sampled blocks. A block's hash also names everything before it (hashes are chained)."""
    return frozenset(found[:KEY_BYTES] for found in block_hashes if found[0] < SAMPLED_BELOW)
