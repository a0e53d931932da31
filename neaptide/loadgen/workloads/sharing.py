"""Measures how much of their prompts requests share."""

from collections.abc import Iterable
from dataclasses import dataclass

from neaptide.loadgen.workloads.traces import Segments


@dataclass(slots=True, frozen=True)
class Sharing:
    """Prompt tokens of a set, and those left with a prefix cache of unlimited size."""

    tokens: int
    unique_tokens: int
    """Tokens that must be computed: those of the prefix tree."""

    @property
    def ratio(self) -> float:
        """1 - unique/total: BatchLLM, Equation 2."""
        return 1 - self.unique_tokens / self.tokens if self.tokens else 0.0


def prefix_sharing(prompts: Iterable[Segments], block_size: int = 1) -> Sharing:
    """Counts the prompts' prefix tree in whole blocks, as a block-hashed cache does.

    Prompts share a block if they are equal up to its end. The tokens after a prompt's last whole block are never
    shared. With a block size of 1 the unique tokens are those of the tree itself.
    """
    tokens = unique = 0
    nodes: dict[tuple[int, int, int], int] = {}  # (parent, content, tokens) -> node
    reach: dict[tuple[int, int], tuple[int, int]] = {}  # (parent, content) -> (first token, end of the longest)
    for segments in prompts:
        parent = start = 0
        for content, length in segments:
            first, end = reach.get((parent, content), (start, start))
            reach[parent, content] = (first, max(end, start + length))
            parent = nodes.setdefault((parent, content, length), len(nodes) + 1)
            start += length
        tokens += start
        unique += start % block_size
    unique += sum(block_size * (end // block_size - first // block_size) for first, end in reach.values())
    return Sharing(tokens, unique)
