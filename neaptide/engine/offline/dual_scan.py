"""How memory is shared between the two ends of a list sorted by compute density.

BlendServe (ASPLOS'26), section 5.3 and Algorithm 3: the scanner takes compute-heavy requests from the left and
memory-heavy ones from the right, so that the batch has the density of the whole set.
"""

from typing import NamedTuple

from neaptide.engine.offline.density import chunk_budget


class Split(NamedTuple):
    """One quantity for each end."""

    left: float
    right: float


class Side(NamedTuple):
    """The requests at one end."""

    density: float
    input_tokens: float
    output_tokens: float
    """Estimated."""


def split_memory(memory: float, left_density: float, right_density: float, root_density: float) -> Split:
    """Solves ``M_L + M_R = M`` and ``M_L rho_L + M_R rho_R = M rho_root``.

    ``M_L = M (rho_root - rho_R) / (rho_L - rho_R)``, held within 0 and M: a root outside of the two cannot be met, and
    the nearer end then takes all. Equal densities leave the split open: each end gets half.

    Args:
        memory: in any unit; the parts come back in it.
        left_density: of the compute-heavy end.
        right_density: of the memory-heavy end.
        root_density: of the whole set.
    """
    if left_density == right_density:
        return Split(memory / 2.0, memory / 2.0)
    share = (root_density - right_density) / (left_density - right_density)
    left = memory * min(max(share, 0.0), 1.0)
    return Split(left, memory - left)


def prefill_budgets(
    memory_bytes: float, left: Side, right: Side, root_density: float, kv_bytes_per_token: float
) -> Split:
    """Prefill tokens per step for each end (Algorithm 3): the memory is split, and each part's steady state taken."""
    parts = split_memory(memory_bytes, left.density, right.density, root_density)
    tokens = (
        chunk_budget(part, side.input_tokens, side.output_tokens, kv_bytes_per_token)[1]
        for part, side in zip(parts, (left, right), strict=True)
    )
    return Split(*tokens)
