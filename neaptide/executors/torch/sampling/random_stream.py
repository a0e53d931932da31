"""Random numbers that depend on (seed, position) only: no state, no order, no device."""

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def request_seed(engine_seed: int, request_id: str) -> int:
    """Seed of a request without one: it differs between requests and repeats with the engine's seed."""
    key = (engine_seed & _MASK).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8, key=key).digest(), "little")


def uniforms(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), by SplitMix64's finaliser as a hash on the host.

    48 bits, so that a product with a sum of probabilities stays below that sum in float64.
    """
    seed_bits = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    position_bits = np.array(positions, dtype=np.uint64)
    mixed = _mix(_mix(seed_bits + _GOLDEN) ^ _mix(position_bits * _GOLDEN))
    return (mixed >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
